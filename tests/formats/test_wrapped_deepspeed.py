"""DeepSpeed's checkpoint inside Accelerate's `save_state` and inside Trainer's `checkpoint-N`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint

WRAPPED = Path(__file__).parent.parent / "golden" / "wrapped"
CASES = [("accelerate_z2", "accelerate"), ("trainer_z2", "huggingface")]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_values_are_the_engines(name: str, format: str):
    checkpoint = open_checkpoint(WRAPPED / name)
    truth = np.load(WRAPPED / name / "truth.npz")
    assert checkpoint.state.format == format
    for key in truth.files:
        assert np.array_equal(checkpoint.read(key), truth[key]), key
    steps = {key for key in checkpoint.state.tensors if key.startswith("optim.step:")}
    assert set(checkpoint.state.tensors) - steps == set(truth.files)


@pytest.mark.parametrize(("name", "format"), CASES)
def test_outer_and_inner_are_put_together(name: str, format: str):
    checkpoint = open_checkpoint(WRAPPED / name)
    report = inspect_checkpoint(checkpoint, deep=True)
    state = checkpoint.state
    assert report.complete
    assert report.intact is not False
    assert (state.topology.world_size, state.progress.update, state.progress.samples) == (2, 4, 16)
    assert state.rng
    assert state.scheduler
    assert "SR-ZERO-RIGID" in {problem.code for problem in report.problems}


@pytest.mark.parametrize(("name", "format"), CASES)
def test_a_missing_engine_file_makes_it_incomplete(name: str, format: str, tmp_path: Path):
    shutil.copytree(WRAPPED / name, tmp_path / name)
    next((tmp_path / name).rglob("zero_pp_rank_1_*")).unlink()
    report = inspect_checkpoint(open_checkpoint(tmp_path / name))
    assert not report.complete
    assert "SR-FILE-MISSING" in {problem.code for problem in report.problems}


def test_the_export_beside_is_said_to_be_one():
    codes = {problem.code for problem in open_checkpoint(WRAPPED / "trainer_z2").state.problems}
    assert "SR-HF-EXPORT" in codes
    assert "SR-KEY-TWICE" not in codes
    assert "SR-HF-EXPORT" not in {p.code for p in open_checkpoint(WRAPPED / "accelerate_z2").state.problems}

"""Every real Megatron checkpoint at hand reads equal to the live run that wrote it, value for value."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from samerun.core.box import check_tilings
from samerun.core.mesh import Layout
from samerun.core.state import Role
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.verify.structure import inspect_checkpoint
from support.corpus import CORPUS, corpus, needs_corpus
from support.megatron import GOLDEN, differences, read_tensors


def folders(name: str) -> list[str]:
    return sorted(path.name for path in (CORPUS / name).iterdir()) if CORPUS and (CORPUS / name).is_dir() else []


def golden() -> list[str]:
    return sorted(path.name for path in GOLDEN.iterdir() if (path / "truth.npz").exists())


def assert_exact(checkpoint: Checkpoint) -> None:
    tensors = checkpoint.state.tensors.values()
    assert all(cover.exact for cover in check_tilings([(entry.shape, entry.tiling) for entry in tensors]))


@needs_corpus
@pytest.mark.parametrize("case", folders("megatron"))
def test_checkpoints_equal_their_truth(case: str) -> None:
    folder = corpus("megatron") / case
    facts = json.loads((folder / "TRUTH.json").read_text())
    checkpoint = open_checkpoint(folder)
    truth = read_tensors(folder / "TRUTH.safetensors")
    # Gradients of these runs were random in padding rows too, so that padding was trained and is kept.
    assert differences(checkpoint, truth, facts["padded_vocab"], legacy=case.startswith("lg")) == []
    assert_exact(checkpoint)
    state, layout = checkpoint.state, facts["layout"]
    assert state.format == ("megatron-legacy" if case.startswith("lg") else "megatron")
    assert (state.progress.update, state.progress.samples) == (facts["iteration"], facts["consumed_train_samples"])
    assert state.topology.world_size == layout["world"]
    assert state.topology.layout == Layout(tp=layout["tp"], pp=layout["pp"], dp_shard=layout["dp"], ep=layout["ep"])
    assert list(state.rng) == [f"rank{rank}" for rank in range(layout["world"])]
    assert state.scheduler == facts["sched"]
    saved = [group for groups in facts["opt_groups"] for group in groups]
    assert [dict(group.hyperparameters) for group in state.groups] == saved
    trained = {entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.OPTIM}
    assert sorted(fqn for group in state.groups for fqn in group.params) == sorted(trained)
    steps = {float(checkpoint.read(f"optim.step:{fqn}")) for fqn in trained}
    assert steps == {3.0}


@pytest.mark.parametrize("case", golden())
def test_golden_checkpoints_equal_their_truth(case: str) -> None:
    facts = json.loads((GOLDEN / case / "truth.json").read_text())
    checkpoint = open_checkpoint(GOLDEN / case)
    truth = dict(np.load(GOLDEN / case / "truth.npz"))
    legacy = facts["case"]["legacy"]
    assert differences(checkpoint, truth, facts["case"]["vocab"], legacy=legacy) == []
    assert_exact(checkpoint)
    report = inspect_checkpoint(checkpoint, deep=True)
    assert report.complete
    assert report.resumable.verdict == "yes"
    assert not [problem for problem in report.problems if problem.severity.value == "error"]
    assert report.intact is (True if legacy else None)


@needs_corpus
@pytest.mark.parametrize(
    ("case", "code", "complete"),
    [
        ("bitflip_distcp", "SR-FILE-CRC", True),
        ("legacy_missing_rank", "SR-FILE-MISSING", False),
        ("metadata_json_zarr", "SR-MEG-BACKEND", True),
        ("missing_shard_file", "SR-FILE-MISSING", False),
        ("truncated_common_pt", "SR-MEG-COMMON", False),
    ],
)
def test_damaged_checkpoints_are_named(case: str, code: str, complete: bool) -> None:
    report = inspect_checkpoint(open_checkpoint(corpus("megatron-damaged") / case), deep=True)
    assert code in {problem.code for problem in report.problems}
    assert report.complete is complete
    assert report.intact is not True
    assert report.resumable.verdict == "no"


def test_values_do_not_depend_on_the_piece_that_is_asked_for() -> None:
    case: Path = GOLDEN / golden()[0]
    checkpoint = open_checkpoint(case)
    key = next(key for key in checkpoint.state.tensors if key.endswith("linear_fc1.weight"))
    whole = checkpoint.read(key)
    box = tuple(max(1, size - 1) for size in whole.shape)
    assert np.array_equal(checkpoint.read(key, tuple(0 for _ in box), box), whole[tuple(map(slice, box))])

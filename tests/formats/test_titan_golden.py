"""What torchtitan's own Trainer wrote is read equal to what model, optimizer and trainer held in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from samerun.core.box import check_tilings
from samerun.core.mesh import Layout
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.packed import packed_in, unpack

GOLDEN = Path(__file__).parents[1] / "golden" / "dcp"
CASES = {"titan_fsdp3": Layout(dp_shard=3), "titan_tp2_fsdp2": Layout(dp_shard=2, tp=2)}
# Fused projections go by other names in the optimizer; some rank's file holds no counter where steps are on every rank.
SAID = {"titan_fsdp3": {"SR-OPT-ORPHAN"}, "titan_tp2_fsdp2": {"SR-FILE-GENERATION-OPEN"}}
FULL, LAST = 3, 5


@pytest.fixture(scope="module", params=list(CASES))
def titan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(GOLDEN / f"{request.param}.tar.xz", tmp_path_factory.mktemp("titan"))


def truth_of(folder: Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns (tensors by key, everything else)."""
    found: dict[str, np.ndarray] = {}
    for name, value in np.load(folder / f"truth{step}.npz").items():
        kind, _, rest = name.partition(".")
        fqn, _, slot = rest.rpartition(".")
        found[f"param:{rest}" if kind == "model" else f"optim.{slot}:{fqn}"] = value
    return found, json.loads((folder / f"truth{step}.json").read_text())


def differing(checkpoint: Checkpoint, truth: dict[str, np.ndarray]) -> list[str]:
    assert set(checkpoint.state.tensors) == set(truth)
    return [key for key, value in truth.items() if checkpoint.read(key).tobytes() != value.tobytes()]


def test_every_golden_is_a_case() -> None:
    assert packed_in(GOLDEN) == sorted(CASES)


def test_the_whole_state_equals_the_trainer_s(titan: Path) -> None:
    checkpoint, (truth, facts) = open_checkpoint(titan / f"step-{FULL}"), truth_of(titan, FULL)
    state = checkpoint.state
    assert differing(checkpoint, truth) == []
    assert all(cover.exact for cover in check_tilings([(e.shape, e.tiling) for e in state.tensors.values()]))
    assert state.topology.layout == CASES[titan.name]
    assert state.progress.update == facts["step"] == FULL
    assert state.objects["train_state.ntokens_seen"] == facts["ntokens_seen"]
    assert state.scheduler == facts["lr_scheduler"]
    loaders = {name: value for held in facts["dataloaders"] for name, value in held.items()}
    assert state.data["dataloader"] == {**loaders, "world_size": len(loaders)}
    groups = [{**group.hyperparameters, "params": sorted(group.params)} for group in state.groups]
    assert len(groups) == len(facts["groups"])
    for held in facts["groups"]:
        names = held.pop("param_names")
        assert {**held, "params": sorted(names)} in groups
    report = inspect_checkpoint(checkpoint, deep=True)
    assert (report.complete, report.resumable.verdict, report.resumable.lack) == (True, "partial", ("rng",))
    assert {problem.code for problem in report.problems} == {"SR-DATA-PERRANK", "SR-RNG-MISSING", *SAID[titan.name]}


def test_weights_alone_are_those_of_the_last_update(titan: Path) -> None:
    checkpoint, (truth, _) = open_checkpoint(titan / f"step-{LAST}"), truth_of(titan, LAST)
    weights = {key: value.astype(ml_dtypes.bfloat16) for key, value in truth.items() if key.startswith("param:")}
    assert differing(checkpoint, weights) == []
    report = inspect_checkpoint(checkpoint)
    assert report.complete
    assert report.resumable.verdict == "no"
    assert "SR-OPT-MISSING" in {problem.code for problem in report.problems}


def test_one_flipped_bit_or_one_lost_file_shows(titan: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(titan / f"step-{FULL}", tmp_path / f"step-{FULL}")
    truth, _ = truth_of(titan, FULL)
    key = "optim.exp_avg_sq:layers.1.feed_forward.w2.weight"
    checkpoint = open_checkpoint(folder)
    extent = checkpoint.locate(key, len(checkpoint.state.tensors[key].tiling) - 1)
    flipped = bytearray(extent.file.read_bytes())
    flipped[extent.offset_bytes + 1] ^= 4
    extent.file.write_bytes(flipped)
    checkpoint = open_checkpoint(folder)
    assert differing(checkpoint, truth) == [key]
    report = inspect_checkpoint(checkpoint, deep=True)
    assert [p.where["file"] for p in report.problems if p.code == "SR-FILE-CRC"] == [str(extent.file)]
    assert report.intact is False
    extent.file.unlink()
    report = inspect_checkpoint(open_checkpoint(folder))
    assert not report.complete
    assert "SR-FILE-MISSING" in {problem.code for problem in report.problems}


def test_files_of_two_saves_are_not_one(titan: Path, tmp_path: Path) -> None:
    """The same ranks' names, another update: what is left of the save of weights alone does not fit."""
    folder = shutil.copytree(titan / f"step-{FULL}", tmp_path / f"step-{FULL}")
    shutil.copyfile(titan / f"step-{LAST}" / "__1_0.distcp", folder / "__1_0.distcp")
    report = inspect_checkpoint(open_checkpoint(folder), deep=True)
    assert not report.complete
    assert report.resumable.verdict == "no"

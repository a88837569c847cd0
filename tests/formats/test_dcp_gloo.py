"""DCP directories written by real gloo ranks read equal to the framework's own full state, and their layout is told."""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samerun.core.mesh import Layout
from samerun.core.state import Role
from samerun.errors import Severity
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support import toy
from support.gloo import run_ranks

pytestmark = pytest.mark.multiprocess

LAYOUTS = {
    "fsdp 3": Layout(dp_shard=3),
    "fsdp 4": Layout(dp_shard=4),
    "hsdp 2x2": Layout(dp_replicate=2, dp_shard=2),
    "tp 2 x fsdp 2": Layout(dp_shard=2, tp=2),
    "tp 2": Layout(tp=2),
    "ddp 2": Layout(dp_replicate=2),
}


@pytest.fixture(scope="module", autouse=True)
def warm():
    for module in ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo"):
        importlib.import_module(module)


def write(rank: int, world_size: int, layout: Layout, folder: str, bf16: bool) -> dict[str, np.ndarray]:
    job = toy.build(layout, dtype=torch.bfloat16 if bf16 else torch.float32)
    toy.train(job, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        toy.save(job, Path(folder))
    state = toy.full_state(job)
    return state if rank == 0 else {}


def saved(layout: Layout, folder: Path, *, bf16: bool = False) -> dict[str, np.ndarray]:
    return run_ranks(layout.world_size, write, layout, str(folder), bf16)[0]


@pytest.mark.parametrize(
    ("name", "bf16"), [*((name, False) for name in LAYOUTS), ("fsdp 3", True), ("tp 2 x fsdp 2", True)]
)
def test_values_equal_the_framework_s_full_state(name: str, bf16: bool, tmp_path: Path):
    layout = LAYOUTS[name]
    expected = saved(layout, tmp_path / "step-2", bf16=bf16)
    checkpoint = open_checkpoint(tmp_path / "step-2")
    roles = (
        {"param:position": "buffer:position"} if layout.dp_shard == 1 else {}
    )  # a frozen tensor may pass for a buffer
    for key, value in expected.items():
        found = checkpoint.read(roles.get(key, key) if roles.get(key) in checkpoint.state.tensors else key)
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes()), key
    assert len(checkpoint.state.tensors) == len(expected)
    (owner,) = [entry for entry in checkpoint.state.tensors.values() if entry.aliases]
    assert (owner.key.fqn, owner.aliases) == ("tok.weight", ("head.weight",))
    report = inspect_checkpoint(checkpoint, deep=True)
    assert report.complete
    assert report.intact is not False
    assert not [problem for problem in report.problems if problem.severity is Severity.ERROR]
    assert checkpoint.state.topology.world_size == layout.world_size
    assert checkpoint.state.topology.layout == layout
    assert checkpoint.state.progress.update == 2


def test_one_rank_s_shard_missing_is_named(tmp_path: Path):
    saved(Layout(dp_shard=3), tmp_path / "step-2")
    os.unlink(tmp_path / "step-2" / "__1_0.distcp")
    report = inspect_checkpoint(open_checkpoint(tmp_path / "step-2"))
    assert {problem.code for problem in report.problems if problem.severity is Severity.ERROR} == {"SR-FILE-MISSING"}
    assert report.complete is False
    assert report.resumable.verdict == "no"


def test_rank_files_swapped_are_named(tmp_path: Path):
    saved(Layout(dp_shard=4), tmp_path / "step-2")
    folder = tmp_path / "step-2"
    for source, target in (("__0_0", "swap"), ("__3_0", "__0_0"), ("swap", "__3_0")):
        shutil.move(folder / f"{source}.distcp", folder / f"{target}.distcp")
    report = inspect_checkpoint(open_checkpoint(folder))
    assert report.complete is False
    (cut,) = [problem for problem in report.problems if problem.code == "SR-FILE-TRUNCATED"]
    names = {"__0_0.distcp", "__3_0.distcp"}
    assert {Path(cut.where["file"]).name, cut.hint.split()[0]} == names
    assert "did files change names?" in cut.hint


def test_a_cut_file_is_not_called_exchanged(tmp_path: Path):
    saved(Layout(dp_shard=4), tmp_path / "step-2")
    shard = tmp_path / "step-2" / "__3_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    report = inspect_checkpoint(open_checkpoint(tmp_path / "step-2"))
    (cut,) = [problem for problem in report.problems if problem.code == "SR-FILE-TRUNCATED"]
    assert cut.hint.startswith("restore the file")


def test_a_smaller_save_over_a_larger_one_leaves_stale_files(tmp_path: Path):
    saved(Layout(dp_shard=4), tmp_path / "step-2")
    saved(Layout(dp_shard=2), tmp_path / "step-2")
    report = inspect_checkpoint(open_checkpoint(tmp_path / "step-2"))
    (stale,) = [problem for problem in report.problems if problem.code == "SR-FILE-STALE"]
    assert "__2_0.distcp, __3_0.distcp" in stale.message
    assert report.complete
    assert report.state.topology.world_size == 2


def write_untied(rank: int, world_size: int, folder: str) -> None:
    job = toy.build(Layout(dp_shard=2), config=toy.Config(tied=False))
    toy.train(job, 1)
    toy.save(job, Path(folder))


def test_a_head_that_is_not_tied_is_not_made_an_alias(tmp_path: Path):
    run_ranks(2, write_untied, str(tmp_path / "step-1"))
    state = open_checkpoint(tmp_path / "step-1").state
    assert "param:head.weight" in state.tensors
    assert not any(entry.aliases for entry in state.tensors.values())


def write_fresh(rank: int, world_size: int, folder: str) -> None:
    """Before any update: no moments, and every norm weight is one."""
    job = toy.build(Layout(dp_shard=2))
    state: dict[str, Any] = {"model": dict(job.model.state_dict())}
    state["model"]["other_norm.weight"] = torch.ones(18)
    state["model"]["other_norm.bias"] = torch.zeros(18)
    import torch.distributed.checkpoint as dcp

    with toy.quiet():
        dcp.save(state, checkpoint_id=folder)


def test_norms_that_are_all_ones_are_not_tied(tmp_path: Path):
    run_ranks(2, write_fresh, str(tmp_path / "ckpt"))
    state = open_checkpoint(tmp_path / "ckpt").state
    ties = {entry.key.fqn: entry.aliases for entry in state.tensors.values() if entry.aliases}
    assert ties == {"tok.weight": ("head.weight",)}
    assert {entry.key.role for entry in state.tensors.values()} == {Role.PARAM, Role.BUFFER}

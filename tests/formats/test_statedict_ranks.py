"""State that real ranks save here and now, at degrees that do not divide, reads equal to the framework's full state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from samerun.core.mesh import Layout
from samerun.errors import CorruptCheckpoint
from samerun.formats.detect import open_checkpoint
from support import rankfiles
from support.gloo import run_ranks

pytestmark = pytest.mark.multiprocess


def assert_equal(folder: Path, truth: rankfiles.Tensors, *, flat: bool = False) -> list[str]:
    """Compares all tensors; returns the codes of findings."""
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.state.tensors) == set(truth)
    for key, value in truth.items():
        found = checkpoint.read(key)
        assert np.array_equal(found.reshape(value.shape) if flat else found, value), key
        assert found.dtype == value.dtype
    return [problem.code for problem in checkpoint.state.problems]


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=3), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2, tp=2)],
    ids=["fsdp2", "hsdp", "tp x fsdp2"],
)
def test_pickled_dtensors_are_placed_by_mesh_and_placements(layout: Layout, tmp_path: Path):
    truth = run_ranks(layout.world_size, rankfiles.write_fsdp2, layout, tmp_path, True)[0]
    assert assert_equal(tmp_path, truth) == ["SR-OPT-ORDER"]
    topology = open_checkpoint(tmp_path).state.topology
    assert (topology.world_size, topology.layout, topology.inferred) == (layout.world_size, layout, None)


def test_groups_of_replicas_among_bare_shards_are_found(tmp_path: Path):
    layout = Layout(dp_replicate=2, dp_shard=2)
    truth = run_ranks(4, rankfiles.write_fsdp2, layout, tmp_path, False)[0]
    codes = assert_equal(tmp_path, truth)
    assert codes == ["SR-RANK-INFERRED", "SR-RANK-GEOMETRY", "SR-OPT-ORDER"]
    assert open_checkpoint(tmp_path).state.topology.layout == layout


def test_replicas_are_one_tensor_each(tmp_path: Path):
    layout = Layout(dp_replicate=3)
    truth = run_ranks(3, rankfiles.write_fsdp2, layout, tmp_path, False)[0]
    assert assert_equal(tmp_path, truth) == ["SR-OPT-ORDER", "SR-NAME-WRAPPED"]
    state = open_checkpoint(tmp_path).state
    assert state.topology.layout == layout
    assert len(state.tensors["param:tok.weight"].tiling) == 3


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_full_sharded_and_local(use_orig_params: bool, tmp_path: Path):
    truth = run_ranks(3, rankfiles.write_fsdp1, tmp_path, use_orig_params)[0]
    assert assert_equal(tmp_path / "full.pt", truth) == []
    assert assert_equal(tmp_path / "sharded", truth) == []
    if use_orig_params:
        assert assert_equal(tmp_path / "local", truth, flat=True) == ["SR-FSDP1-SHAPES", "SR-OPT-ORDER"]
        return
    checkpoint = open_checkpoint(tmp_path / "local")
    assert [problem.code for problem in checkpoint.state.problems] == ["SR-FSDP1-BOUNDARIES", "SR-OPT-ORDER"]
    inside = [name for name in truth if name.startswith("param:mlp.")]
    for role, slot in (("param", "param"), ("optim.exp_avg_sq", "optim.exp_avg_sq")):
        values = [truth[name.replace("param", slot, 1)].reshape(-1) for name in inside]
        assert np.array_equal(checkpoint.read(f"{role}:mlp._flat_param"), np.concatenate(values))


def test_moments_that_fsdp1_gathered_into_one_buffer_are_found(tmp_path: Path):
    truth = run_ranks(3, rankfiles.write_fsdp1, tmp_path, True, True)[0]
    assert np.array_equal(truth["optim.exp_avg:norm.weight"], truth["optim.exp_avg_sq:norm.weight"])
    problems = open_checkpoint(tmp_path / "full.pt").state.problems
    assert [problem.code for problem in problems] == ["SR-OPT-SHARED"]


def test_tied_weights_leave_empty_files_that_are_named(tmp_path: Path):
    """torch's HuggingFaceStorageWriter opens its files before it notices that two names share a tensor."""
    with pytest.raises((RuntimeError, OSError)):
        run_ranks(2, rankfiles.write_tied_safetensors, tmp_path)
    written = sorted(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert written
    assert written[0] == 0
    try:
        problems = open_checkpoint(tmp_path).state.problems
    except CorruptCheckpoint as error:  # where both ranks failed before the first byte
        problems = error.problems
    assert "SR-FILE-EMPTY" in {problem.code for problem in problems}

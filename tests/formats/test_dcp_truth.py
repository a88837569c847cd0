"""Every real DCP directory at hand reads equal to the live run it was saved from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from support.corpus import CORPUS, corpus, needs_corpus, read_truth, read_truth_json

pytestmark = needs_corpus

# folder, checkpoint in it, ranks, layout, update, samples, sections with random number generators
CASES = {
    "single": ("dcp_single", "ckpt", 1, Layout(), 5, 10, 2),
    "fsdp2 on 1": ("dcp_fsdp2_ws1", "ckpt", 1, Layout(), 5, 10, 2),
    "fsdp2 on 2": ("dcp_fsdp2_ws2", "ckpt", 2, Layout(dp_shard=2), 5, 20, 3),
    "fsdp2 on 2, three files per rank": ("dcp_fsdp2_ws2_threads3", "ckpt", 2, Layout(dp_shard=2), 5, 20, 3),
    "fsdp2 on 3": ("dcp_fsdp2_ws3", "ckpt", 3, Layout(dp_shard=3), 5, 30, 4),
    "fsdp2 on 4": ("dcp_fsdp2_ws4", "ckpt", 4, Layout(dp_shard=4), 5, 40, 5),
    "fsdp2 on 4, bf16": ("dcp_fsdp2_ws4_bf16", "ckpt", 4, Layout(dp_shard=4), 5, 40, 5),
    "hsdp": ("dcp_hsdp_2x2", "ckpt", 4, Layout(dp_replicate=2, dp_shard=2), 5, 40, 5),
    "tp": ("dcp_tp2", "ckpt", 2, Layout(tp=2), 5, 10, 3),
    "tp x fsdp2": ("dcp_tpfsdp_dp2tp2", "ckpt", 4, Layout(dp_shard=2, tp=2), 5, 20, 5),
    "ddp": ("dcp_ddp_ws2", "ckpt", 2, Layout(dp_replicate=2), 5, 20, 3),
    "pp, flattened": ("dcp_pp2", "ckpt", 2, Layout(pp=2), 5, None, 0),
    "pp, nested": ("dcp_pp2", "naive_nonflat", 2, Layout(pp=2), 5, None, 0),
    "without collectives": ("nocoll_fsdp2_ws2", "ckpt", 2, Layout(dp_shard=2), 5, 20, 3),
    "fsdp1, flat parameters": ("fsdp1_ws2_flat", "sharded_dcp", 2, Layout(dp_shard=2), 5, None, 0),
    "fsdp1, original parameters": ("fsdp1_ws2_orig", "sharded_dcp", 2, Layout(dp_shard=2), 5, None, 0),
    "torchtitan": ("titan_fsdp_dp2", "checkpoint/step-5", 2, Layout(dp_shard=2), 5, None, 0),
    "accelerate, optimizer": ("accel_fsdp2_sharded_ws2", "state/optimizer_0", 2, Layout(dp_shard=2), 5, None, 0),
    "accelerate, model": (
        "accel_fsdp2_sharded_ws2", "state/pytorch_model_fsdp_0", 2, Layout(dp_shard=2), None, None, 0,
    ),
}  # fmt: skip


def test_every_dcp_directory_at_hand_is_a_case():
    assert CORPUS is not None
    found = {
        path.parent.relative_to(CORPUS / "torch").as_posix()
        for pattern in (".metadata", "__0.metadata")
        for path in (CORPUS / "torch").rglob(pattern)
    }
    assert found == {f"{folder}/{inner}" for folder, inner, *_ in CASES.values()}


def find(state: LogicalState, name: str) -> TensorEntry | None:
    """Returns the entry of a truth tensor: `model.<fqn>` or `optim.<fqn>.<slot>`; an alias's is its owner's."""
    kind, _, rest = name.partition(".")
    if kind == "optim":
        fqn, _, slot = rest.rpartition(".")
        return state.tensors.get(f"optim.{slot}:{fqn}")
    named = [state.tensors.get(f"{role}:{rest}") for role in ("param", "buffer")]
    aliased = [entry for entry in state.tensors.values() if rest in entry.aliases]
    return next((entry for entry in (*named, *aliased) if entry is not None), None)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Any:
    return (request.param, *CASES[request.param])


def opened(folder: str, inner: str) -> tuple[Checkpoint, Path]:
    return open_checkpoint(corpus(f"torch/{folder}/{inner}")), corpus(f"torch/{folder}")


def test_values_equal_the_live_run(case: Any):
    name, folder, inner, *_ = case
    checkpoint, root = opened(folder, inner)
    truth = read_truth(root)
    if name.startswith("accelerate"):
        kept = "optim." if "optimizer" in name else "model."
        truth = {key: value for key, value in truth.items() if key.startswith(kept)}
    seen: set[str] = set()
    for key, value in truth.items():
        entry = find(checkpoint.state, key)
        assert entry is not None, key
        assert same_bits(checkpoint.read(str(entry.key)), value), key
        seen.add(str(entry.key))
    assert seen == set(checkpoint.state.tensors)


def test_groups_equal_the_live_run(case: Any):
    name, folder, inner, *_ = case
    checkpoint, root = opened(folder, inner)
    truth = read_truth_json(root)["groups"]
    found = [{**group.hyperparameters, "params": list(group.params)} for group in checkpoint.state.groups]
    expected = [dict(group) for group in truth]
    for group in expected:
        group["params"] = group.pop("param_names", group["params"])
    if name == "accelerate, model":
        assert found == []
    elif name == "pp, nested":
        kept = {fqn for group in found for fqn in group["params"]}
        assert {fqn for fqn in kept if fqn.startswith("layers.0")} == set()
        assert [group["lr"] for group in found] == [group["lr"] for group in expected]
    else:
        assert found == expected


def test_position_equals_the_live_run(case: Any):
    _, folder, inner, ranks, layout, update, samples, streams = case
    checkpoint, root = opened(folder, inner)
    state = checkpoint.state
    assert state.topology.world_size == ranks
    assert state.topology.layout == layout
    assert state.topology.inferred
    assert (state.progress.update, state.progress.samples) == (update, samples)
    assert len(state.rng) == streams
    scheduler = read_truth_json(root).get("sched")
    if scheduler and inner == "ckpt":
        assert state.scheduler is not None
        assert scheduler.items() <= state.scheduler.items()


@pytest.mark.parametrize(
    ("folder", "inner"), [(folder, inner) for folder, inner, *_ in CASES.values() if folder.startswith(("dcp_", "no"))]
)
def test_ties_are_those_of_the_live_run(folder: str, inner: str):
    checkpoint, root = opened(folder, inner)
    tied = {owner: tuple(names) for owner, *names in read_truth_json(root).get("tied", [])}
    found = {entry.key.fqn: entry.aliases for entry in checkpoint.state.tensors.values() if entry.aliases}
    assert found == tied


def test_what_the_optimizer_knows_is_a_parameter_and_the_rest_says_it_is_inferred():
    state = opened("dcp_fsdp2_ws4", "ckpt")[0].state
    roles = {
        entry.key.fqn: (entry.key.role, entry.role_inferred) for entry in state.tensors.values() if not entry.key.slot
    }
    assert roles["emb.weight"] == roles["frozen"] == (Role.PARAM, False)
    assert roles["pos"] == roles["seen"] == (Role.BUFFER, True)


def test_boxes_are_read_across_pieces():
    checkpoint, root = opened("dcp_tpfsdp_dp2tp2", "ckpt")
    for name in ("emb.weight", "layers.0.attn.wo.weight", "layers.1.ffn.w2.weight"):
        truth = read_truth(root)[f"model.{name}"]
        for row, column, rows, columns in ((0, 0, 5, 7), (11, 13, 17, 16), (29, 29, 1, 1), (7, 0, 0, 3)):
            box = checkpoint.read(f"param:{name}", (row, column), (rows, columns))
            assert same_bits(box, np.ascontiguousarray(truth[row : row + rows, column : column + columns]))


def test_extents_are_where_the_values_lie():
    checkpoint, _ = opened("dcp_fsdp2_ws4_bf16", "ckpt")
    for key, entry in checkpoint.state.tensors.items():
        for piece in range(len(entry.tiling)):
            extent = checkpoint.locate(key, piece)
            if extent.num_bytes:
                with open(extent.file, "rb") as file:
                    file.seek(extent.offset_bytes)
                    assert file.read(extent.num_bytes) == checkpoint.read_piece(key, piece).tobytes()

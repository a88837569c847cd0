"""Every finding about Megatron checkpoints: provoked by one edit of a real checkpoint, and silent without it."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samerun.core.mesh import Layout
from samerun.errors import CorruptCheckpoint
from samerun.formats.detect import open_checkpoint
from samerun.formats.mcore.destination import check_distributed, check_encoding
from samerun.formats.mcore.flat import Local, Target, plan_buckets, plan_slots
from samerun.formats.mcore.held import HeldCheckpoint
from samerun.formats.mcore.run import Run
from samerun.formats.mcore.values import _blocks
from samerun.verify.inspection.structure import inspect_checkpoint
from support.megatron import codes, copy_golden, edit_saved, overwrite

DISTRIBUTED, LEGACY = "fr_tp2pp2", "lg_dist_tied_pp2_dp2"
ROUNDED = "master:decoder.layers.mlp.linear_fc1.weight"


def args(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: vars(state["args"]).update(changes)


def group(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["optimizer"]["optimizer"]["param_groups"][0].update(changes)


def deep(root: Path) -> set[str]:
    return {problem.code for problem in inspect_checkpoint(open_checkpoint(root), deep=True).problems}


COMMON: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("SR-MEG-ARGS", lambda state: state.pop("args")),
    ("SR-MEG-GROUPS", group(wd_mult=0.0)),
    ("SR-MEG-VOCABOPEN", args(vocab_size=None)),
    ("SR-MEG-VOCABUSED", args(vocab_size=20)),
    ("SR-MEG-SCHEDULE", lambda state: state["opt_param_scheduler"].update(num_steps=35)),
    ("SR-MEG-ROUTER", args(num_experts=4)),
    ("SR-MEG-EXPERTS", args(num_experts=4)),
    ("SR-MEG-LAYERS", args(num_layers=5)),
    ("SR-MEG-UNVERIFIED", args(transformer_impl="transformer_engine")),
]


@pytest.mark.parametrize(("code", "edit"), COMMON, ids=[code for code, _ in COMMON])
def test_common_state(code: str, edit: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    root = copy_golden(DISTRIBUTED, tmp_path)
    assert code not in codes(open_checkpoint(root))
    edit_saved(root / "common.pt", edit)
    assert code in codes(open_checkpoint(root))


def test_files_beside_the_metadata(tmp_path: Path) -> None:
    root = copy_golden(DISTRIBUTED, tmp_path)
    clean = codes(open_checkpoint(root))
    assert not clean & {"SR-MEG-JSON", "SR-MEG-BACKEND", "SR-MEG-COMMON", "SR-MEG-NOTRACKER", "SR-MEG-TRACKED"}
    assert "SR-MEG-VOCAB" in clean
    table = json.loads((root / "metadata.json").read_text())
    (root / "metadata.json").write_text(json.dumps({**table, "sharded_backend": "zarr"}))
    assert "SR-MEG-BACKEND" in codes(open_checkpoint(root))
    (root / "metadata.json").write_text("{")
    assert "SR-MEG-JSON" in codes(open_checkpoint(root))
    (root / "metadata.json").unlink()
    assert "SR-MEG-JSON" in codes(open_checkpoint(root))
    (root / "metadata.json").write_text(json.dumps(table))
    (root / "common.pt").write_bytes((root / "common.pt").read_bytes()[:900])
    assert "SR-MEG-COMMON" in codes(open_checkpoint(root))
    (root / "common.pt").unlink()
    assert "SR-MEG-COMMON" in codes(open_checkpoint(root))


def test_trackers(tmp_path: Path) -> None:
    root = copy_golden(DISTRIBUTED, tmp_path)
    tracker = root.parent / "latest_checkpointed_iteration.txt"
    tracker.write_text("release")
    assert "SR-MEG-TRACKED" in codes(open_checkpoint(root))
    with pytest.raises(CorruptCheckpoint, match="SR-PATH-TRACKER"):
        open_checkpoint(root.parent)
    root.rename(root.parent / "release")
    assert open_checkpoint(root.parent).path.name == "release"
    tracker.unlink()
    assert "SR-MEG-NOTRACKER" in codes(open_checkpoint(root.parent / "release"))


def test_missing_shards_of_objects(tmp_path: Path) -> None:
    root = copy_golden(DISTRIBUTED, tmp_path)
    assert "SR-MEG-OBJECT" not in codes(open_checkpoint(root))
    metadata = pickle.loads((root / ".metadata").read_bytes())
    name = "decoder.layers.mlp.linear_fc1._extra_state/shard_2_4"
    del metadata.state_dict_metadata[name]
    metadata.storage_data = {key: value for key, value in metadata.storage_data.items() if key.fqn != name}
    (root / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    assert "SR-MEG-OBJECT" in codes(open_checkpoint(root))


def test_masters_against_weights(tmp_path: Path) -> None:
    root = copy_golden(DISTRIBUTED, tmp_path)
    assert not deep(root) & {"SR-MEG-MASTER", "SR-MEG-ROUNDED", "SR-MEG-REPLICA"}
    checkpoint = open_checkpoint(root)
    assert isinstance(checkpoint, HeldCheckpoint)
    weights = checkpoint.state.tensors["param:decoder.layers.mlp.linear_fc1.weight"].dtype
    assert weights.name == "bfloat16"

    def rounded(values: np.ndarray) -> np.ndarray:
        return torch.from_numpy(values).bfloat16().float().numpy()

    overwrite(checkpoint, ROUNDED, rounded)
    assert "SR-MEG-ROUNDED" in deep(root)
    overwrite(checkpoint, ROUNDED, lambda values: values + 1)
    assert "SR-MEG-MASTER" in deep(root)


RANK: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("SR-MEG-RANKS", lambda state: state.update(iteration=4)),
    ("SR-MEG-SWAPPED", args(rank=0)),
    ("SR-MEG-SETTINGS", group(lr=0.5)),
    ("SR-MEG-SPLIT", lambda state: state["model"].update(odd=state["model"].pop("decoder.final_layernorm.weight"))),
    ("SR-MEG-LAYOUT", lambda state: state["model"].pop("decoder.layers.0.mlp.linear_fc1.weight")),
]


@pytest.mark.parametrize(("code", "edit"), RANK, ids=[code for code, _ in RANK])
def test_files_of_ranks(code: str, edit: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    root = copy_golden(LEGACY, tmp_path)
    assert code not in codes(open_checkpoint(root))
    if code == "SR-MEG-SPLIT":
        for folder in root.iterdir():
            edit_saved(folder / "model_optim_rng.pt", args(tensor_model_parallel_size=2))
    edit_saved(root / "mp_rank_00_001" / "model_optim_rng.pt", edit)
    assert code in codes(open_checkpoint(root))


def test_values_of_ranks(tmp_path: Path) -> None:
    root = copy_golden(LEGACY, tmp_path)
    last = root / "mp_rank_00_001"
    assert not deep(root) & {"SR-MEG-REPLICA", "SR-MEG-ORDER", "SR-MEG-MASTER"}
    edit_saved(last / "model_optim_rng.pt", lambda state: state["model"]["output_layer.weight"].add_(1))
    assert "SR-MEG-REPLICA" in deep(root)
    edit_saved(last / "distrib_optim.pt", lambda state: next(iter(state[0].values()))["param"].zero_())
    assert "SR-MEG-ORDER" in codes(open_checkpoint(root))
    (last / "distrib_optim.pt").unlink()
    assert "SR-FILE-MISSING" in codes(open_checkpoint(root))


def refusals(name: str, tmp_path: Path, layout: str) -> set[str]:
    checkpoint: Any = open_checkpoint(copy_golden(name, tmp_path))
    return {problem.code for problem in checkpoint.check_destination(Layout.parse(layout))}


def test_destinations(tmp_path: Path) -> None:
    assert refusals(DISTRIBUTED, tmp_path / "a", "tp=1,dp_shard=3") == set()
    assert refusals(DISTRIBUTED, tmp_path / "b", "tp=3,pp=3") == {"SR-MEG-UNEVEN"}
    assert refusals(LEGACY, tmp_path / "c", "pp=2,dp_shard=2") == set()
    assert refusals(LEGACY, tmp_path / "d", "tp=2") == {"SR-MEG-RIGID"}
    assert refusals(LEGACY, tmp_path / "e", "pp=2,dp_shard=3") == {"SR-MEG-RIGID"}


@pytest.mark.parametrize(
    ("encoding", "ep", "layout", "refused"),
    [
        ("dp_reshardable", 1, "dp_shard=6", False),
        ("dp_reshardable", 1, "tp=2,dp_shard=2", True),
        ("dp_zero_gather_scatter", 1, "pp=2,dp_shard=2", True),
        ("fully_sharded_model_space", 1, "dp_shard=4", True),
        ("fully_reshardable", 1, "tp=2,dp_shard=2", False),
        ("fully_reshardable", 2, "tp=2,dp_shard=2", True),
        ("fully_reshardable", 2, "dp_shard=2,ep=2", True),
        ("plain", 1, "tp=2,pp=2", False),
    ],
)
def test_encodings_and_destinations(encoding: str, ep: int, layout: str, refused: bool) -> None:
    run = Run(world_size=4, ep=ep)
    found = check_distributed(run, {encoding}, Layout.parse(layout), Path("x"))
    assert bool(found) is refused


def test_encodings_say_what_they_are_bound_to() -> None:
    def code(encoding: str) -> list[str]:
        return [problem.code for problem in check_encoding({encoding}, Run(), Path("x"))]

    assert code("fully_sharded_model_space") == ["SR-MEG-OLDENCODING"]
    assert code("dp_reshardable") == ["SR-MEG-BOUND"]
    assert code("fully_reshardable") == code("plain") == []


def test_buckets_are_worked_out_and_filled() -> None:
    def local(name: str, count: int, *, own: bool = False) -> Local:
        return Local(name, (count,), (Target(name, (count,), ()),), "bfloat16", own_bucket=own)

    params = [local("a", 70, own=True), local("b", 10), local("c", 65)]
    assert plan_buckets(params, None) == [192, 70]
    slots = plan_slots(params, [192, 70])
    assert slots is not None
    assert [(slot.local.name, slot.bucket, slot.start) for slot in slots] == [("c", 0, 0), ("b", 0, 128), ("a", 1, 0)]
    assert plan_slots(params, [140, 70]) is None
    assert plan_buckets([local("a", 70), local("b", 10)], 64) == [134]


def test_fsdp_dtensor_is_read_and_said_to_be_unverified(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    root = tmp_path / "iter_0000002"
    state = {
        "model": {"module.a.weight": torch.arange(6.0).reshape(2, 3)},
        "optimizer": {
            "state": {"module.a.weight": {"exp_avg": torch.ones(2, 3)}},
            "param_to_group_meta": {"module.a.weight": {"lr": 0.1, "step": 2}},
        },
        "iteration": 2,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process
        dcp.save(state, checkpoint_id=str(root), no_dist=True)
    assert open_checkpoint(root).state.format == "dcp"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.state.format == "megatron"
    assert "SR-MEG-UNVERIFIED" in codes(checkpoint)
    assert np.array_equal(checkpoint.read("param:a.weight"), np.arange(6.0).reshape(2, 3))
    assert np.array_equal(checkpoint.read("optim.exp_avg:a.weight"), np.ones((2, 3)))
    assert checkpoint.state.groups[0].params == ("a.weight",)


def test_values_are_compared_in_blocks() -> None:
    """A stack of layers is one piece: cast as a whole it would take several times its size."""
    first = np.arange(3 * 5 * 700_001, dtype=np.float32).reshape(1, 3, 5, 700_001)
    parts = list(_blocks(first, first * 2))
    assert max(part.nbytes for part, _ in parts) < first.nbytes / 2
    assert np.array_equal(np.concatenate([part for part, _ in parts], axis=1), first)
    assert all(np.array_equal(part * 2, other) for part, other in parts)
    assert len(list(_blocks(first[:, :, :, 0], first[:, :, :, 0]))) == 1


@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_an_empty_rank_file_is_told_once(file: str, tmp_path: Path) -> None:
    root = copy_golden(LEGACY, tmp_path)
    damaged = root / "mp_rank_00_001" / file
    damaged.write_bytes(b"")
    report = inspect_checkpoint(open_checkpoint(root))
    told = [problem.code for problem in report.problems if str(problem.where.get("file")) == str(damaged)]
    assert told == ["SR-FILE-TRUNCATED"]
    assert not report.complete
    damaged.unlink()
    told = [
        problem.code for problem in inspect_checkpoint(open_checkpoint(root)).problems if problem.code[3:7] == "FILE"
    ]
    assert told == ["SR-FILE-MISSING"]

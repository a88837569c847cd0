"""Every real checkpoint of saved state dicts at hand reads equal to the live run it was saved from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from support.corpus import corpus, needs_corpus, read_truth, read_truth_json

pytestmark = needs_corpus

# folder, checkpoint in it, format, ranks (None: the files do not say), samples, sections with generators
CASES = {
    "torch.save under DDP": ("torchsave_ddp_ws2", "checkpoint_5.pt", "torch", None, None, 1),
    "FSDP1 full, flat": ("fsdp1_ws2_flat", "full.pt", "torch", None, None, 1),
    "FSDP1 full, original": ("fsdp1_ws2_orig", "full.pt", "torch", None, None, 1),
    "FSDP1 sharded, flat": ("fsdp1_ws2_flat", "sharded_torchsave", "fsdp1", 2, None, 0),
    "FSDP1 sharded, original": ("fsdp1_ws2_orig", "sharded_torchsave", "fsdp1", 2, None, 0),
    "one file per rank": ("ranklocal_fsdp2_ws3", "", "ranklocal", 3, None, 1),
    "Trainer": ("hf_trainer_ws2", "checkpoint-5", "huggingface", 2, 20, 2),
    "Trainer export": ("hf_trainer_ws2", "sharded_export", "huggingface", None, None, 0),
    "Accelerate, DDP": ("accel_ddp_stateful_ws2", "state", "accelerate", 2, None, 2),
    "Accelerate, FSDP2 sharded": ("accel_fsdp2_sharded_ws2", "state", "accelerate", 2, None, 2),
    "Lightning": ("lightning_ddp_ws2", "step5.ckpt", "lightning", None, None, 0),
    "HuggingFaceStorageWriter, sharded": ("hfdcp_fsdp2_ws3", "sharded", "safetensors", 3, None, 0),
    "HuggingFaceStorageWriter, with objects": ("hfdcp_fsdp2_ws3", "with_bytes", "safetensors", 3, None, 0),
    "HuggingFaceStorageWriter, consolidated": ("hfdcp_fsdp2_ws3", "consolidated", "safetensors", None, None, 0),
    "HuggingFaceStorageWriter, before consolidation": (
        "hfdcp_fsdp2_ws3", "consolidated/sharded", "safetensors", 3, None, 0,
    ),
}  # fmt: skip
MODEL_ONLY = ("Trainer export", "HuggingFaceStorageWriter")
# What the framework itself did not write: an integer buffer when consolidating, the other name of a tied tensor.
NOT_SAVED = {
    "HuggingFaceStorageWriter, consolidated": {"model.seen"},
    "HuggingFaceStorageWriter, before consolidation": {"model.seen"},
    "Accelerate, DDP": {"model.head.weight"},
}


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


def opened(folder: str, inner: str) -> tuple[Checkpoint, Path]:
    return open_checkpoint(corpus(f"torch/{folder}/{inner}")), corpus(f"torch/{folder}")


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Any:
    return (request.param, *CASES[request.param])


def test_values_equal_the_live_run(case: Any):
    name, folder, inner, *_ = case
    checkpoint, root = opened(folder, inner)
    seen: set[str] = set()
    for key, value in read_truth(root).items():
        if (key.startswith("optim.") and name.startswith(MODEL_ONLY)) or key in NOT_SAVED.get(name, ()):
            continue
        entry = find(checkpoint.state, key)
        assert entry is not None, key
        assert same_bits(checkpoint.read(str(entry.key)), value), key
        seen.add(str(entry.key))
    assert seen == set(checkpoint.state.tensors)


def test_groups_equal_the_live_run(case: Any):
    name, folder, inner, *_ = case
    checkpoint, root = opened(folder, inner)
    found = [{**group.hyperparameters, "params": list(group.params)} for group in checkpoint.state.groups]
    if name.startswith(MODEL_ONLY):
        assert found == []
    else:
        assert found == read_truth_json(root)["groups"]


def test_format_and_position_equal_the_live_run(case: Any):
    name, folder, inner, format, ranks, samples, streams = case
    state = opened(folder, inner)[0].state
    assert state.format == format
    assert state.written_by["recognised"]
    assert state.topology.world_size == ranks
    assert state.progress.update == (None if name.startswith(MODEL_ONLY) else 5)
    assert state.progress.samples == samples
    assert len(state.rng) == streams


def test_roles_are_those_of_the_model(case: Any):
    name, folder, inner, *_ = case
    state = opened(folder, inner)[0].state
    roles = {
        entry.key.fqn.removeprefix("net."): entry.key.role for entry in state.tensors.values() if not entry.key.slot
    }
    if folder == "hf_trainer_ws2":
        assert set(roles.values()) == {Role.PARAM}
        return
    assert roles["emb.weight"] == roles["frozen"] == Role.PARAM
    assert roles.get("seen", Role.BUFFER) == Role.BUFFER
    if name != "HuggingFaceStorageWriter, consolidated":  # whole, ungrouped and unsharded: nothing tells it there
        assert roles["pos"] == Role.BUFFER


def test_tied_names_are_one_key(case: Any):
    name, folder, inner, *_ = case
    state = opened(folder, inner)[0].state
    aliases = {entry.key.fqn: entry.aliases for entry in state.tensors.values() if entry.aliases}
    if folder == "hf_trainer_ws2":
        assert aliases == {"model.embed_tokens.weight": ("lm_head.weight",)}
    elif folder == "lightning_ddp_ws2":
        assert aliases == {"net.emb.weight": ("net.head.weight",)}
    elif folder == "hfdcp_fsdp2_ws3" or name == "Accelerate, DDP":
        assert aliases == {}
    else:
        assert aliases == {"emb.weight": ("head.weight",)}


def test_the_same_model_has_the_same_keys_whoever_saved_it():
    keys = {
        name: set(opened(folder, inner)[0].state.tensors)
        for name, (folder, inner, *_) in CASES.items()
        if folder in ("torchsave_ddp_ws2", "ranklocal_fsdp2_ws3", "accel_ddp_stateful_ws2", "accel_fsdp2_sharded_ws2")
        or name == "FSDP1 sharded, original"
    }
    expected = set(opened("dcp_fsdp2_ws4", "ckpt")[0].state.tensors)
    assert {name: found for name, found in keys.items() if found != expected} == {}
    flat = set(opened("fsdp1_ws2_flat", "full.pt")[0].state.tensors)
    assert flat == expected | {f"optim.{slot}:frozen" for slot in ("step", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("kind", ["flat", "orig"])
def test_local_fsdp1_values_are_all_there_and_in_order(kind: str):
    """Local state dicts keep no shapes; what they hold is the truth's values in the truth's order all the same."""
    checkpoint, root = opened(f"fsdp1_ws2_{kind}", "local")
    truth = read_truth(root)
    state = checkpoint.state
    assert (state.format, state.topology.world_size) == ("fsdp1", 2)
    if kind == "orig":
        for name, value in truth.items():
            entry = find(state, name)
            assert entry is not None, name
            assert np.array_equal(checkpoint.read(str(entry.key)).reshape(-1), value.reshape(-1)), name
        return
    inside = ["frozen", "emb.weight", "gate.weight", "gate.bias", "norm.weight", "norm.bias"]
    for role, stem, slot in (("param", "model", ""), ("optim.exp_avg", "optim", ".exp_avg")):
        flat = checkpoint.read(f"{role}:_flat_param")
        expected = np.concatenate([truth[f"{stem}.{name}{slot}"].reshape(-1) for name in inside])
        assert np.array_equal(flat, expected)


def test_a_pickled_dtensor_file_alone_knows_its_place():
    checkpoint, root = opened("ranklocal_fsdp2_ws3", "rank_0_dtensor.pt")
    truth = read_truth(root)
    assert checkpoint.state.topology.world_size == 3
    embedding = checkpoint.state.tensors["param:emb.weight"]
    assert embedding.shape == (101, 30)
    assert np.array_equal(checkpoint.read("param:emb.weight", (0, 0), (34, 30)), truth["model.emb.weight"][:34])


def test_missing_shard_is_found():
    state = opened("../torch-damaged/hfdcp_missing_shard1_silent", "")[0].state
    missing = [problem for problem in state.problems if problem.code == "SR-FILE-MISSING"]
    assert [problem.where["rank"] for problem in missing] == [0]
    assert state.tensors["param:emb.weight"].tiling.offsets[:, 0].min() == 34


@pytest.mark.parametrize("name", ["distributed_nw0_ws2_rank0", "stateful_distributed_nw2_ws2_rank1"])
def test_states_of_data_loaders_are_data(name: str):
    state = opened("dataloader_states", f"{name}.pt")[0].state
    assert list(state.data) == ["dataloader"]
    assert not state.tensors


@pytest.mark.parametrize("folder", ["hf_trainer_ws2", "fsdp1_ws2_flat", "dataloader_states", "lightning_ddp_ws2"])
def test_several_checkpoints_are_listed_not_guessed(folder: str):
    from samerun.errors import UsageError

    with pytest.raises(UsageError, match="SR-PATH-SEVERAL"):
        open_checkpoint(corpus(f"torch/{folder}"))

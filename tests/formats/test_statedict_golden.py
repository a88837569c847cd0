"""Small checkpoints that the real frameworks wrote read equal to the live run, wherever the tests run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "statedict"

# folder, checkpoint in it, format, ranks, update
CASES = {
    "torch.save, zip": ("torch", "zip.pt", "torch", None, 2),
    "torch.save, legacy": ("torch", "legacy.pt", "torch", None, 2),
    "bare shards of 3 ranks": ("bare", "", "ranklocal", 3, 2),
    "FSDP1 local on 3 ranks": ("fsdp1-orig", "local", "fsdp1", 3, 2),
    "HuggingFaceStorageWriter on 3 ranks": ("shards", "", "safetensors", 3, None),
    "HuggingFaceStorageWriter with an object": ("shards-object", "", "safetensors", 3, None),
    "Trainer on 3 processes": ("trainer", "checkpoint-4", "huggingface", 3, 4),
    "Trainer with adapters on 2 processes": ("adapters", "checkpoint-4", "huggingface", 2, 4),
    "Accelerate on 3 processes": ("accelerate", "", "accelerate", 3, 2),
    "Accelerate, FSDP1 local on 3 ranks": ("accelerate-local", "", "accelerate", 3, 2),
    "Lightning": ("lightning", "step3.ckpt", "lightning", None, 3),
    "Lightning, sharded over 2": ("lightning-sharded", "step2.ckpt", "lightning", 2, 2),
}


def opened(name: str) -> tuple[Checkpoint, dict[str, Any]]:
    folder, inner, *_ = CASES[name]
    with np.load(GOLDEN / folder / "truth.npz") as truth:
        return open_checkpoint(GOLDEN / folder / inner), dict(truth)


@pytest.mark.parametrize("name", CASES)
def test_values_equal_the_live_run(name: str):
    checkpoint, truth = opened(name)
    for key, value in truth.items():
        found = checkpoint.read(key)
        expected = value.reshape(-1) if name == "FSDP1 local on 3 ranks" and found.ndim == 1 else value
        assert found.dtype == expected.dtype, key
        assert found.tobytes() == expected.tobytes(), key
        assert found.shape == expected.shape, key
    extra = set(checkpoint.state.tensors) - set(truth)
    assert all(key.startswith("optim.") for key in extra)
    assert not extra or name == "Lightning, sharded over 2"  # its truth has no optimizer


@pytest.mark.parametrize("name", CASES)
def test_format_ranks_and_update(name: str):
    _, _, format, ranks, update = CASES[name]
    state = opened(name)[0].state
    assert (state.format, state.topology.world_size, state.progress.update) == (format, ranks, update)


def test_optimizer_positions_were_named_as_the_model_registered_them():
    """safetensors sorts names, so which position is which was worked out; `truth` has it from the live optimizer."""
    checkpoint, _ = opened("Accelerate on 3 processes")
    names = [fqn for group in checkpoint.state.groups for fqn in group.params]
    assert names == [
        "position", "router", "unused", "tok.weight", "mlp.gate.weight", "mlp.gate.bias", "mlp.up.weight",
        "mlp.up.bias", "mlp.down.weight", "mlp.down.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip


def test_what_a_trainer_run_needs_is_read():
    state = opened("Trainer on 3 processes")[0].state
    assert state.progress.samples == 4 * 3 * 2
    assert state.scheduler is not None
    assert state.scheduler["last_epoch"] == 4
    assert list(state.rng) == [f"rng_state_{rank}" for rank in range(3)]
    assert [len(group.params) for group in state.groups] == [15, 5]
    assert state.tensors["param:model.embed_tokens.weight"].aliases == ("lm_head.weight",)


def test_adapters_are_what_is_trained():
    checkpoint, truth = opened("Trainer with adapters on 2 processes")
    report = inspect_checkpoint(checkpoint)
    trained = {key.removeprefix("param:") for key in truth if key.startswith("param:")}
    assert set(checkpoint.state.groups[0].params) == trained
    said = {problem.code: problem.severity for problem in report.problems}
    assert said["SR-HF-ADAPTER"] == "note"
    assert said["SR-GROUP-EMPTY"] == "note"  # Trainer's group without weight decay: adapters have no vectors
    assert report.resumable.verdict == "yes"


def test_every_byte_of_a_torch_file_is_checked_against_its_checksum():
    from samerun.formats.base import Inspectable

    for name, intact in (("torch.save, zip", True), ("torch.save, legacy", None), ("Trainer on 3 processes", None)):
        checkpoint, _ = opened(name)
        assert isinstance(checkpoint, Inspectable)
        assert checkpoint.check_items() == []
        assert checkpoint.check_payloads().intact is intact, name


def test_a_trainer_directory_with_files_of_ranks_under_fsdp(tmp_path: Path):
    """Trainer calls the functions of Accelerate that wrote these files, into a directory with its own beside them."""
    for name in ("trainer_state.json", "scheduler.pt"):
        shutil.copy(GOLDEN / "trainer" / "checkpoint-4" / name, tmp_path)
    for path in (GOLDEN / "accelerate-local").glob("pytorch_model_fsdp_rank*.bin"):
        shutil.copy(path, tmp_path)
    shutil.copytree(GOLDEN / "accelerate-local" / "optimizer_0", tmp_path / "optimizer_0")
    checkpoint = open_checkpoint(tmp_path)
    with np.load(GOLDEN / "accelerate-local" / "truth.npz") as truth:
        assert (checkpoint.state.format, set(checkpoint.state.tensors)) == ("huggingface", set(truth))
        assert all(np.array_equal(checkpoint.read(key), truth[key]) for key in truth)

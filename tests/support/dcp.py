"""DCP directories written by torch in this process, and edits of their metadata, for tests of damage."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict


def save(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """Saves a state dict with DCP, from one process without a group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed")
        warnings.filterwarnings("ignore", message="Saving sharded|.*no_dist.*")
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def job_state(updates: int = 3, *, flatten: bool = False, momentum: bool = False) -> dict[str, Any]:
    """A small job's state after some updates: model, optimizer with two groups, scheduler, sampler, progress, RNG."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 5))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=1e-2, momentum=0.9) if momentum else torch.optim.AdamW(groups, lr=1e-2)
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(updates):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed")
        model_state, optim_state = get_state_dict(model, optimizer, options=options)
    return {
        "model": dict(model_state),
        "optim": dict(optim_state),
        "scheduler": scheduler.state_dict(),
        "sampler": {"epoch": 0, "samples": updates * 8, "samples_in_epoch": updates * 8},
        "progress": {"update": updates, "samples": updates * 8, "tokens": updates * 80, "epoch": 0},
        "rng": {"0": torch.get_rng_state()},
    }


def edit_metadata(folder: Path, change: Callable[[Metadata], None], name: str = ".metadata") -> None:
    """Applies `change` to a directory's metadata and writes it back."""
    path = folder / name
    found: Metadata = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def read_metadata(folder: Path, find: Callable[[Metadata], Any], name: str = ".metadata") -> Any:
    """Returns what `find` takes from a directory's metadata."""
    return find(pickle.loads((folder / name).read_bytes()))


def split_tensor(folder: Path, name: str, parts: int) -> None:
    """Saves a stored tensor again as `parts` chunks along its first dimension, in files `__0_7`, `__0_8`, ..."""
    tensor = load_tensor(folder, name)
    pieces = torch.chunk(tensor, parts)

    def change(found: Metadata) -> None:
        entry = found.state_dict_metadata[name]
        for key in [key for key in found.storage_data if key.fqn == name]:
            del found.storage_data[key]
        chunks: list[ChunkStorageMetadata] = []
        row = 0
        for number, piece in enumerate(pieces):
            offsets = torch.Size((row, *(0,) * (tensor.ndim - 1)))
            chunks.append(ChunkStorageMetadata(offsets, piece.size()))
            path = folder / f"__0_{number + 7}.distcp"
            torch.save(piece.clone(), path)
            found.storage_data[MetadataIndex(name, offsets, number)] = _StorageInfo(path.name, 0, path.stat().st_size)
            row += piece.shape[0]
        entry.chunks = chunks  # type: ignore[union-attr]

    edit_metadata(folder, change)


def load_tensor(folder: Path, name: str) -> torch.Tensor:
    """Returns a stored tensor as torch reads it."""
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry: Any = found.state_dict_metadata[name]
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[name]

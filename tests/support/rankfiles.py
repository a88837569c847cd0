"""State saved by each rank for itself, written by real ranks: FSDP2 shards, FSDP1's three kinds, safetensors shards."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from samerun.core.mesh import Layout
from support import toy

Tensors = dict[str, np.ndarray]
SMALL = toy.Config(vocabulary=11, width=7, hidden=10)


def rng_state() -> dict[str, Any]:
    """The three generators' states, as training scripts save them."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def bare(value: Any) -> Any:
    """Takes the geometry off: every DTensor becomes its local tensor."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items()}
    return [bare(item) for item in value] if isinstance(value, list) else value


def write_fsdp2(rank: int, world_size: int, layout: Layout, folder: Path, with_geometry: bool) -> Tensors:
    """One torch.save file per rank of a job under `layout`, as DTensors or as bare shards. Returns the truth."""
    random.seed(rank)
    job = toy.build(layout, config=SMALL)
    toy.train(job, 2)
    state = {
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "lr_scheduler": job.scheduler.state_dict(),
        "progress": dict(job.progress),
    }
    torch.save(state if with_geometry else bare({**state, "rng": rng_state()}), folder / f"rank_{rank}.pt")
    return toy.full_state(job)


def build_fsdp1(use_orig_params: bool, *, frozen: str = "") -> tuple[FSDP, torch.optim.Optimizer]:
    """The toy model under FSDP1: one unit for the MLP, one for the rest. Names beginning with `frozen` do not train."""
    torch.manual_seed(0)
    model: nn.Module = toy.Model(SMALL)
    for name, parameter in model.named_parameters():
        # without original parameters a flat one is trained as a whole or not at all
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    how: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    model.mlp = FSDP(model.mlp, **how)
    wrapped = FSDP(model, **how)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=2e-3, weight_decay=0.1, foreach=False)


def train_fsdp1(model: FSDP, optimizer: torch.optim.Optimizer, updates: int = 2) -> None:
    """Takes a few updates. Every rank calls it."""
    rank = dist.get_rank()
    for number in range(updates):
        tokens = torch.randint(
            0, SMALL.vocabulary, (2, toy.BLOCK), generator=torch.Generator().manual_seed(10 * number + rank)
        )
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def write_fsdp1(rank: int, world_size: int, folder: Path, use_orig_params: bool, offload: bool = False) -> Tensors:
    """Full, sharded and local state dicts of one job, in `full.pt`, `sharded` and `local`. Returns the truth.

    With `offload` torch 2.13 hands out one buffer for both moments when it gathers original parameters on a CPU.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, on a CPU more so, and says it in many ways
        model, optimizer = build_fsdp1(use_orig_params)
        train_fsdp1(model, optimizer)
        for name in ("sharded", "local"):
            (folder / name).mkdir(exist_ok=True)
        full = {**full_fsdp1(model, optimizer, offload), "step": 2}
        if rank == 0:
            torch.save(full, folder / "full.pt")
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
            torch.save(sharded, folder / "sharded" / f"rank{rank}.pt")
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            local = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**local, "rank": rank, "world_size": world_size}, folder / "local" / f"model_rank{rank}.pt")
        dist.barrier()
        return truth_of(full)


def full_fsdp1(model: FSDP, optimizer: torch.optim.Optimizer, offload: bool = False) -> dict[str, Any]:
    """Returns the full state dicts of an FSDP1 job. Every rank calls it."""
    whole = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=offload)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}


def truth_of(full: dict[str, Any]) -> Tensors:
    """Returns the tensors of a full state dict by samerun's keys."""
    buffers = ("average", "seen")
    truth: Tensors = {}
    for name, tensor in full["model"].items():
        if name != "head.weight":
            truth[f"{'buffer' if name in buffers else 'param'}:{name}"] = tensor.numpy()
    for name, slots in full["optimizer"]["state"].items():
        for slot, tensor in slots.items():
            truth[f"optim.{slot}:{name}"] = tensor.numpy()
    return truth


def write_safetensors(rank: int, world_size: int, folder: Path, extra: Callable[[], dict[str, Any]]) -> Tensors:
    """The model as torch's HuggingFaceStorageWriter shards it over FSDP2 ranks. Returns the truth."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    job = toy.build(Layout(dp_shard=world_size), config=replace(SMALL, tied=False))
    state = {**get_model_state_dict(job.model), **extra()}
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    with toy.quiet():
        dcp.save(state, storage_writer=writer, checkpoint_id=str(folder))
    truth = toy.full_state(job)
    return {key: value for key, value in truth.items() if not key.startswith("optim")}


def write_tied_safetensors(rank: int, world_size: int, folder: Path) -> None:
    """Tries to save a tied model through HuggingFaceStorageWriter, which fails half way. Every rank calls it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    job = toy.build(Layout(dp_shard=world_size), config=SMALL)
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    try:
        with toy.quiet():
            dcp.save(get_model_state_dict(job.model), storage_writer=writer, checkpoint_id=str(folder))
    except BaseException as error:
        raise RuntimeError(str(error)) from None

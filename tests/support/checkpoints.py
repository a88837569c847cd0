"""Small checkpoints written by the real framework."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from support.gloo import run_ranks

CONFIG = {"global_batch": 32, "max_microbatch": 2, "precision": "float32", "log_every": 10, "eval_every": 20}


def write_fsdp2_checkpoint(path: Path, world_size: int = 4, updates: int = 2) -> None:
    """Makes `updates` updates under FSDP2 on `world_size` gloo ranks and saves everything through DCP."""
    for module in ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo"):
        importlib.import_module(module)  # once here, inherited by every rank
    run_ranks(world_size, _write, str(path), updates)


def _write(rank: int, world_size: int, path: str, updates: int) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(101, 6), nn.Linear(6, 9), nn.Linear(9, 6))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    fully_shard(model, mesh=mesh)
    model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(updates):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optim": optim_state,
        "scheduler": {"last_epoch": scheduler.last_epoch, "base_lrs": scheduler.base_lrs},
        "progress": {"update": updates, "samples": 32 * updates, "tokens": 2000 * updates, "epoch": 0},
        "config": CONFIG,
    }
    dcp.save(state, checkpoint_id=path)

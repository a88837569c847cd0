"""The model and data of `dsjob`, trained by torch alone under FSDP2 or as replicas: what moves into DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from support.dsjob import WIDTH, Job, Model, batch_of, groups_of
from support.gloo import run_ranks

CLIP = 1.0


def make_source(job: Job, ranks: int, folder: Path, updates: int = 5, more: int = 5) -> dict[str, Any]:
    """Trains, saves as `folder/dcp` and `folder/run.pt`, and trains on; returns what `dsjob.make_source` returns.

    At stage 3 of `job` the parameters are sharded by FSDP2, otherwise every rank holds all of them.
    """
    folder.mkdir(parents=True)
    return run_ranks(ranks, _source, job, str(folder), updates, more, timeout=300)[0]


def _source(rank: int, ranks: int, job: Job, folder: str, updates: int, more: int) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    torch.manual_seed(11)
    model = Model(job)
    with torch.no_grad():
        model.frozen_bias.copy_(torch.cos(torch.arange(WIDTH) * 0.3))
    if job.stage == 3:
        _shard(model, ranks)
    optimizer = torch.optim.AdamW(groups_of(model))
    scheduler = make_scheduler(optimizer)
    losses = train(model, optimizer, scheduler, job, rank, ranks, 0, updates)
    progress = {"update": updates, "samples": updates * job.batch, "epoch": 1}
    names, optim = get_state_dict(model, optimizer)
    dcp.save(
        {"model": names, "optim": optim, "scheduler": scheduler.state_dict(), "progress": progress},
        checkpoint_id=f"{folder}/dcp",
    )
    full, optim = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        saved = {"model": full, "optimizer": optim, "scheduler": scheduler.state_dict(), "progress": progress}
        torch.save(saved, f"{folder}/run.pt")
    held = held_by(full, optim) if rank == 0 else None
    later = train(model, optimizer, scheduler, job, rank, ranks, updates, more)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"losses": losses, "later": later, "held": held, "groups": groups}


def _shard(model: nn.Module, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """Returns DeepSpeed's schedule, with the settings that `Job.config` gives it: its state is what moves."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    return WarmupLR(optimizer, [0.0, 0.0], [0.01, 0.005], 8, "linear")


def train(
    model: nn.Module, optimizer: Any, scheduler: Any, job: Job, rank: int, ranks: int, first: int, count: int
) -> list[float]:
    """Takes updates as `dsjob.train` does; returns the global losses."""
    from torch.nn import functional

    losses: list[float] = []
    for update in range(first, first + count):
        ids = batch_of(job, update, rank, ranks)
        logits = model(ids)
        functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if job.stage != 3:
            for parameter in trained:
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        assert float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) > 0
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            total = functional.cross_entropy(logits.double()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            dist.all_reduce(total)
            losses.append(float(total) / ranks)
            values = torch.sin(torch.arange(WIDTH) * 0.7 + update)
            model.running_mean.mul_(0.9).add_(values * 0.1)  # type: ignore[operator,union-attr]
    return losses


def held_by(model: dict[str, Any], optim: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns torch's own full state under the names of `dsjob.full_state`."""
    buffers = ("running_mean", "n_calls")
    held = {f"{'buffer' if name in buffers else 'module'}/{name}": value.numpy() for name, value in model.items()}
    for name, state in optim["state"].items():
        held[f"fp32/{name}"] = model[name].numpy()
        held |= {f"{slot}/{name}": state[slot].numpy() for slot in ("exp_avg", "exp_avg_sq")}
    return {name: value.copy() for name, value in held.items()}

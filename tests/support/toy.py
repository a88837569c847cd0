"""A small training job that carries everything that breaks resumes, on any layout; saved and loaded by torch itself.

Vocabulary (29) and width (18) do not divide by 4; there are two groups, a tied head, a frozen and a never-used
parameter, saved and unsaved buffers, a gated MLP with bias, a parameter of three rows (an empty shard at four ranks),
a schedule that moves, gradients added up over two passes, and float32 or bfloat16 throughout.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from samerun.core.mesh import Layout

BLOCK = 8


@dataclass
class Config:
    vocabulary: int = 29
    width: int = 18
    hidden: int = 22
    tied: bool = True
    activation: str = "silu"


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Parameter(torch.randn(BLOCK, config.width), requires_grad=False)
        self.mlp = Mlp(config)
        self.router = nn.Parameter(torch.randn(3, config.width) / 4)
        self.norm = nn.LayerNorm(config.width)
        self.unused = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tok.weight
        self.register_buffer("average", torch.linspace(0.5, 1.5, config.width))
        self.register_buffer("seen", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.position
        x = self.mlp(x) + x @ self.router.T.softmax(0) @ self.router
        return self.head(self.norm(x * self.average))


@dataclass
class Job:
    layout: Layout
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    config: Config
    progress: dict[str, int]

    @property
    def objects(self) -> dict[str, Any]:
        return {"progress": self.progress}


def build(layout: Layout, *, dtype: torch.dtype = torch.float32, seed: int = 0, config: Config | None = None) -> Job:
    """Builds the job on this rank's place in `layout`. With replicas and nothing else it uses DDP."""
    torch.manual_seed(seed)
    config = config or Config()
    model: nn.Module = Model(config).to(dtype)
    model.seen.data = model.seen.long()  # type: ignore[union-attr]
    model = _distribute(model, layout)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 4e-3},
        ],
        lr=2e-3,
        betas=(0.9, 0.95),
        foreach=False,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    return Job(layout, model, optimizer, scheduler, config, {"update": 0, "samples": 0, "epoch": 0})


def _distribute(model: nn.Module, layout: Layout) -> nn.Module:
    if layout.world_size == 1:
        return model
    if layout.world_size == layout.dp_replicate:
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh(
        "cpu", (layout.dp_replicate, layout.dp_shard, layout.tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    )
    if layout.tp > 1:
        plan = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    data = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
    fully_shard(model.mlp, mesh=data)
    fully_shard(model, mesh=data)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(layout.batch_replicas))
    return model


def train(job: Job, updates: int) -> None:
    """Takes `updates` optimizer steps of two passes each. Every rank calls it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    replica = job.layout.batch_replica(rank)
    for _ in range(updates):
        for number in range(2):
            generator = torch.Generator().manual_seed(100 * job.progress["update"] + 10 * number + replica)
            tokens = torch.randint(0, job.config.vocabulary, (2, BLOCK), generator=generator)
            logits = job.model(tokens).float()
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).div(2).backward()
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
        job.progress["update"] += 1
        job.progress["samples"] += 4 * job.layout.batch_replicas


def _template(job: Job) -> dict[str, Any]:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    return {"model": model, "optim": optimizer}


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what torch says about a process without a group, and about gathers over two mesh axes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        yield


def save(job: Job, folder: Path) -> None:
    """Saves with DCP. Every rank calls it."""
    rest = {"scheduler": job.scheduler.state_dict(), "progress": job.progress, "config": asdict(job.config)}
    with quiet():
        dcp.save({**_template(job), **rest}, checkpoint_id=folder)


def load(job: Job, folder: Path) -> None:
    """Loads what `save` wrote, on whatever layout. Every rank calls it.

    torch makes a state for every parameter before it can load one; that of a parameter which never had one is taken
    out again.
    """
    state = _template(job)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    states: dict[str, Any] = state["optim"]["state"]
    stateless = [name for name in states if f"optim.state.{name}.exp_avg" not in saved]
    for name in stateless:
        del states[name]
    state |= {"scheduler": job.scheduler.state_dict(), "progress": dict(job.progress)}
    with quiet():
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(strict=False),
    )
    job.scheduler.load_state_dict(state["scheduler"])
    job.progress = state["progress"]


def full_state(job: Job) -> dict[str, np.ndarray]:
    """Returns every tensor as the framework itself puts it together, by samerun's keys. Every rank calls it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    buffers = {name.removeprefix("module.") for name, _ in job.model.named_buffers()}
    state: dict[str, np.ndarray] = {}
    with quiet():
        model = get_model_state_dict(job.model, options=options)
        optimizer: Any = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    for name, tensor in model.items():
        if name != "head.weight" or not job.config.tied:
            state[f"{'buffer' if name in buffers else 'param'}:{name}"] = as_numpy(tensor)
    for name, slots in optimizer["state"].items():
        for slot, tensor in slots.items():
            state[f"optim.{slot}:{name}"] = as_numpy(tensor)
    return state


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor's values in NumPy's (for bfloat16, ml_dtypes') type."""
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()

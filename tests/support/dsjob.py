"""A small real DeepSpeed job on CPU: train, save, load what is given, go on. Every rank is a fork of one warm process.

The model is that of the collection's `deepspeed/` checkpoints (same names and shapes): uneven sizes, two groups with
different rates and betas, a one-element parameter, a frozen one, a never-used one, buffers, an optional tie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from support.gloo import run_ranks

GLOBAL_BATCH, LENGTH, VOCAB, WIDTH, INNER = 12, 7, 61, 22, 37


@dataclass(frozen=True)
class Job:
    """What the training script would have in its configuration; the number of ranks is given at launch."""

    stage: int
    bf16: bool = False
    tied: bool = False
    unused: bool = False
    round_robin: bool = False
    aligned: bool = False
    offload: bool = False
    grads_in_fp32: bool = False
    sub_group_size: int = 0
    optimizer: str = "adamw"
    batch: int = GLOBAL_BATCH

    def config(self, ranks: int, universal: bool = False) -> dict[str, Any]:
        """Returns the DeepSpeed configuration."""
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
        zero |= {"stage3_param_persistence_threshold": 0} if self.stage == 3 else {}
        zero |= {"sub_group_size": self.sub_group_size} if self.sub_group_size else {}
        zero |= {"round_robin_gradients": True} if self.round_robin else {}
        zero |= {"parameter_alignment": True} if self.aligned else {}
        zero |= {"offload_optimizer": {"device": "cpu"}} if self.offload else {}
        rates = {"warmup_min_lr": [0.0, 0.0], "warmup_max_lr": [0.01, 0.005], "warmup_num_steps": 8}
        config: dict[str, Any] = {
            "train_batch_size": self.batch,
            "train_micro_batch_size_per_gpu": self.batch // ranks,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "scheduler": {"type": "WarmupLR", "params": {**rates, "warmup_type": "linear"}},
            "zero_optimization": zero,
        }
        config |= {"bf16": {"enabled": True}} if self.bf16 else {}
        config |= {"data_types": {"grad_accum_dtype": "fp32"}} if self.grads_in_fp32 else {}
        config |= {"checkpoint": {"load_universal": True}} if universal else {}
        return config


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ln2, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.ln1(hidden)).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2) / WIDTH**0.5).tril()
        hidden = hidden + self.proj(scores @ value)
        return hidden + self.fc2(functional.silu(self.fc1(self.ln2(hidden))))


class Model(nn.Module):
    """The whole model. `running_mean` and `frozen_bias` act on the loss, so that losing them shows."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.frozen_bias = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH), requires_grad=False)
        self.logit_scale = nn.Parameter(torch.tensor([1.3]))
        if job.unused:
            self.never_used = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if job.tied:
            self.lm_head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tok(ids) + self.pos(torch.arange(ids.shape[1])) + self.frozen_bias
        hidden = hidden - self.running_mean.to(hidden.dtype) * 0.3
        for block in self.blocks:
            hidden = block(hidden)
        self.n_calls += 1
        return self.lm_head(self.ln_f(hidden)) * self.logit_scale


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Returns two groups: matrices, and the rest."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {
            "params": [p for p in trained if p.ndim > 1],
            "lr": 0.01,
            "betas": (0.9, 0.95),
            "weight_decay": 0.1,
            "name": "decay",
        },
        {
            "params": [p for p in trained if p.ndim < 2],
            "lr": 0.005,
            "betas": (0.8, 0.99),
            "weight_decay": 0.0,
            "name": "no_decay",
        },
    ]


def make_optimizer(job: Job, model: nn.Module) -> Any:
    groups = groups_of(model)
    if job.optimizer == "sgd":
        return torch.optim.SGD([{k: v for k, v in group.items() if k != "betas"} for group in groups], momentum=0.9)
    if job.optimizer == "amsgrad":
        return torch.optim.AdamW(groups, amsgrad=True)
    if job.offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups)
    return torch.optim.AdamW(groups)


def make_engine(job: Job, ranks: int, universal: bool = False) -> Any:
    """Starts DeepSpeed on this rank."""
    import deepspeed

    torch.manual_seed(11)
    model = Model(job)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(job, model), config=job.config(ranks, universal)
    )
    return engine


def batch_of(job: Job, update: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns this rank's part of the global batch of an update: the same samples at every world size."""
    generator = torch.Generator().manual_seed(1000 + update)
    micro = job.batch // ranks
    return torch.randint(0, VOCAB, (job.batch, LENGTH), generator=generator)[rank * micro :][:micro]


def train(engine: Any, job: Job, rank: int, ranks: int, first: int, count: int) -> list[float]:
    """Takes updates; returns the global loss of each, computed from the logits in double precision."""
    losses: list[float] = []
    for update in range(first, first + count):
        ids = batch_of(job, update, rank, ranks)
        logits = engine(ids)
        loss = functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            total = functional.cross_entropy(logits.double()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
        _move_buffer(engine, update)
    return losses


def _move_buffer(engine: Any, update: int) -> None:
    """Changes the buffer that acts on the loss, equally on every rank and at every world size."""
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            if name == "running_mean":
                values = torch.sin(torch.arange(WIDTH) * 0.7 + update)
                buffer.mul_(0.9).add_(values.to(buffer.dtype) * 0.1)


def set_frozen(engine: Any) -> None:
    """Gives the frozen parameter values that no constructor gives, as a run that once trained it has."""
    import deepspeed

    frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
    with deepspeed.zero.GatheredParameters(frozen, modifier_rank=0), torch.no_grad():
        for parameter in frozen:
            parameter.copy_(torch.cos(torch.arange(parameter.numel()) * 0.3).reshape(parameter.shape))


def full_state(engine: Any, job: Job) -> dict[str, np.ndarray]:
    """Returns what the running job holds, full tensors, from its own interfaces. Every rank calls it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = engine.optimizer
    if job.stage < 3 and hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    held = {
        f"buffer/{name}": buffer.detach().numpy().copy()
        for name, buffer in engine.module.named_buffers()
        if name != "scratch"
    }
    shuffled = held_by_buffers(engine, job) if job.round_robin else {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=job.stage == 3):
            weights = parameter.detach().float().clone().numpy()
        held[f"module/{name}"] = weights
        if parameter.requires_grad and not job.round_robin:
            found = {"fp32": safe_get_full_fp32_param(parameter)}
            for slot in slots_of(job):
                found[slot] = safe_get_full_optimizer_state(parameter, slot)
            held |= {f"{slot}/{name}": full.float().numpy().reshape(weights.shape) for slot, full in found.items()}
    return held | shuffled


def held_by_buffers(engine: Any, job: Job) -> dict[str, np.ndarray]:
    """Returns masters and slots at stages 1 and 2 from all ranks' flat buffers, in their own order.

    DeepSpeed's own interface (0.19.8) looks in the unshuffled places when `round_robin_gradients` is on.
    """
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    held: dict[str, np.ndarray] = {}
    for number, members in enumerate(optimizer.round_robin_bit16_groups):
        masters = optimizer.single_partition_of_fp32_groups[number]
        parts = {"fp32": masters} | {slot: optimizer.optimizer.state[masters][slot] for slot in slots_of(job)}
        for slot, part in parts.items():
            ranks = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, part.detach().contiguous())
            whole = torch.cat(ranks)
            for parameter, start in zip(members, optimizer.round_robin_bit16_offsets[number], strict=True):
                values = whole[start : start + parameter.numel()].reshape(parameter.shape)
                held[f"{slot}/{names[id(parameter)]}"] = values.numpy().copy()
    return held


def slots_of(job: Job) -> tuple[str, ...]:
    """Returns the optimizer's slots."""
    if job.optimizer == "sgd":
        return ("momentum_buffer",)
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if job.optimizer == "amsgrad" else ()))


def facts(engine: Any) -> dict[str, Any]:
    """Returns groups, steps and counters as the running job has them."""
    inner = engine.optimizer.optimizer
    groups = [
        {key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key != "params"}
        for group in inner.param_groups
    ]
    steps = [float(state["step"]) for state in inner.state.values() if "step" in state]
    kinds = sorted({type(state["step"]).__name__ for state in inner.state.values() if "step" in state})
    return {
        "groups": json.loads(json.dumps(groups)),
        "steps": steps,
        "step_kinds": kinds,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
    }


def _quiet() -> None:
    import logging

    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")


def _source(rank: int, ranks: int, job: Job, folder: str, updates: int, more: int) -> dict[str, Any]:
    _quiet()
    engine = make_engine(job, ranks)
    set_frozen(engine)
    losses = train(engine, job, rank, ranks, 0, updates)
    client = {"epoch": 1, "consumed_samples": updates * job.batch, "torch_rng": torch.get_rng_state()}
    engine.save_checkpoint(folder, client_state=client)
    held, known = full_state(engine, job), facts(engine)
    later = train(engine, job, rank, ranks, updates, more)
    return {"losses": losses, "later": later, "facts": known, "held": held if rank == 0 else None}


def _resumed(
    rank: int, ranks: int, job: Job, folder: str, tag: str | None, remedy: str, first: int, more: int, universal: bool
) -> dict[str, Any]:
    _quiet()
    engine = make_engine(job, ranks, universal)
    path, client = engine.load_checkpoint(folder, tag=tag)
    assert path is not None
    before = full_state(engine, job) if remedy else {}
    facts_before = facts(engine)
    if remedy:
        exec(remedy, {"engine": engine, "path": path, "client": client})  # the documented lines themselves
    held, known = full_state(engine, job), facts(engine)
    losses = train(engine, job, rank, ranks, first, more)
    shown = {key: value for key, value in client.items() if isinstance(value, int | str)}
    found = {"losses": losses, "facts": known, "facts_before": facts_before, "client": shown}
    return found | ({"held": held, "held_before": before} if rank == 0 else {})


def make_source(job: Job, ranks: int, folder: Path, updates: int = 5, more: int = 5) -> dict[str, Any]:
    """Trains, saves into `folder`, and trains on.

    Returns what rank 0 held when it saved (`held`, `facts`), the losses before, and those of the uninterrupted run
    `later`.
    """
    return run_ranks(ranks, _source, job, str(folder), updates, more, timeout=300)[0]


def resume(
    job: Job,
    ranks: int,
    folder: Path,
    *,
    tag: str | None = None,
    remedy: str = "",
    first: int = 5,
    more: int = 5,
    universal: bool = False,
) -> dict[str, Any]:
    """Loads with stock DeepSpeed and takes `more` updates.

    Returns what rank 0 then held (`held`, `facts`, and as `..._before` that before the lines of `remedy`), and the
    losses.
    """
    return run_ranks(ranks, _resumed, job, str(folder), tag, remedy, first, more, universal, timeout=300)[0]


def differing(held: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the names of arrays that are not equal element for element."""
    names = sorted({*held, *truth})
    return [
        name for name in names if name not in held or name not in truth or not np.array_equal(held[name], truth[name])
    ]


# The lines of docs/formats/universal.md, for what load_universal leaves undone.
RESTORE_MODEL = """
import os, deepspeed, torch
held = torch.load(os.path.join(os.path.dirname(path), "mp_rank_00_model_states.pt"), weights_only=False)["module"]
with deepspeed.zero.GatheredParameters([p for p in engine.module.parameters() if not p.requires_grad], modifier_rank=0):
    engine.module.load_state_dict(held, strict=False)
"""
RESTORE_STAGE3 = """
for group, saved in zip(engine.optimizer.param_groups, client["samerun_param_groups"]):
    group.update(saved)
for state in engine.optimizer.optimizer.state.values():
    state["step"] = state["step"] + 0
"""

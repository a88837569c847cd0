"""A small real DeepSpeed run with experts on CPU: trains, saves, loads what is given, and goes on.

Two MoE layers with other numbers of experts, expert groups for two rates, a residual expert; frozen parameters and
buffers inside experts and outside. Gating is deterministic and drops nothing, the loss has no balancing term, and
nothing is clipped: with any of those DeepSpeed's own update depends on how ranks share the batch and the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from support import dsjob
from support.gloo import run_ranks

VOCAB, WIDTH, INNER, LENGTH, BATCH = 23, 10, 7, 5, 12
EXPERTS = (6, 12)


@dataclass(frozen=True)
class Job:
    """What the launch and the configuration say beside the number of ranks. `ep` is the expert-parallel degree."""

    stage: int
    ep: int
    bf16: bool = False
    data_first: bool = False
    aligned: bool = False
    round_robin: bool = False
    grads_in_fp32: bool = False
    universal: bool = False

    def config(self, ranks: int) -> dict[str, Any]:
        """Returns the DeepSpeed configuration."""
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
        zero |= {"parameter_alignment": True} if self.aligned else {}
        zero |= {"round_robin_gradients": True} if self.round_robin else {}
        config: dict[str, Any] = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // ranks,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": [0.0] * 4, "warmup_max_lr": [0.01, 0.005, 0.01, 0.005],
                           "warmup_num_steps": 8, "warmup_type": "linear"},
            },
        }  # fmt: skip
        config |= {"bf16": {"enabled": True}} if self.bf16 else {}
        config |= {"data_types": {"grad_accum_dtype": "fp32"}} if self.grads_in_fp32 else {}
        config |= {"use_data_before_expert_parallelism": True} if self.data_first else {}
        config |= {"checkpoint": {"load_universal": True}} if self.universal else {}
        return config


class Expert(nn.Module):
    """One expert, with a frozen parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gain, shift = self.gain.to(hidden.dtype), self.shift.to(hidden.dtype)  # DeepSpeed casts what is trained
        return self.down(functional.silu(self.up(hidden)) * (1 + gain)) + shift


class Model(nn.Module):
    """The whole model. Experts of all ranks are drawn from one stream, so that every degree begins alike."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.frozen_bias = nn.Parameter(torch.linspace(-0.5, 0.5, LENGTH).unsqueeze(1), requires_grad=False)
        self.register_buffer("running_mean", torch.linspace(0.0, 0.3, WIDTH))
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.moe = nn.ModuleList([
            MoE(WIDTH, Expert(), count, ep_size=ep, k=1, drop_tokens=False, use_rts=False, min_capacity=0,
                use_residual=number == 1)
            for number, count in enumerate(EXPERTS)
        ])  # fmt: skip
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tok(ids) + self.frozen_bias - self.running_mean.to(self.tok.weight.dtype)
        for layer in self.moe:
            hidden = hidden + layer(hidden)[0]
        return self.out(self.norm(hidden))


def _experts_of(rank: int, ep: int, ranks: int, data_first: bool) -> int:
    return rank // (ranks // ep) if data_first else rank % ep


def make_engine(job: Job, ranks: int) -> Any:
    """Starts DeepSpeed on this rank."""
    import deepspeed

    rank = dist.get_rank()
    torch.manual_seed(7)
    model = Model(job.ep)
    mine = _experts_of(rank, job.ep, ranks, job.data_first)
    generator = torch.Generator().manual_seed(8)
    for count, layer in zip(EXPERTS, model.moe, strict=True):
        held = count // job.ep
        experts = layer.deepspeed_moe.experts.deepspeed_experts
        for number in range(count):
            drawn = {
                name: torch.randn(t.shape, generator=generator) * 0.3 for name, t in experts[0].state_dict().items()
            }
            if number // held == mine:
                experts[number % held].load_state_dict(drawn)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1, "name": "decay"},
        {"params": [p for p in trained if p.ndim < 2], "lr": 0.005, "weight_decay": 0.0, "name": "no_decay"},
    ]
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    optimizer = torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(groups), betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=job.config(ranks))
    return engine


def train(engine: Any, rank: int, ranks: int, first: int, count: int) -> list[float]:
    """Takes updates over the same global batches at every degree; returns their global losses in double precision."""
    losses: list[float] = []
    micro = BATCH // ranks
    for update in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 + update)
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)[rank * micro :][:micro]
        logits = engine(ids)
        engine.backward(functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        engine.step()
        with torch.no_grad():
            total = functional.cross_entropy(logits.double()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
    return losses


def held(engine: Any, job: Job, rank: int, ranks: int) -> dict[str, np.ndarray]:
    """Returns what the running job holds on this rank, whole tensors, its experts under their global numbers."""
    mine = _experts_of(rank, job.ep, ranks, job.data_first)
    counts = {f"moe.{layer}.": count // job.ep for layer, count in enumerate(EXPERTS)}

    def name_of(name: str) -> str:
        head, mark, tail = name.partition("deepspeed_experts.")
        if not mark:
            return name
        number, _, rest = tail.partition(".")
        each = next(count for prefix, count in counts.items() if name.startswith(prefix))
        return f"{head}{mark}{mine * each + int(number)}.{rest}"

    found = {f"buffer/{name_of(name)}": values.float().numpy().copy() for name, values in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        found[f"module/{name_of(name)}"] = parameter.detach().float().numpy().copy()
    return found | {
        f"{slot}/{name_of(name)}": values
        for (slot, name), values in (_whole(engine) if job.stage == 0 else _flat(engine)).items()
    }


def _whole(engine: Any) -> dict[tuple[str, str], np.ndarray]:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    return {
        (slot, names[id(parameter)]): values.numpy().copy()
        for parameter, state in engine.optimizer.state.items()
        for slot, values in state.items()
    }


def _flat(engine: Any) -> dict[tuple[str, str], np.ndarray]:
    """Reads masters and moments from the flat buffers of all ranks that share a group, in the buffers' own order."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found: dict[tuple[str, str], np.ndarray] = {}
    for number, members in enumerate(optimizer.round_robin_bit16_groups):
        group = optimizer.real_dp_process_group[number]
        masters = optimizer.single_partition_of_fp32_groups[number]
        state = optimizer.optimizer.state[masters]
        for slot, part in {"fp32": masters, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items():
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, part.detach().contiguous(), group=group)
            whole = torch.cat(parts)
            for parameter, start in zip(members, optimizer.round_robin_bit16_offsets[number], strict=True):
                values = whole[start : start + parameter.numel()].reshape(parameter.shape)
                found[(slot, names[id(parameter)])] = values.numpy().copy()
        for member in members:
            found[("step", names[id(member)])] = np.array(float(state["step"]))
    return found


def held_bytes(engine: Any) -> dict[str, int]:
    """Returns the bytes of this rank's parameters, optimizer state and masters."""
    optimizer = engine.optimizer
    slots = [value for state in optimizer.optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "parameters": sum(p.numel() * p.element_size() for p in engine.module.parameters()),
        "optimizer": sum(value.numel() * value.element_size() for value in slots),
        "masters": sum(part.numel() * part.element_size() for part in optimizer.single_partition_of_fp32_groups),
    }


def facts(engine: Any) -> dict[str, Any]:
    """Returns groups and counters as the running job has them."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    counters = (engine.global_steps, engine.global_samples, engine.lr_scheduler.state_dict())
    return {"groups": groups, "counters": counters}


def _source(rank: int, ranks: int, job: Job, folder: str, updates: int, more: int) -> dict[str, Any]:
    dsjob._quiet()
    engine = make_engine(job, ranks)
    losses = train(engine, rank, ranks, 0, updates)
    engine.save_checkpoint(folder, client_state={"consumed_samples": updates * BATCH})
    now, known = held(engine, job, rank, ranks), facts(engine)
    found = {"losses": losses, "held": now, "facts": known, "bytes": held_bytes(engine) if job.stage else {}}
    return found | {"later": train(engine, rank, ranks, updates, more)}


def _resumed(rank: int, ranks: int, job: Job, folder: str, first: int, more: int) -> dict[str, Any]:
    dsjob._quiet()
    engine = make_engine(job, ranks)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    now, known = held(engine, job, rank, ranks), facts(engine)
    later = train(engine, rank, ranks, first, more)
    return {"held": now, "facts": known, "later": later, "client": client.get("consumed_samples")}


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the ranks' answers: tensors by global name, which ranks that share one must hold alike."""
    whole: dict[str, np.ndarray] = {}
    for rank in found:
        for name, values in rank["held"].items():
            assert np.array_equal(whole.setdefault(name, values), values), f"ranks differ in {name}"
    return {**found[0], "held": whole, "bytes": [rank.get("bytes") for rank in found]}


def make_source(job: Job, ranks: int, folder: Path, updates: int = 5, more: int = 5) -> dict[str, Any]:
    """Trains, saves into `folder`, and trains on. Returns what the ranks held when they saved, and later losses."""
    return _together(run_ranks(ranks, _source, job, str(folder), updates, more, timeout=300))


def resume(job: Job, ranks: int, folder: Path, *, first: int = 5, more: int = 5) -> dict[str, Any]:
    """Loads with stock `load_checkpoint` and goes on. Returns what the ranks then held, and their losses."""
    return _together(run_ranks(ranks, _resumed, job, str(folder), first, more, timeout=300))

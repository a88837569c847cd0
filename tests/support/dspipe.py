"""A small real DeepSpeed pipeline on CPU: layers in stages, a tied embedding on the first and the last, ZeRO 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from support import dsjob
from support.gloo import run_ranks

VOCAB, WIDTH, LENGTH, BATCH, LAYERS = 23, 10, 5, 8, 3


class Layer(nn.Module):
    """One block."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.silu(self.up(self.norm(hidden))))


def _logits(embedding: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, embedding.weight)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make_engine(pp: int, ranks: int, *, universal: bool) -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(5)
    specs = [
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH),
        *(LayerSpec(Layer, 11 + number) for number in range(LAYERS)),
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH, forward_fn=_logits),
    ]
    model = PipelineModule(specs, num_stages=pp, loss_fn=_loss, partition_method="uniform")
    replicas = ranks // pp
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": BATCH // 2 // replicas,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
    }
    config |= {"checkpoint": {"load_universal": True}} if universal else {}
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.005, "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    return engine


def train(engine: Any, ranks: int, pp: int, first: int, count: int) -> list[float]:
    """Takes updates over the same global batches at every degree; returns their losses."""
    losses: list[float] = []
    replicas = ranks // pp
    replica = engine.grid.get_data_parallel_rank()
    for update in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + update)
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
        mine = ids.reshape(BATCH // 2, 2, LENGTH)[replica::replicas]
        batches: Iterator[Any] = iter([(micro, micro) for micro in mine])
        loss = engine.train_batch(data_iter=batches)
        losses.append(float(loss))
    return losses


def held(engine: Any) -> dict[str, np.ndarray]:
    """Returns this rank's stage: weights and moments, whole, from DeepSpeed's own interface."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, np.ndarray] = {}
    for name, parameter in engine.module.named_parameters():
        found[f"module/{name}"] = parameter.detach().float().numpy().copy()
        found[f"fp32/{name}"] = safe_get_full_fp32_param(parameter).numpy().copy()
        for slot in ("exp_avg", "exp_avg_sq"):
            found[f"{slot}/{name}"] = safe_get_full_optimizer_state(parameter, slot).numpy().copy()
    return {name: array.reshape(found[f"module/{name.partition('/')[2]}"].shape) for name, array in found.items()}


def _source(rank: int, ranks: int, pp: int, folder: str) -> dict[str, Any]:
    dsjob._quiet()
    engine = make_engine(pp, ranks, universal=False)
    train(engine, ranks, pp, 0, 3)
    engine.save_checkpoint(folder)
    now = held(engine)
    return {"held": now, "later": train(engine, ranks, pp, 3, 3)}


def _resumed(rank: int, ranks: int, pp: int, folder: str, universal: bool) -> dict[str, Any]:
    dsjob._quiet()
    engine = make_engine(pp, ranks, universal=universal)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    now = held(engine)
    groups = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.optimizer.param_groups]
    steps = {float(state["step"]) for state in engine.optimizer.optimizer.state.values()}
    dist.barrier()
    return {"held": now, "groups": groups, "steps": steps, "later": train(engine, ranks, pp, 3, 3)}


def make_source(pp: int, ranks: int, folder: Path) -> tuple[dict[str, np.ndarray], list[float]]:
    """Trains and saves; returns everything that the stages held together, and the losses of the uninterrupted run."""
    found = run_ranks(ranks, _source, pp, str(folder), timeout=300)
    return _together(found), found[0]["later"]


def resume(
    pp: int, ranks: int, folder: Path, *, universal: bool = True
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Loads, by `load_universal` or natively, and trains on.

    Returns what the stages held together, and what each rank saw.
    """
    found = run_ranks(ranks, _resumed, pp, str(folder), universal, timeout=300)
    return _together(found), found


def _together(found: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: array for rank in found for name, array in rank["held"].items()}

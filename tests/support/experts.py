"""The toy model in parts: sharded by FSDP2, and with experts of which every rank holds some."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import FSDPModule, fully_shard

from support.contribution import HIDDEN, WIDTH, Toy, make_model

EXPERTS = 4


class Experts(torch.nn.Module):
    """A block whose tokens go to one of four experts, of which a rank of `group` holds as many as every other one."""

    def __init__(self, first: int, number: int, group: Any = None) -> None:
        super().__init__()
        self.first, self.number, self.group = first, number, group
        every = torch.Generator().manual_seed(5)
        up = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=every, dtype=torch.float64)
        down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=every, dtype=torch.float64)
        self.up = torch.nn.Parameter(up[first : first + number].clone())
        self.down = torch.nn.Parameter(down[first : first + number].clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        expert = (hidden.detach().abs().sum(1) * 1e3).long() % EXPERTS
        order = torch.argsort(expert, stable=True)
        sent = torch.bincount(expert, minlength=EXPERTS)
        mine, sizes = hidden[order], [sent]
        if self.group is None:
            return hidden + self.apply_to(mine, sent)[torch.argsort(order)]
        ranks = dist.get_world_size(self.group)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = [counts.reshape(ranks, -1).sum(1).tolist() for counts in (received, sent)]
        there = all_to_all_single_autograd(mine, *sizes, self.group)
        owner = torch.arange(self.number).repeat(ranks).repeat_interleave(received)
        grouped = torch.argsort(owner, stable=True)
        done = self.apply_to(there[grouped], torch.bincount(owner, minlength=self.number))[torch.argsort(grouped)]
        back = all_to_all_single_autograd(done, sizes[1], sizes[0], self.group)
        return hidden + back[torch.argsort(order)]

    def apply_to(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = tokens.split(counts.tolist())
        return torch.cat(
            [torch.tanh(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)]
        )


def make_experts(dtype: torch.dtype, first: int = 0, number: int = EXPERTS, group: Any = None) -> Toy:
    model = make_model(torch.float64)
    model.blocks[1] = Experts(first, number, group)
    return model.to(dtype)


def shard(model: Toy, mesh: Any) -> Toy:
    """Shards every block, and the rest, by FSDP2 over the mesh."""
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no average; still divides afterwards
    return model

"""Context parallelism without Transformer Engine: each rank has two stretches of every sequence, and attends to all.

megatron.core's own attention refuses context parallelism. Stretches are dealt as its rotary embedding expects them: of
2 * CP stretches, rank r has number r and number 2 * CP - 1 - r, so that causal attention costs every rank the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


def own_part(tensor: Tensor) -> Tensor:
    """Returns this rank's stretches of sequences `(samples, positions)`."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if size == 1:
        return tensor
    stretches = tensor.chunk(2 * size, dim=1)
    return torch.cat([stretches[rank], stretches[-1 - rank]], dim=1)


def gather_parts(part: Tensor, dim: int = 1) -> Tensor:
    """Returns whole sequences, in order along `dim`, from the stretches of all ranks. Collective, differentiable."""
    size = mpu.get_context_parallel_world_size()
    if size == 1:
        return part
    halves = [half for own in _Gather.apply(part) for half in own.chunk(2, dim)]
    return torch.cat([*halves[::2], *reversed(halves[1::2])], dim)


class _Gather(torch.autograd.Function):
    """Every rank's tensor on every rank; the gradient of each is the sum over ranks."""

    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        group = mpu.get_context_parallel_group()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=mpu.get_context_parallel_group())
        return total[mpu.get_context_parallel_rank()]


class AttentionOverParts(MegatronModule):
    """Causal attention of this rank's queries to the keys and values of the whole sequence."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        """Shapes `(positions, samples, heads, channels)`; returns `(positions, samples, heads * channels)`."""
        key, value = gather_parts(key, 0), gather_parts(value, 0)
        places = torch.arange(len(key), device=query.device)
        seen = own_part(places[None])[0][:, None] >= places
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        found = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        return found.permute(2, 0, 1, 3).flatten(2)

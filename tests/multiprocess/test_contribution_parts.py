"""The same gradient where ranks hold different parts of it: experts (EP), and positions of one sample (CP).

Both cross the passes of all replicas with collectives of the forward, so that empty passes have to take part.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from samerun.core.mesh import Layout
from samerun.train.contribution import ContributionMean
from support.contribution import LENGTH, Toy, check_cases, make_model
from support.experts import EXPERTS, make_experts
from support.gloo import run_ranks


def on_experts(rank: int, world_size: int) -> int:
    """Four replicas that all read samples of their own; each pair holds the experts once, and FSDP2 shards both ways.

    An expert's gradient sums over the pairs only, having met the tokens of all four ranks: it must be divided by four
    all the same (`set_gradient_divide_factor`, as torchtitan does for experts).
    """
    layout = Layout.parse("dp_shard=4,ep=2")
    assert layout.batch_replicas == world_size
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    flat = mesh[("dp_shard_mod_ep", "ep")]._flatten("dp_shard")
    number = EXPERTS // 2
    first = mesh["ep"].get_local_rank() * number

    def model_of(dtype: torch.dtype) -> Toy:
        model = make_experts(dtype, first, number, mesh["ep"].get_group())
        fully_shard(model.blocks[1], mesh=mesh["dp_shard_mod_ep"])
        model.blocks[1].set_gradient_divide_factor(float(world_size))
        fully_shard(model, mesh=flat)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
        return model

    def held(name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[first : first + number] if name in ("blocks.1.up", "blocks.1.down") else gradient

    mean = ContributionMean(flat, replicas=layout.batch_replicas)
    return check_cases(model_of, mean, rank, make=make_experts, held=held, clips=False)


def on_positions(rank: int, world_size: int) -> int:
    """Two replicas; the two ranks of each hold 4 and 3 of every sample's 7 positions, and FSDP2 reduces over all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    flat = mesh[("dp_shard", "cp")]._flatten("dp_cp")

    def model_of(dtype: torch.dtype) -> Toy:
        model = fully_shard(make_model(dtype), mesh=flat)
        model.set_force_sum_reduction_for_comms(True)
        return model

    assert Layout.parse("dp_shard=2,cp=2").batch_replicas == 2
    half = -(-LENGTH // 2)
    columns = slice(0, half) if mesh["cp"].get_local_rank() == 0 else slice(half, LENGTH)
    mean = ContributionMean(flat, replicas=world_size)
    return check_cases(model_of, mean, rank // 2, replicas=2, columns=columns, units=("tokens",))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("check", "cases"), [(on_experts, 10), (on_positions, 5)])
def test_parts_of_a_replica_make_the_same_gradient(check: Callable[..., int], cases: int) -> None:
    assert run_ranks(4, check) == [cases] * 4

"""The layout in a trace's header is the one that the tensors have, whatever the script claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from samerun.core.mesh import Layout
from samerun.train.environment import environment, observed_coordinate, observed_layout
from support.gloo import run_ranks

pytestmark = pytest.mark.multiprocess


def ddp() -> nn.Module:
    return DistributedDataParallel(nn.Linear(4, 4))


def plain() -> nn.Module:
    return nn.Linear(4, 4)


def sharded_without_names() -> nn.Module:
    return fully_shard(nn.Linear(4, 4))


def hybrid() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_shard(nn.Linear(4, 4), mesh=mesh)


def tensor_parallel_outermost() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["dp_shard"])


def tensor_parallel_only() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tp"))
    return parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})


CASES: list[tuple[Any, str | None, dict[str, int], dict[str, int]]] = [
    # build, declared, expected layout, expected place of rank 1
    (plain, None, {"dp_replicate": 4}, {"dp_replicate": 1}),
    (plain, "pp=4", {"pp": 4}, {"pp": 1}),
    (ddp, None, {"dp_replicate": 4}, {"dp_replicate": 1}),
    (ddp, "dp_shard=4", {"dp_replicate": 4}, {"dp_replicate": 1}),
    (sharded_without_names, None, {"dp_shard": 4}, {"dp_shard": 1}),
    (hybrid, None, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 1}),
    (hybrid, "dp_shard=4", {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 1}),
    (tensor_parallel_outermost, "tp=2,dp_shard=2", {"tp": 2, "dp_shard": 2}, {"dp_shard": 1}),
    (tensor_parallel_only, None, {"tp": 2, "dp_replicate": 2}, {"tp": 1}),
    (tensor_parallel_only, "tp=2,dp_replicate=2", {"tp": 2, "dp_replicate": 2}, {"tp": 1}),
]


def observe(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    for build, declared, _, _ in CASES:
        model = build()
        layout = observed_layout(model, Layout.parse(declared) if declared else None)
        found.append((layout, observed_coordinate(model, layout), environment(model)))
    return found


def test_layout_and_place_are_read_off_the_tensors() -> None:
    ranks = run_ranks(4, observe, timeout=300)
    for number, (build, declared, layout, place) in enumerate(CASES):
        where = f"{build.__name__}, declared {declared}"
        assert [rank[number][0] for rank in ranks] == [layout] * 4, where
        assert {axis: at for axis, at in ranks[1][number][1].items() if at} == place, where
        assert len({str(rank[number][1]) for rank in ranks}) == 4, where
        assert ranks[0][number][2]["backend"] == "gloo"
        assert ranks[0][number][2]["dtype"] == ["float32"]
        assert ranks[0][number][2]["threads"] == torch.get_num_threads() == 1

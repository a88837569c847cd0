"""The gradient of one fixed global batch, on real gloo ranks, against one process in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from samerun.catalog import load_catalog
from samerun.core.batch import deal
from samerun.errors import UsageError
from samerun.train.contribution import ContributionMean, accumulate
from support.contribution import Toy, check_cases, count, gradients, loss_sum, make_data, make_model, reference
from support.experts import shard
from support.gloo import run_ranks


def on_ddp(rank: int, world_size: int) -> int:
    return check_cases(
        lambda dtype: DistributedDataParallel(make_model(dtype)), ContributionMean(replicas=world_size), rank
    )


def on_fsdp(rank: int, world_size: int) -> int:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    return check_cases(lambda dtype: shard(make_model(dtype), mesh), ContributionMean(mesh), rank)


def on_fsdp_that_sums(rank: int, world_size: int) -> int:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))

    def model_of(dtype: torch.dtype) -> Toy:
        model = shard(make_model(dtype), mesh)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
        return model

    return check_cases(model_of, ContributionMean(mesh.get_group(), reduction="sum"), rank)


def on_hsdp(rank: int, world_size: int) -> int:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return check_cases(lambda dtype: shard(make_model(dtype), mesh), ContributionMean(mesh, replicas=world_size), rank)


def on_tensor_parallel(rank: int, world_size: int) -> int:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp_shard", "tp"))

    def model_of(dtype: torch.dtype) -> Toy:
        model = make_model(dtype)
        parallelize_module(model, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
        return shard(model, mesh["dp_shard"])

    with pytest.raises(UsageError, match="SR-MEAN-GROUP"):
        ContributionMean(replicas=world_size // 2)  # all ranks: tensor-parallel ones would count twice
    return check_cases(model_of, ContributionMean(mesh["dp_shard"], replicas=world_size // 2), rank // 2, clips=False)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world_size", "check"),
    [
        (2, on_ddp),
        (3, on_ddp),
        (2, on_fsdp),
        (3, on_fsdp),
        (4, on_fsdp),
        (3, on_fsdp_that_sums),
        (4, on_hsdp),
        (4, on_tensor_parallel),
    ],
)
def test_the_gradient_does_not_depend_on_the_dealing(world_size: int, check: Callable[..., int]) -> None:
    assert run_ranks(world_size, check) == [10] * world_size


def test_one_process_needs_no_group() -> None:
    assert check_cases(make_model, ContributionMean(), 0) == 10


def test_means_of_means_would_differ() -> None:
    """The mistake that the class exists for: on the same dealing, averaging means is another gradient."""
    expected, _ = reference("tokens", 16)
    model = make_model(torch.float64)
    data = make_data()
    for positions in deal(16, 1, 3).replica_positions(0):
        ids, targets = (part[list(positions)] for part in data)
        (loss_sum(model, ids, targets) / count(targets, "tokens") / 6).backward()
    assert max((gradients(model)[name] - expected[name]).abs().max().item() for name in expected) > 1e-3


def raise_alike(rank: int, world_size: int) -> list[str]:
    """Every rank must refuse together, whoever made the mistake; else the others would wait for ever."""
    found: list[str] = []

    def expect(code: str, call: Callable[[], Any]) -> None:
        with pytest.raises(UsageError) as caught:
            call()
        found.extend(problem.code for problem in caught.value.problems)
        assert code in found

    mean = ContributionMean()
    scalar = torch.ones((), requires_grad=True)
    expect("SR-MEAN-COUNT", lambda: mean.start(-1 if rank == 1 else 4))
    expect("SR-MEAN-COUNT", lambda: mean.start(torch.tensor(3) if rank == 0 else 4))  # type: ignore[arg-type]
    expect("SR-MEAN-ZERO", lambda: mean.start(0))
    expect("SR-MEAN-PASSES", lambda: mean.start(3, passes=2 + (rank == 2)))
    assert mean.start(3 * (rank == 0), passes=2) == 3
    for _ in range(2 - (rank == 1)):
        mean.backward(scalar * 3)
    expect("SR-MEAN-PASSES", mean.loss)
    mean.start(1, passes=1)
    mean.backward(scalar * rank)
    assert mean.loss() == pytest.approx(sum(range(world_size)) / world_size)
    return found


@pytest.mark.multiprocess
def test_every_rank_refuses_alike() -> None:
    found = run_ranks(3, raise_alike)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 5


class TestAlone:
    def test_out_of_order(self) -> None:
        mean = ContributionMean()
        for call in (mean.loss, lambda: mean.backward(torch.ones((), requires_grad=True))):
            with pytest.raises(UsageError, match="SR-MEAN-ORDER"):
                call()
        assert mean.total == 0

    def test_a_loss_that_is_not_one_number(self) -> None:
        mean = ContributionMean()
        mean.start(4)
        with pytest.raises(UsageError, match="SR-MEAN-LOSS"):
            mean.backward(torch.ones(4, requires_grad=True))
        mean.backward(torch.ones(1, requires_grad=True))
        assert mean.loss() == 0.25

    def test_unknown_reduction(self) -> None:
        with pytest.raises(UsageError, match="SR-MEAN-GROUP"):
            ContributionMean(reduction="max")  # type: ignore[arg-type]

    def test_an_update_of_empty_passes_alone_is_zero_weight(self) -> None:
        mean = ContributionMean()
        parameter = torch.ones((), requires_grad=True)
        mean.start(2)
        mean.backward(parameter * 3, counts=False)
        assert parameter.grad == 0
        assert mean.loss() == 0.0

    def test_scaled_leaves_backward_to_the_loop(self) -> None:
        mean = ContributionMean()
        parameter = torch.ones((), requires_grad=True)
        mean.start(4)
        (mean.scaled(parameter * 3) * 1024).backward()  # a loss scaler's factor on top
        assert parameter.grad == 3 / 4 * 1024
        assert mean.loss() == 0.75

    def test_accumulate_leaves_a_plain_model_alone(self) -> None:
        assert list(accumulate(torch.nn.Linear(1, 1), range(3))) == [0, 1, 2]
        assert list(accumulate(torch.nn.Linear(1, 1), [])) == []
        assert list(itertools.islice(accumulate(torch.nn.Linear(1, 1), [None, None]), 1)) == [None]

    def test_every_code_is_catalogued(self) -> None:
        catalog = load_catalog()
        for name in ("GROUP", "COUNT", "ZERO", "PASSES", "LOSS", "ORDER"):
            assert f"SR-MEAN-{name}" in catalog

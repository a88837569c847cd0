"""Begun by a framework's own loader on four ranks, gone on with on 3, 5 and 2: the updates of the run that stayed.

The first ranks' ids come out of the framework's real loader, with workers and prefetch. It is left after every update
in turn. From there every next update is dealt to another number of replicas, and read through real loaders again; each
must hold what the framework's loader itself would have handed out in that update. Loaders that need more than torch
are in `tests/trainers/test_loader_orders.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from samerun.core.order import GlobalOrder
from samerun.core.orders import (
    DistributedSamplerOrder,
    KeyedOrder,
    MegatronCyclicOrder,
    MegatronSequentialOrder,
    RandomSamplerOrder,
)
from samerun.core.progress import Committed
from samerun.train.draw import random_sampler_seed
from support.routes import (
    GOLDEN,
    LENGTH,
    RANKS,
    READ_AHEAD,
    Numbers,
    as_list,
    go_on,
    joined,
    leave_after_every_update,
)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("drops", "loader_drops"), [(False, False), (True, False), (False, True), (True, True)])
def test_distributed_sampler(shuffle: bool, drops: bool, loader_drops: bool) -> None:
    order = DistributedSamplerOrder(
        LENGTH, 5, shuffle, drops, num_replicas=RANKS, loader_batch=3 if loader_drops else None
    )
    by_rank = []
    for rank in range(RANKS):
        sampler = DistributedSampler(range(LENGTH), RANKS, rank, shuffle, 5, drops)  # type: ignore[arg-type]
        sampler.set_epoch(1)
        more = READ_AHEAD if rank == 0 else {}
        loader = DataLoader(Numbers(), 3, sampler=sampler, drop_last=loader_drops, collate_fn=as_list, **more)
        by_rank.append(list(loader))
    leave_after_every_update(order, 3 * RANKS, joined(by_rank), epoch=1)


def test_random_sampler() -> None:
    torch.manual_seed(8)
    torch.rand(2)
    order = RandomSamplerOrder(LENGTH, (random_sampler_seed(torch.get_rng_state()),))
    data: Any = range(LENGTH)
    loader = DataLoader(data, 4, shuffle=True, collate_fn=as_list, **READ_AHEAD)
    leave_after_every_update(order, 8, joined([list(loader)], per_update=2))


MEGATRON = [
    case for case in json.loads((GOLDEN / "megatron.json").read_text()) if case["dp"] == RANKS and case["length"] < 90
]


@pytest.mark.parametrize("case", MEGATRON, ids=lambda c: f"{c['kind']}-{c['length']}-{c['drop_last']}")
def test_megatron(case: dict[str, Any]) -> None:
    """The ids that Megatron gave were kept, and those of its own resumes; `tests/trainers` runs its loader itself."""
    length, micro = case["length"], case["micro"]
    order: GlobalOrder = MegatronSequentialOrder(length, micro, RANKS, case["drop_last"])
    if case["kind"] != "sequential":
        order = MegatronCyclicOrder(length, micro, RANKS, case["kind"] == "cyclic-sharded")
    whole = -(-order.num_samples(0) // (micro * RANKS))  # ranks that Megatron lets run ahead are another matter
    leave_after_every_update(order, micro * RANKS, joined(case["ids"][0])[:whole])
    for count, rest in enumerate(case["after"]):
        at = Committed(samples_in_epoch=count * micro * RANKS)
        go_on(order, at, micro * RANKS, joined(rest)[: whole - count])


def test_keyed() -> None:
    order = KeyedOrder(LENGTH, 3)
    ids = order.ids(0, 0, LENGTH).tolist()
    leave_after_every_update(order, 12, [ids[at : at + 12] for at in range(0, LENGTH, 12)])

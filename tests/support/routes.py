"""Leaving a framework's run after each of its updates, and going on at other degrees, through real loaders."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from samerun.core.order import GlobalOrder
from samerun.core.progress import Committed
from samerun.train.sampler import ElasticSampler

LENGTH, RANKS, ROUTE = 43, 4, (3, 5, 2)
GOLDEN = Path(__file__).parents[1] / "golden" / "order"

Updates = list[list[int]]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


def as_list(samples: list[int]) -> list[int]:
    return list(samples)


def joined(by_rank: Sequence[Iterable[Sequence[int]]], per_update: int = 1) -> Updates:
    """[rank][batch] -> the ids of each update, over all ranks; a rank that ran out earlier gives nothing."""
    steps = [
        [int(i) for batch in step for i in (batch if batch is not None else ())]
        for step in itertools.zip_longest(*by_rank)
    ]
    updates = (steps[at : at + per_update] for at in range(0, len(steps), per_update))
    return [list(itertools.chain.from_iterable(update)) for update in updates]


def go_on(order: GlobalOrder, at: Committed, batch: int, expected: Updates, workers: int = 0) -> None:
    """Makes the expected updates from `at` on, one after the other on 3, 5, 2, 3, ... replicas."""
    more: dict[str, Any] = {"prefetch_factor": 3, "persistent_workers": True} if workers else {}
    state = {"schema": "samerun/sampler/1", **at.to_json(), "order": order.identity()}
    for wanted, replicas in zip(expected, itertools.cycle(ROUTE), strict=False):
        parts = [
            ElasticSampler(order, global_batch=batch, replicas=replicas, replica=r, max_microbatch=3)
            for r in range(replicas)
        ]
        found: list[int] = []
        for part in parts:
            part.load_state_dict(state)
            loader = DataLoader(Numbers(), batch_sampler=part, num_workers=workers, collate_fn=as_list, **more)
            for microbatch in next(part.updates(loader)):
                found += microbatch.batch
            part.commit()
        assert Counter(found) == Counter(wanted)
        state = parts[0].state_dict()


def leave_after_every_update(order: GlobalOrder, batch: int, real: Updates, epoch: int = 0) -> None:
    """The framework's run is left after each of its updates in turn; once the rest is read by workers."""
    length = order.num_samples(epoch)
    for number in range(len(real)):
        at = Committed(update=number, epoch=epoch, samples_in_epoch=min(number * batch, length), samples=number * batch)
        go_on(order, at, batch, real[number:], workers=2 if number == len(real) - 2 else 0)


READ_AHEAD: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}

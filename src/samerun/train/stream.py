"""Iterable data with the sampler's position: shards that are read in sequence, on any number of ranks and workers.

    order = RangeOrder({"a.bin": 10_000, "b.bin": 8_000}, lanes=8, seed=0)
    sampler = ElasticSampler(order, global_batch=32, replicas=3, replica=r, max_microbatch=2)
    stream = ElasticStream(sampler, open_shard)              # open_shard("a.bin", 120) yields samples 120, 121, ...
    loader = DataLoader(stream, batch_size=None, collate_fn=collate, num_workers=2, persistent_workers=True)
    for update in sampler.updates(loader, until=total_updates):
        ...
        sampler.commit()

Every worker computes from the order which samples are its own, and skips the others of its open shards. Nothing but the
committed position is ever saved, so what workers and the prefetch queue had read ahead is read again after a restart. A
loop that does not use `updates` calls `sampler.share_position()` before each iteration of the loader.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from samerun.core.orders.shards import RangeOrder
from samerun.errors import Problem, UsageError
from samerun.train.sampler import ElasticSampler

OpenShard = Callable[[str, int], Iterator[Any]]
"""`open_shard(shard, start)`: an iterator over the shard's samples from place `start` (0-based) on."""


class ElasticStream(IterableDataset[list[Any]]):
    """Yields this replica's microbatches as lists of samples, for a DataLoader with `batch_size=None`.

    With W workers, worker w makes microbatches w, w + W, ...: the loader asks its workers in turn, so the sequence is
    that of one process. An empty microbatch is `[]`, or one sample of the update with `empty="placeholder"`.

    Args:
        sampler: an `ElasticSampler` over a `RangeOrder`.
        open_shard: opens a shard at a place. Called again for every place that lies behind, or far ahead.
        max_open: how many shards a worker keeps open; the order's lanes if left out.
        max_skip: up to how many samples are read and thrown away to reach a place ahead, before the shard is reopened.

    Raises:
        UsageError: if the sampler's order is of no shards (SR-ORDER-INVALID).
    """

    def __init__(
        self, sampler: ElasticSampler, open_shard: OpenShard, *, max_open: int | None = None, max_skip: int = 1000
    ) -> None:
        if not isinstance(sampler.order, RangeOrder):
            hint = "give ElasticSampler a RangeOrder; map-style data needs no stream"
            found = type(sampler.order).__name__
            raise UsageError(Problem("SR-ORDER-INVALID", "a stream reads shards", found=found, hint=hint))
        self.sampler = sampler
        self.order = sampler.order
        self.open_shard = open_shard
        self.max_open = max_open or self.order.lanes
        self.max_skip = max_skip
        sampler.share_position()

    def __iter__(self) -> Iterator[list[Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        mine = itertools.islice(self.sampler.shared_microbatches(), first, None, step)
        shards = _OpenShards(self.open_shard, self.max_open, self.max_skip)
        for ids in mine:
            yield [shards.read(shard, place) for shard, place in self.order.locate(np.array(ids, dtype=np.int64))]


class _OpenShards:
    """Iterators into the shards used last, each with the place that it is at."""

    def __init__(self, open_shard: OpenShard, max_open: int, max_skip: int) -> None:
        self._open_shard, self._max_open, self._max_skip = open_shard, max_open, max_skip
        self._open: OrderedDict[str, tuple[Iterator[Any], int]] = OrderedDict()

    def read(self, shard: str, place: int) -> Any:
        stream, at = self._open.pop(shard, (None, 0))
        if stream is None or not 0 <= place - at <= self._max_skip:
            stream, at = self._open_shard(shard, place), place
        try:
            for _ in range(place - at):
                next(stream)
            sample = next(stream)
        except StopIteration:
            raise UsageError(
                Problem(
                    "SR-ORDER-SHORT",
                    f"{shard} ended before sample {place}",
                    where={"file": shard},
                    expected="as many samples as the order was told",
                    found=f"fewer than {place + 1}",
                    hint="count the shard's samples again; with another length every position means something else",
                )
            ) from None
        self._open[shard] = (stream, place + 1)
        while len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return sample

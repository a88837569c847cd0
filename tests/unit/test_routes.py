"""Begun by a framework's own loader on four ranks, gone on with on 3, 5 and 2: the updates of the run that stayed.

The first ranks' ids come out of the framework's real loader, with workers and prefetch. It is left after every update
in turn. From there every next update is dealt to another number of replicas, and read through real loaders again; each
must hold what the framework's loader itself would have handed out in that update.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from samerun.core.order import GlobalOrder
from samerun.core.orders import (
    AccelerateOrder,
    DistributedSamplerOrder,
    KeyedOrder,
    MegatronCyclicOrder,
    MegatronSequentialOrder,
    RandomSamplerOrder,
    RangeOrder,
    ShardCursor,
    ShardRange,
    remaining_ranges,
    stateful_position,
)
from samerun.core.progress import Committed
from samerun.train.draw import random_sampler_seed
from samerun.train.sampler import ElasticSampler
from samerun.train.stream import ElasticStream

LENGTH, RANKS, ROUTE = 43, 4, (3, 5, 2)
GOLDEN = Path(__file__).parents[1] / "golden" / "order"
QUIET = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

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


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("drops", "loader_drops"), [(False, False), (True, False), (False, True)])
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
    """Its classes need a GPU's Megatron around them: their ids were kept, and those of their own resumes."""
    length, micro = case["length"], case["micro"]
    order: GlobalOrder = MegatronSequentialOrder(length, micro, RANKS, case["drop_last"])
    if case["kind"] != "sequential":
        order = MegatronCyclicOrder(length, micro, RANKS, case["kind"] == "cyclic-sharded")
    whole = -(-order.num_samples(0) // (micro * RANKS))  # ranks that Megatron lets run ahead are another matter
    leave_after_every_update(order, micro * RANKS, joined(case["ids"][0])[:whole])
    for count, rest in enumerate(case["after"]):
        at = Committed(samples_in_epoch=count * micro * RANKS)
        go_on(order, at, micro * RANKS, joined(rest)[: whole - count])


@pytest.mark.framework
@QUIET
@pytest.mark.parametrize(
    "cut", [{}, {"split_batches": True}, {"even_batches": False}, {"dispatch_batches": True}], ids=str
)
def test_accelerate(cut: dict[str, bool]) -> None:
    loading = pytest.importorskip("accelerate.data_loader")
    batch = 12 if cut.get("split_batches") else 3
    base = RandomSamplerOrder.reseeded(LENGTH, 7)
    order = AccelerateOrder(base, batch, RANKS, **cut)
    if cut.get("dispatch_batches"):  # process 0 reads for all: the ids of gloo ranks were kept
        cases = json.loads((GOLDEN / "accelerate.json").read_text())
        kept = [c for c in cases if c.get("dispatch_batches") and not c.get("drop_last") and c["length"] == 23]
        assert len(kept) == 4
        for case in kept:
            split = case.get("split_batches", False)
            there = AccelerateOrder(RandomSamplerOrder.reseeded(23, 7), case["batch"], case["processes"], split, True)
            leave_after_every_update(there, there.step_samples, joined(case["ids"][0]))
        return
    data: Any = range(LENGTH)

    def loader_of(rank: int) -> Any:
        from accelerate.data_loader import SeedableRandomSampler

        sampler = SeedableRandomSampler(data, data_seed=7)
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, batch, False), collate_fn=as_list, **READ_AHEAD)
        return loading.prepare_data_loader(
            loader, num_processes=RANKS, process_index=rank, put_on_device=False, data_seed=7,
            use_seedable_sampler=True, split_batches=cut.get("split_batches", False),
            even_batches=cut.get("even_batches", True),
        )  # fmt: skip

    real = joined([list(loader_of(rank)) for rank in range(RANKS)])
    leave_after_every_update(order, order.step_samples, real)
    if cut.get("even_batches", True):
        for count in (1, 2):
            rest = joined([list(loading.skip_first_batches(loader_of(rank), count)) for rank in range(RANKS)])
            assert rest == real[count:]
            assert order.num_batches(0, order.skipped(0, count)) == count


@pytest.mark.framework
@QUIET
def test_stateful_loader_over_map_style_data() -> None:
    """A position from the states of four ranks, taken while their workers had read ahead."""
    build = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    order = DistributedSamplerOrder(LENGTH, 5, num_replicas=RANKS)
    loaders = []
    for rank in range(RANKS):
        sampler = DistributedSampler(range(LENGTH), RANKS, rank, seed=5)  # type: ignore[arg-type]
        workers = {"num_workers": 2, "prefetch_factor": 3} if rank < 2 else {}
        loaders.append(build(Numbers(), batch_size=3, sampler=sampler, collate_fn=as_list, **workers))
    states: list[list[Any]] = []
    real: Updates = []
    for step in zip(*loaders, strict=True):
        real.append([i for batch in step for i in batch])
        states.append([loader.state_dict() for loader in loaders])
    for number, each in enumerate(states, start=1):
        at = stateful_position(order, 0, each, 3)
        go_on(order, Committed(samples_in_epoch=at), 3 * RANKS, real[number:])


SHARDS = {"a": 17, "b": 9, "c": 4, "d": 21, "e": 6, "f": 13, "g": 5, "h": 8}


class Reader(IterableDataset[tuple[str, int]]):
    """A streaming loader as many are written: each worker of each rank reads shards of its own, with a cursor."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cursor: dict[str, int] = {}

    def mine(self) -> list[str]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return list(SHARDS)[self.rank * count + number :: RANKS * count]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for shard in self.mine():
            for place in range(self.cursor.get(shard, 0), SHARDS[shard]):
                self.cursor[shard] = place + 1
                yield shard, place

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": dict(self.cursor), "mine": self.mine()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = dict(state["cursor"])


def cursors_of(rank: int, state: Any) -> list[ShardCursor]:
    """What a StatefulDataLoader saved of its workers' datasets, as they were for the batches that were handed out."""
    found = []
    workers = state["_snapshot"]["_worker_snapshots"]
    for name, worker in workers.items():
        dataset = worker["fetcher_state"]["dataset_iter_state"] or worker["dataset_state"]
        for shard in dataset["mine"]:
            whole = ShardRange(shard, 0, SHARDS[shard])
            found.append(ShardCursor(f"rank {rank} {name}", whole, dataset["cursor"].get(shard, 0)))
    return found


def open_shard(shard: str, start: int) -> Iterator[tuple[str, int]]:
    return iter([(shard, place) for place in range(start, SHARDS[shard])])


@pytest.mark.framework
@QUIET
def test_streaming_shards_with_a_cursor_per_rank_and_worker() -> None:
    """After each batch: what four ranks with two workers each had handed out, and the rest exactly once on 3, 5, 2."""
    build = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loaders = [
        build(
            Reader(rank), batch_size=2, num_workers=2, prefetch_factor=3, collate_fn=as_list, snapshot_every_n_steps=1
        )
        for rank in range(RANKS)
    ]
    everything = {(shard, place) for shard, length in SHARDS.items() for place in range(length)}
    consumed: list[tuple[str, int]] = []
    streams = [iter(loader) for loader in loaders]
    for step in range(4):
        for rank, stream in enumerate(streams):
            if rank != 3 or step < 3:  # one rank is behind the others
                consumed += next(stream)
        cursors = [c for rank, loader in enumerate(loaders) for c in cursors_of(rank, loader.state_dict())]
        rest = remaining_ranges(SHARDS, cursors)
        order = RangeOrder(SHARDS, rest, lanes=3, seed=2)
        assert order.num_samples(0) == len(everything) - len(consumed)
        left: list[tuple[str, int]] = []
        state: Any = None
        for number, replicas in enumerate(itertools.cycle(ROUTE), start=1):
            if len(left) == order.num_samples(0):
                break
            parts = [
                ElasticSampler(order, global_batch=17, replicas=replicas, replica=r, max_microbatch=3)
                for r in range(replicas)
            ]
            for part in parts:
                if state is not None:
                    part.load_state_dict(state)
                stream = DataLoader(ElasticStream(part, open_shard), batch_size=None, collate_fn=as_list)
                left += [
                    sample for microbatch in next(part.updates(stream, until=number)) for sample in microbatch.batch
                ]
                part.commit()
            state = parts[0].state_dict()
        assert Counter(left) == Counter(everything - set(consumed))
    assert len(consumed) == len(set(consumed)) == 2 * (4 * RANKS - 1)


def test_keyed() -> None:
    order = KeyedOrder(LENGTH, 3)
    ids = order.ids(0, 0, LENGTH).tolist()
    leave_after_every_update(order, 12, [ids[at : at + 12] for at in range(0, LENGTH, 12)])

"""Iterable data, packing and torch's seeds: real loaders with workers, moved between numbers of replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from samerun.catalog import load_catalog
from samerun.core.order import SequentialOrder
from samerun.core.orders import KeyedOrder, RandomSamplerOrder, RangeOrder
from samerun.core.packing import PackedOrder, check_packing, next_fit
from samerun.errors import UsageError
from samerun.train.draw import random_sampler_seed
from samerun.train.sampler import ElasticSampler
from samerun.train.stream import ElasticStream

LENGTHS = {"a": 11, "b": 5, "c": 8}
ORDER = RangeOrder(LENGTHS, lanes=2, seed=3)


def open_shard(shard: str, start: int) -> Iterator[tuple[str, int]]:
    return iter([(shard, place) for place in range(start, LENGTHS[shard])])


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def loaders(replicas: int, workers: int, state: Any = None) -> list[tuple[ElasticSampler, DataLoader[Any]]]:
    found = []
    for replica in range(replicas):
        sampler = ElasticSampler(ORDER, global_batch=5, replicas=replicas, replica=replica, max_microbatch=2)
        if state is not None:
            sampler.load_state_dict(state)
        more: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 3} if workers else {}
        stream = ElasticStream(sampler, open_shard, max_skip=2)
        found.append((sampler, DataLoader(stream, batch_size=None, collate_fn=as_list, num_workers=workers, **more)))
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_moved_between_degrees_over_epochs(workers: int) -> None:
    """Persistent workers over an epoch's end, 3 -> 2: every sample of three epochs once, nothing read ahead is lost."""
    expected = [ORDER.locate(ORDER.ids(epoch, 0, 24)) for epoch in range(3)]
    consumed: list[Any] = []
    state: Any = None
    for replicas, until in ((3, 7), (2, 15)):
        parts = loaders(replicas, workers, state)
        streams = [sampler.updates(loader, until=until) for sampler, loader in parts]
        for updates in zip(*streams, strict=True):
            dealt: list[Any] = []
            for update in updates:
                for microbatch in update:
                    assert len(microbatch.batch) == len(microbatch.ids)
                    dealt += microbatch.batch
            assert sorted(dealt) == sorted(ORDER.locate(parts[0][0].global_ids()))
            consumed.append(dealt)
            for sampler, _ in parts:
                sampler.commit()
        state = parts[0][0].state_dict()
        del parts, streams
    flat = list(itertools.chain(*consumed))
    assert [sorted(flat[24 * epoch : 24 * epoch + 24]) for epoch in range(3)] == [sorted(part) for part in expected]


def test_a_stream_needs_shards_and_whole_ones() -> None:
    plain = ElasticSampler(SequentialOrder(9), global_batch=3, replicas=1, replica=0, max_microbatch=3)
    with pytest.raises(UsageError, match="shards"):
        ElasticStream(plain, open_shard)
    longer = ElasticSampler(RangeOrder({"a": 20}), global_batch=20, replicas=1, replica=0, max_microbatch=20)
    loader = DataLoader(ElasticStream(longer, open_shard), batch_size=None, collate_fn=as_list)
    with pytest.raises(UsageError) as caught:
        list(loader)
    assert [problem.code for problem in caught.value.problems] == ["SR-ORDER-SHORT"]
    assert "SR-ORDER-SHORT" in load_catalog()


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_next_fit_against_a_loop(lengths: list[int]) -> None:
    starts, room = [0], 8
    for place, length in enumerate(lengths):
        if length > room:
            starts.append(place)
            room = 8
        room -= length
    assert next_fit(lengths, 8) == [*starts, len(lengths)]


@given(st.integers(1, 5), st.integers(1, 5), st.data())
@settings(max_examples=25, deadline=None)
def test_packed_rows_are_the_same_on_any_degree(first: int, second: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=30, max_size=30))
    order = PackedOrder(KeyedOrder(30, 1), lengths, 9)
    seen: list[int] = []
    tokens, state = 0, None
    for replicas, num_updates in ((first, 3), (second, 4)):
        parts = [
            ElasticSampler(order, global_batch=4, replicas=replicas, replica=r, max_microbatch=2)
            for r in range(replicas)
        ]
        for part in parts:
            if state is not None:
                part.load_state_dict(state)
        for _ in range(num_updates):
            rows = parts[0].global_ids().tolist()
            seen += rows
            tokens += order.row_tokens(rows)
            for part in parts:
                part.commit(order.row_tokens(rows))
        state = parts[0].state_dict()
    whole = [row for epoch in range(8) for row in order.ids(epoch, 0, order.num_samples(epoch)).tolist()]
    assert seen == whole[: len(seen)]
    assert state is not None
    assert state["tokens"] == tokens
    members = [
        sample for row in order.ids(0, 0, order.num_samples(0)).tolist() for sample in order.members(row).tolist()
    ]
    assert members == order.base.ids(0, 0, 30).tolist()
    assert all(order.row_tokens([row]) <= 9 for row in whole)


def test_packing_that_depends_on_the_degree_is_found() -> None:
    lengths = np.random.default_rng(0).integers(1, 6, 60)

    def per_rank(ids: Sequence[int]) -> list[list[int]]:
        starts = next_fit([int(lengths[i]) for i in ids], 8)
        return [list(ids[a:b]) for a, b in itertools.pairwise(starts)]

    found = check_packing(per_rank, range(60), [4, 3, 2])
    assert [problem.code for problem in found] == ["SR-ORDER-PACKING"] * 2
    assert check_packing(lambda ids: [[i] for i in ids], range(60), [4, 3, 2]) == []
    with pytest.raises(ValueError, match="tokens"):
        PackedOrder(SequentialOrder(3), [1, 2, 9], 8)


def test_the_seed_that_a_random_sampler_takes() -> None:
    for make in (lambda data: DataLoader(data, 1, shuffle=True), lambda data: RandomSampler(data)):
        torch.manual_seed(5)
        torch.rand(3)
        state = torch.get_rng_state()
        it = make(range(20))
        real = [int(item) for item in it]
        order = RandomSamplerOrder(20, (random_sampler_seed(state, inside_loader=isinstance(it, DataLoader)),))
        assert order.ids(0, 0, 20).tolist() == real
        with pytest.raises(ValueError, match="not known"):
            order.ids(1, 0, 20)


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torchdata's own
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_inside_torchdatas_stateful_loader(workers: int, kind: str) -> None:
    """4 -> 3 -> 5 -> 2, saved after every update, over an epoch's end."""
    build = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader_of(sampler: ElasticSampler) -> Any:
        if kind == "iterable":
            stream = ElasticStream(sampler, open_shard, max_skip=2)
            return build(stream, batch_size=None, num_workers=workers, collate_fn=as_list)
        return build(range(24), batch_sampler=sampler, num_workers=workers, collate_fn=as_list)

    seen: list[Any] = []
    state: Any = None
    for number, replicas in zip(range(1, 8), itertools.cycle([4, 3, 5, 2]), strict=False):
        parts = [
            ElasticSampler(ORDER, global_batch=5, replicas=replicas, replica=r, max_microbatch=2)
            for r in range(replicas)
        ]
        for part in parts:
            if state is not None:
                part.load_state_dict(state)
        streams = [part.updates(loader_of(part), until=number) for part in parts]
        updates = [next(stream) for stream in streams]
        dealt = [sample for update in updates for microbatch in update for sample in microbatch.batch]
        wanted = parts[0].global_ids()
        assert sorted(dealt) == sorted(ORDER.locate(wanted) if kind == "iterable" else wanted.tolist())
        seen += dealt
        for part in parts:
            part.commit()
        state = parts[0].state_dict()
        del streams, updates
    first = ORDER.ids(0, 0, 24)
    assert sorted(seen[:24]) == sorted(ORDER.locate(first) if kind == "iterable" else first.tolist())
    assert len(seen) == 24 + 2 * 5


@pytest.mark.framework
def test_a_loader_that_accelerate_prepared_is_refused() -> None:
    loading = pytest.importorskip("accelerate.data_loader")
    sampler = ElasticSampler(25, global_batch=6, replicas=2, replica=0, max_microbatch=2)
    loader = DataLoader(range(25), batch_sampler=sampler)  # type: ignore[arg-type]
    prepared = loading.prepare_data_loader(
        loader, num_processes=2, process_index=0, put_on_device=False, even_batches=False
    )
    with pytest.raises(UsageError) as caught:
        next(sampler.updates(prepared))
    assert [problem.code for problem in caught.value.problems] == ["SR-ORDER-LOADER"]

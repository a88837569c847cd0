"""Updates of so many valid tokens: cut along the order whatever the ranks, through real loaders, saved after each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from samerun.catalog import load_catalog
from samerun.core.orders import DistributedSamplerOrder, KeyedOrder
from samerun.core.packing import PackedOrder, check_packing
from samerun.core.progress import Committed, LastBatch, after
from samerun.core.tokens import MeasuredOrder, MeasuredSamples, next_token_update
from samerun.errors import UsageError, VerificationError
from samerun.train.token_sampler import TokenSampler

LAST: list[LastBatch] = ["keep", "drop", "carry"]
LENGTHS = np.random.default_rng(3).integers(0, 12, 41)
SAMPLES = MeasuredSamples(KeyedOrder(41, 7), LENGTHS)
BUDGET, MOST = 50, 14


def cut(order: MeasuredOrder, budget: int, last: LastBatch, num_updates: int) -> list[list[int]]:
    """The dumb oracle: one sample after the other, over epochs; [update] -> ids."""
    found: list[list[int]] = []
    update: list[int] = []
    room = budget
    for epoch in itertools.count():
        for sample in order.ids(epoch, 0, order.num_samples(epoch)):
            tokens = int(order.tokens(np.array([sample]))[0])
            if tokens > room:
                found.append(update)
                update, room = [], budget
            update.append(int(sample))
            room -= tokens
        if update and (last != "carry" or not room):
            found += [update] if last != "drop" or not room else []
            update, room = [], budget
        if len(found) >= num_updates:
            return found[:num_updates]
    raise AssertionError


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.integers(9, 40),
    st.sampled_from(LAST),
    st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_an_update_takes_what_fits(lengths: list[int], budget: int, last: LastBatch, num_updates: int) -> None:
    order = MeasuredSamples(KeyedOrder(len(lengths), 1), lengths)
    if sum(lengths) <= budget and (last == "drop" or not sum(lengths)):
        return  # nothing is ever complete
    at, found = Committed(), []
    for _ in range(num_updates):
        span = next_token_update(order, at, budget, last)
        found.append(span.ids(order).tolist())
        at = after(at, span)
    expected = cut(order, budget, last, num_updates)
    assert found == expected
    assert all(int(order.tokens(np.array(ids)).sum()) <= budget for ids in found)


class Ids(Dataset[int]):
    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> int:
        return index


def as_list(samples: list[int]) -> list[int]:
    return list(samples)


def samplers(order: MeasuredOrder, replicas: int, state: Any, **more: Any) -> list[TokenSampler]:
    given = {"global_tokens": BUDGET, "max_tokens": MOST, **more}
    parts = [TokenSampler(order, replicas=replicas, replica=r, **given) for r in range(replicas)]
    for part in parts:
        if state is not None:
            part.load_state_dict(state)
    return parts


@pytest.mark.parametrize(("workers", "last"), [(0, "keep"), (0, "drop"), (0, "carry"), (2, "keep")])
def test_saved_and_moved_after_every_update(workers: int, last: LastBatch) -> None:
    """4 -> 3 -> 5 -> 2 replicas, one update each, with loaders that have read ahead."""
    num_updates = 6 if workers else 14
    expected = cut(SAMPLES, BUDGET, last, num_updates)
    more: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 3} if workers else {}
    state: Any = None
    tokens = 0
    for wanted, replicas in zip(expected, itertools.cycle([4, 3, 5, 2]), strict=False):
        parts = samplers(SAMPLES, replicas, state, last_batch=last)
        loaders = [
            DataLoader(Ids(), batch_sampler=part, collate_fn=as_list, num_workers=workers, **more) for part in parts
        ]
        updates = [next(part.updates(loader)) for part, loader in zip(parts, loaders, strict=True)]
        dealt = [[m.batch for m in update] for update in updates]
        assert sorted(itertools.chain(*itertools.chain(*dealt))) == sorted(wanted)
        assert {len(passes) for passes in dealt} == {parts[0].passes}
        assert all(LENGTHS[microbatch].sum() <= MOST for passes in dealt for microbatch in passes)
        assert [list(m) for m in dealt[-1]] == [list(ids) for ids in updates[-1].ids]
        assert parts[0].update_tokens == LENGTHS[wanted].sum()
        tokens += int(LENGTHS[wanted].sum())
        for part in parts:
            part.commit()
        state = parts[-1].state_dict()
        assert all(part.state_dict() == state for part in parts)
    assert state["tokens"] == tokens
    assert (state["update"], state["samples"]) == (num_updates, sum(map(len, expected)))


def test_rows_that_were_packed_are_batched_by_their_tokens() -> None:
    order = PackedOrder(DistributedSamplerOrder(41, 2), LENGTHS, 13)
    expected = cut(order, BUDGET, "keep", 9)
    state: Any = None
    for wanted, replicas in zip(expected, itertools.cycle([3, 2, 5]), strict=False):
        parts = samplers(order, replicas, state)
        assert parts[0].global_ids().tolist() == wanted
        assert sorted(itertools.chain(*(part.update_ids().tolist() for part in parts))) == sorted(wanted)
        assert len(parts[0]) == len(list(parts[0]))
        state = parts[0].commit(order.row_tokens(wanted)) and parts[0].state_dict()


def test_filling_budgets_rank_by_rank_is_found_and_cutting_the_order_first_is_not() -> None:
    def by_rank(ids: Sequence[int]) -> Iterable[Sequence[int]]:
        order = MeasuredSamples(DistributedSamplerOrder(len(ids), shuffle=False), LENGTHS[list(ids)])
        return [[ids[place] for place in places] for places in cut(order, MOST, "keep", 5)]

    ids = SAMPLES.ids(0, 0, 41).tolist()
    assert {p.code for p in check_packing(by_rank, ids, [4, 3])} == {"SR-ORDER-PACKING"}
    for replicas in (4, 3):
        assert samplers(SAMPLES, replicas, None)[0].global_ids().tolist() == cut(SAMPLES, BUDGET, "keep", 1)[0]


def cut_all(budget: int) -> None:
    at = Committed()
    while at.epoch == 0:
        at = after(at, next_token_update(SAMPLES, at, budget))


def test_what_is_refused() -> None:
    codes = {"global_tokens": 0, "max_tokens": -1, "replicas": 0, "last_batch": "lose"}
    for name, wrong in codes.items():
        given: dict[str, Any] = {"global_tokens": BUDGET, "max_tokens": MOST, "replicas": 2, "replica": 0, name: wrong}
        with pytest.raises(UsageError, match="SR-ORDER-INVALID"):
            TokenSampler(SAMPLES, **given)
    with pytest.raises(UsageError) as caught:
        samplers(SAMPLES, 2, None, global_tokens=5, max_tokens=10)
    assert [problem.message[:13] for problem in caught.value.problems] == ["global_tokens", "max_tokens ca"]
    with pytest.raises(ValueError, match="more than 5 tokens"):
        cut_all(5)
    with pytest.raises(UsageError, match=r"SR-ORDER-INVALID.*dropped"):
        samplers(SAMPLES, 2, None, global_tokens=10_000, last_batch="drop")
    part = samplers(SAMPLES, 2, None)[0]
    with pytest.raises(UsageError, match="SR-ORDER-TOKENS"):
        part.commit(part.update_tokens - 1)
    assert "SR-ORDER-TOKENS" in load_catalog()
    other = MeasuredSamples(KeyedOrder(41, 7), LENGTHS[::-1])
    with pytest.raises(VerificationError, match="SR-ORDER-MISMATCH"):
        samplers(other, 3, part.state_dict())
    with pytest.raises(UsageError, match="SR-ORDER-EMPTY"):
        next(part.updates(DataLoader(Ids(), batch_sampler=part)))
    for lengths in ([], [-1], [[1]]):
        with pytest.raises(ValueError, match="valid tokens"):
            MeasuredSamples(KeyedOrder(3, 0), lengths)

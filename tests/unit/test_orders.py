"""The frameworks' orders against the ids of their real loaders (tests/golden/order), at changed degrees."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.catalog import load_catalog
from samerun.core.batch import deal
from samerun.core.order import ExplicitOrder, GlobalOrder, SequentialOrder
from samerun.core.orders import (
    AccelerateOrder,
    DistributedSamplerOrder,
    KeyedOrder,
    MegatronCyclicOrder,
    MegatronSequentialOrder,
    RandomSamplerOrder,
    RangeOrder,
    RemainderOrder,
    ShardCursor,
    ShardRange,
    compare_switch,
    order_from_identity,
    order_from_spec,
    order_spec,
    parse_order,
    remaining_ranges,
    stateful_position,
)
from samerun.core.orders.accelerate import check_skip
from samerun.core.orders.megatron import check_cyclic
from samerun.core.orders.shards import check_cursors
from samerun.core.packing import PackedOrder
from samerun.core.progress import Committed, after, next_update, replica_ids
from samerun.core.tokens import MeasuredSamples
from samerun.errors import FormatError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "order"


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name).read_text())


def steps(by_rank: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """[rank][batch] -> the ids of each step, rank by rank; ranks that ran out earlier give nothing."""
    return [list(itertools.chain(*(batch or [] for batch in step))) for step in itertools.zip_longest(*by_rank)]


def flat(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def whole(order: GlobalOrder, epoch: int = 0) -> list[int]:
    return order.ids(epoch, 0, order.num_samples(epoch)).tolist()


def continued(order: GlobalOrder, epoch: int, at: int, degrees: Sequence[int], batch: int) -> list[int]:
    """The rest of an epoch, dealt to another number of replicas in every update, as a set of ids per update."""
    found: list[int] = []
    position = Committed(epoch=epoch, samples_in_epoch=at)
    for replicas in itertools.cycle(degrees):
        span = next_update(order, position, batch)
        if span.spans[-1].epoch != epoch:
            return found
        ids, dealing = span.ids(order), deal(span.num_samples, replicas, 2)
        dealt = [replica_ids(ids, dealing, replica) for replica in range(replicas)]
        assert Counter(flat(map(flat, dealt))) == Counter(ids.tolist())
        found += ids.tolist()
        position = after(position, span)
    raise AssertionError


class TestMegatron:
    @pytest.mark.parametrize("case", golden("megatron.json"), ids=lambda c: f"{c['kind']}-{c['length']}-{c['dp']}")
    def test_every_position_is_what_the_real_sampler_had_consumed(self, case: dict[str, Any]) -> None:
        length, micro, ranks = case["length"], case["micro"], case["dp"]
        order: GlobalOrder
        if case["kind"] == "sequential":
            order = MegatronSequentialOrder(length, micro, ranks, case["drop_last"])
        else:
            order = MegatronCyclicOrder(length, micro, ranks, case["kind"] == "cyclic-sharded")
        step = micro * ranks
        for epoch, by_rank in enumerate(case["ids"]):
            real = flat(steps(by_rank)[: -(-order.num_samples(epoch) // step)])
            assert whole(order, epoch) == real
        for count, by_rank in enumerate(case["after"]):  # Megatron's own resume, at the same degree, after each step
            rest = flat(steps(by_rank)[: -(-(order.num_samples(0) - count * step) // step)])
            assert order.ids(0, count * step, order.num_samples(0)).tolist() == rest
            assert continued(order, 0, count * step, [3, 5, 2], 7) == rest

    def test_what_megatron_does_to_itself_at_another_degree_is_told_with_ids(self) -> None:
        before, after_ = MegatronCyclicOrder(48, 2, 4), MegatronCyclicOrder(48, 2, 3)
        switch = compare_switch(before, after_, 0, 16)
        real = {(case["dp"], case["micro"], case["length"], case["kind"]): case for case in golden("megatron.json")}
        consumed = flat(steps(real[4, 2, 48, "cyclic-sharded"]["ids"][0])[:2])
        assert sorted(consumed) == sorted(before.ids(0, 0, 16).tolist())
        again = set(consumed) & set(after_.ids(0, 16, 48).tolist())
        assert set(switch.replayed) == again
        assert again
        assert len(switch.omitted) == len(again)
        assert compare_switch(before, before, 0, 16).is_exact
        assert compare_switch(MegatronSequentialOrder(48, 2, 4), MegatronSequentialOrder(48, 2, 3), 0, 16).is_exact

    def test_the_remainder_in_the_new_degrees_own_order_is_exact(self) -> None:
        before, new = MegatronCyclicOrder(97, 3, 4), MegatronCyclicOrder(97, 3, 2)
        consumed = before.ids(1, 0, 36)
        rest = RemainderOrder(new, 1, consumed)
        assert set(whole(rest, 1)) == set(whole(new, 1)) - set(consumed.tolist())
        assert [i for i in whole(new, 1) if i not in set(consumed.tolist())] == whole(rest, 1)
        assert whole(rest, 2) == whole(new, 2)
        assert rest.identity() != RemainderOrder(new, 1, consumed[1:]).identity()

    def test_ranks_that_fall_out_of_step_are_found(self) -> None:
        """The real sampler gives some ranks one batch more than others."""
        assert [p.code for p in check_cyclic(MegatronCyclicOrder(7, 1, 4, data_sharding=False))] == ["SR-ORDER-RAGGED"]
        assert not [*check_cyclic(MegatronCyclicOrder(7, 1, 4))]
        for case in golden("megatron.json"):
            if case["kind"] == "cyclic":
                lengths = {len(batches) for batches in case["ids"][0]}
                found = [*check_cyclic(MegatronCyclicOrder(case["length"], case["micro"], case["dp"], False))]
                assert bool(found) == (len(lengths) > 1), case


class TestAccelerate:
    @pytest.mark.parametrize("case", golden("accelerate.json"), ids=lambda c: "-".join(map(str, list(c.values())[:-2])))
    def test_every_way_to_cut(self, case: dict[str, Any]) -> None:
        length, seed = case["length"], case["seed"]
        base = RandomSamplerOrder.reseeded(length, seed) if case.get("shuffle", True) else SequentialOrder(length)
        names = ("split_batches", "dispatch_batches", "even_batches", "drop_last")
        more = {name: case[name] for name in names if name in case}
        order = AccelerateOrder(base, case["batch"], case["processes"], **more)
        for epoch, by_rank in enumerate(case["ids"]):
            assert whole(order, epoch) == flat(steps(by_rank))
        for count, by_rank in enumerate(case["after"]):  # skip_first_batches
            at = order.skipped(0, count)
            stop = order.num_unpadded(0) if order.dispatch_batches else order.num_samples(0)
            rest = order.ids(0, min(at, stop), stop).tolist()  # a dispatcher pads with what it read first
            assert flat(steps(by_rank))[: len(rest)] == rest
            assert order.dispatch_batches or len(flat(steps(by_rank))) == len(rest)
            assert order.num_batches(0, at) == count
            assert continued(order, 0, at, [3, 1, 4], 5) == order.ids(0, at, order.num_samples(0)).tolist()
        assert order.num_batches(0, 1) is None

    def test_a_dispatching_loader_skips_too_little(self) -> None:
        cases = [case for case in golden("accelerate.json") if case.get("dispatch_batches") and case["length"] == 23]
        for case in cases:
            split = case.get("split_batches", False)
            order = AccelerateOrder(RandomSamplerOrder.reseeded(23, 7), case["batch"], case["processes"], split, True)
            found = check_skip(order, 1)
            replayed = flat(steps(case["after"][1]))[0] != flat(steps(case["ids"][0])[1:])[0]
            assert bool(found) == replayed != split
            assert all(problem.code == "SR-ORDER-SKIP" for problem in found)
        assert len(cases) == 6

    @pytest.mark.parametrize("case", golden("trainer.json"), ids=lambda c: str(c["processes"]))
    def test_the_trainer_resumed_after_every_update(self, case: dict[str, Any]) -> None:
        base = RandomSamplerOrder.reseeded(case["length"], case["seed"])
        order = AccelerateOrder(base, case["batch"], case["processes"])
        assert flat(steps(case["ids"])) == whole(order, 0) + whole(order, 1)
        per_update = order.step_samples * case["accumulation"]
        per_epoch = -(-order.num_samples(0) // per_update)
        for update, by_rank in case["after"].items():
            epoch, within = divmod(int(update), per_epoch)
            at = within * per_update
            rest = order.ids(epoch, at, order.num_samples(epoch)).tolist()
            assert (rest + whole(order, 1) if epoch == 0 else rest) == flat(steps(by_rank))
            assert continued(order, epoch, at, [4, 3, 5, 2], 4) == rest


class TestTorchdata:
    @pytest.mark.parametrize("case", golden("torchdata.json"), ids=lambda c: f"{c['processes']}-{c['workers']}")
    def test_states_of_all_ranks_are_one_position(self, case: dict[str, Any]) -> None:
        ranks, batch = case["processes"], case["batch"]
        drops = batch if case["drop_last"] else None
        order = DistributedSamplerOrder(case["length"], case["seed"], num_replicas=ranks, loader_batch=drops)
        real = steps(case["ids"][0])
        for count, states in enumerate(case["states"], start=1):
            at = stateful_position(order, 0, states, batch)
            consumed, rest = flat(real[:count]), flat(steps(case["after"][count - 1]))
            assert Counter(order.ids(0, 0, at).tolist()) == Counter(consumed)
            assert Counter(order.ids(0, at, order.num_samples(0)).tolist()) == Counter(rest)
            assert Counter(continued(order, 0, at, [4, 3, 5, 2], 6)) == Counter(rest)

    def test_states_that_cannot_be(self) -> None:
        case = golden("torchdata.json")[0]
        order = DistributedSamplerOrder(case["length"], case["seed"], num_replicas=2)
        apart = [case["states"][0][0], case["states"][1][1]]
        for states, code in ((apart, "SR-ORDER-RANKS"), ([{"epoch": 3}], "SR-ORDER-STATE")):
            with pytest.raises(FormatError) as caught:
                stateful_position(order, 0, states, 2)
            assert [problem.code for problem in caught.value.problems] == [code]
            assert code in load_catalog()


ORDERS = [
    KeyedOrder(53, 3),
    DistributedSamplerOrder(53, 1, num_replicas=4),
    RandomSamplerOrder.reseeded(53, 9),
    RandomSamplerOrder(53, (5, 1, 7)),
    MegatronCyclicOrder(53, 2, 3),
    MegatronSequentialOrder(53, 2, 3),
    AccelerateOrder(RandomSamplerOrder.reseeded(53, 2), 2, 3),
    RangeOrder({"a": 20, "b": 3, "c": 30}, lanes=2, seed=1),
]


@given(st.sampled_from(ORDERS), st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 20), st.data())
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_degrees_and_saves_is_the_orders_prefix(
    order: GlobalOrder, degrees: list[int], batch: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, order.num_samples(1)))
    assert continued(order, 1, begin, degrees, batch) == whole(order, 1)[begin:]


def test_identities_read_back() -> None:
    for order in ORDERS:
        back = order_from_identity(order.identity())
        if back is not None:
            assert back.identity() == order.identity()
            assert whole(back, 1) == whole(order, 1)
    assert order_from_identity({"kind": "explicit"}) is None
    assert order_from_identity({"kind": "keyed"}) is None


def test_orders_from_text() -> None:
    assert parse_order("keyed:samples=5,seed=1") == KeyedOrder(5, 1)
    assert parse_order("distributed:samples=9, replicas=4, shuffle=no").ids(0, 8, 12).tolist() == [8, 0, 1, 2]
    assert parse_order("accelerate:samples=9,batch=2,processes=2").num_samples(0) == 12
    for text, count in (
        ("cards:samples=1", 1),
        ("keyed", 1),
        ("keyed:samples=x,seed=1,seed=2,y=1", 3),
        ("random:samples=0", 1),
    ):
        with pytest.raises(UsageError) as caught:
            parse_order(text)
        assert [p.code for p in caught.value.problems] == ["SR-ORDER-TEXT"] * count, text


DOCUMENTS = [
    *(order for order in ORDERS if getattr(order, "seeds", ()) == ()),
    SequentialOrder(7),
    AccelerateOrder(SequentialOrder(9), 3, 3, split_batches=True, even_batches=False),
    DistributedSamplerOrder(9, 2, False, True, 4, 2),
    MegatronCyclicOrder(53, 2, 3, False),
    ExplicitOrder([3, 1, 2], [1, 2, 3]),
    RangeOrder({"a": 20, "b": 3}, [ShardRange("a", 4, 20)], epoch=1),
    PackedOrder(KeyedOrder(9, 1), [3, 1, 2, 5, 5, 1, 1, 4, 2], 6),
    MeasuredSamples(RandomSamplerOrder.reseeded(4, 1), [3, 1, 2, 5]),
    RemainderOrder(MegatronCyclicOrder(53, 2, 3), 1, MegatronCyclicOrder(53, 2, 2).ids(1, 0, 8)),
]


@pytest.mark.parametrize("order", DOCUMENTS, ids=lambda order: type(order).__name__)
def test_orders_as_documents(order: GlobalOrder) -> None:
    back = order_from_spec(json.loads(json.dumps(order_spec(order))))
    assert back.identity() == order.identity()
    for epoch in (0, 1, 2):
        assert whole(back, epoch) == whole(order, epoch)


@pytest.mark.parametrize(
    "spec",
    [
        None,
        [],
        {"kind": "cards"},
        {"kind": "explicit"},
        {"kind": "explicit", "epochs": []},
        {"kind": "explicit", "epochs": [["a"]]},
        {"kind": "packed", "base": "keyed", "lengths": [1], "capacity": 2},
        {"kind": "packed", "base": "keyed:samples=1", "lengths": [3], "capacity": 2},
        {"kind": "measured", "base": "keyed:samples=1", "lengths": [3], "capacity": 2},
        {"kind": "shards", "lengths": {"a": 3}, "ranges": [["a", 1, 4]], "epoch": 0, "lanes": 1, "seed": None},
        {"kind": "shards", "lengths": {"a": 3}, "ranges": [["b", 1, 2]], "epoch": 0, "lanes": 1, "seed": None},
        {"kind": "shards", "lengths": [3], "ranges": None, "epoch": 0, "lanes": 1, "seed": None},
    ],
)
def test_documents_of_no_order(spec: object) -> None:
    with pytest.raises(UsageError) as caught:
        order_from_spec(spec)
    assert {problem.code for problem in caught.value.problems} == {"SR-ORDER-TEXT"}


def test_orders_without_a_document() -> None:
    for order in (RandomSamplerOrder(5, (1, 2)), DistributedSamplerOrder(5, frozen_epoch=True)):
        with pytest.raises(UsageError, match="SR-ORDER-TEXT"):
            order_spec(order)


class TestShards:
    LENGTHS: ClassVar = {"a": 7, "b": 3, "c": 0, "d": 10}

    @given(st.data(), st.integers(1, 4), st.sampled_from([None, 5]))
    @settings(max_examples=60, deadline=None)
    def test_what_the_cursors_left_is_dealt_again_exactly_once(
        self, data: st.DataObject, lanes: int, seed: int | None
    ) -> None:
        cursors, consumed, base = [], set[int](), 0
        for shard, length in self.LENGTHS.items():
            cut = data.draw(st.integers(0, length))
            for reader, (start, stop) in enumerate(((0, cut), (cut, length))):
                position = data.draw(st.integers(start, stop))
                cursors.append(ShardCursor(f"rank {reader}", ShardRange(shard, start, stop), position))
                consumed |= set(range(base + start, base + position))
            base += length
        rest = remaining_ranges(self.LENGTHS, cursors)
        left = set(range(base)) - consumed
        assert sum(map(len, rest)) == len(left)
        if not left:
            return
        order = RangeOrder(self.LENGTHS, rest, epoch=2, lanes=lanes, seed=seed)
        assert sorted(whole(order, 2)) == sorted(left)
        assert sorted(whole(order, 3)) == list(range(base))
        assert continued(order, 2, 0, [3, 2, 5], 4) == whole(order, 2)
        start = data.draw(st.integers(0, len(left)))
        assert order.ids(2, start, len(left)).tolist() == whole(order, 2)[start:]

    def test_lanes_take_turns(self) -> None:
        order = RangeOrder({"a": 4, "b": 2, "c": 3}, lanes=2)
        assert whole(order) == [0, 4, 1, 5, 2, 3, 6, 7, 8]
        assert order.locate(order.ids(0, 0, 3)) == [("a", 0), ("b", 0), ("a", 1)]

    def test_cursors_that_cannot_be(self) -> None:
        part, other = ShardRange("a", 0, 5), ShardRange("a", 4, 7)
        for cursors, code in (
            ([ShardCursor("rank 0", part, 6)], "SR-ORDER-CURSOR"),
            ([ShardCursor("rank 0", ShardRange("z", 0, 5), 2)], "SR-ORDER-CURSOR"),
            ([ShardCursor("rank 0", part, 2), ShardCursor("rank 1", other, 4)], "SR-ORDER-OVERLAP"),
        ):
            with pytest.raises(FormatError) as caught:
                remaining_ranges(self.LENGTHS, cursors)
            assert [problem.code for problem in caught.value.problems] == [code]
            assert code in load_catalog()
        assert [p.code for p in check_cursors(self.LENGTHS, [ShardCursor("rank 0", part, 2)])] == ["SR-ORDER-UNREAD"]
        full = [ShardCursor("r", ShardRange(shard, 0, n), n) for shard, n in self.LENGTHS.items()]
        assert check_cursors(self.LENGTHS, full) == []
        assert remaining_ranges(self.LENGTHS, full) == ()

"""The committed coordinate against plain lists: any order, any batch, any end of an epoch."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.catalog import load_catalog
from samerun.core.batch import Dealing, deal
from samerun.core.order import ExplicitOrder, SequentialOrder, check_order
from samerun.core.progress import Committed, LastBatch, after, next_update, replica_ids, seek
from samerun.errors import FormatError

LAST: list[LastBatch] = ["keep", "drop", "carry"]


def batches_of_lists(epochs: list[list[int]], batch: int, last: LastBatch) -> list[list[int]]:
    """The dumb oracle: cut lists into global batches; what an unfinished last epoch leaves over is left out."""
    if last == "carry":
        flat = [sample for epoch in epochs for sample in epoch]
        return [flat[i : i + batch] for i in range(0, len(flat) - batch + 1, batch)]
    cut = [epoch[i : i + batch] for epoch in epochs for i in range(0, len(epoch), batch)]
    return [part for part in cut if last == "keep" or len(part) == batch]


epoch_lists = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=5)


class TestNextUpdate:
    @given(epoch_lists, st.integers(1, 15), st.sampled_from(LAST))
    def test_updates_are_those_of_plain_lists(self, epochs: list[list[int]], batch: int, last: LastBatch) -> None:
        if last == "drop":
            epochs = [[*epoch, *range(batch)] for epoch in epochs]  # an epoch that is all dropped is refused, see below
        order = ExplicitOrder(*epochs)
        at = Committed()
        for number, expected in enumerate(batches_of_lists(epochs, batch, last), start=1):
            update = next_update(order, at, batch, last)
            assert update.ids(order).tolist() == expected
            at = after(at, update, tokens=3)
            assert at.update == number
            assert at.tokens == 3 * number
            assert at == replace(seek(order, number, batch, last), tokens=at.tokens)
        assert at.samples == sum(map(len, batches_of_lists(epochs, batch, last)))

    def test_dropping_everything_is_refused(self) -> None:
        with pytest.raises(ValueError, match="drops everything"):
            next_update(SequentialOrder(5), Committed(), 6, "drop")
        assert next_update(SequentialOrder(6), Committed(), 6, "drop").num_samples == 6

    def test_a_skipped_step_consumes_its_samples(self) -> None:
        at = after(Committed(), next_update(SequentialOrder(9), Committed(), 4), tokens=7, skipped=True)
        assert at == Committed(update=0, epoch=0, samples_in_epoch=4, samples=4, tokens=7)

    def test_tokens_once_untold_stay_unknown(self) -> None:
        at = after(Committed(), next_update(SequentialOrder(9), Committed(), 4))
        assert at.tokens is None
        assert after(at, next_update(SequentialOrder(9), at, 4), tokens=5).tokens is None

    def test_seek_is_cheap_over_many_updates(self) -> None:
        at = seek(SequentialOrder(10**9), 10**7, 256, "keep")
        per_epoch = -(-(10**9) // 256)
        epochs, rest = divmod(10**7, per_epoch)
        assert at == Committed(
            update=10**7,
            epoch=epochs,
            samples_in_epoch=rest * 256,
            samples=epochs * 10**9 + rest * 256,
            tokens=None,
        )


class TestReplicas:
    @given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
    def test_replicas_partition_the_batch(self, batch: int, replicas: int, micro: int) -> None:
        ids = np.arange(100, 100 + batch)
        dealing = deal(batch, replicas, micro)
        parts = [replica_ids(ids, dealing, replica) for replica in range(replicas)]
        dealt = [part.tolist() for replica in parts for part in replica]
        assert sorted(itertools.chain(*dealt)) == ids.tolist()
        assert [tuple(len(parts[r][p]) for r in range(replicas)) for p in range(dealing.passes)] == list(
            dealing.microbatches
        )

    def test_uneven_dealings_of_ones_own(self) -> None:
        parts = [replica_ids(np.arange(7), Dealing(((1, 3), (2, 1))), replica) for replica in range(2)]
        assert [[part.tolist() for part in replica] for replica in parts] == [[[0], [4, 6]], [[1, 2, 3], [5]]]

    def test_another_number_of_samples_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cannot deal"):
            replica_ids(np.arange(7), deal(8, 2, 2), 0)


class TestOrders:
    @given(epoch_lists, st.data())
    def test_explicit_orders_have_random_access(self, epochs: list[list[int]], data: st.DataObject) -> None:
        order = ExplicitOrder(*epochs)
        epoch = data.draw(st.integers(0, len(epochs) + 1))
        expected = epochs[min(epoch, len(epochs) - 1)]
        start = data.draw(st.integers(0, len(expected)))
        stop = data.draw(st.integers(start, len(expected)))
        assert order.num_samples(epoch) == len(expected)
        assert order.ids(epoch, start, stop).tolist() == expected[start:stop]

    def test_identity_tells_orders_apart(self) -> None:
        one, same, other = ExplicitOrder([1, 2, 3]), ExplicitOrder(np.array([1, 2, 3])), ExplicitOrder([1, 3, 2])
        assert check_order(one.identity(), same.identity()) == []
        (problem,) = check_order(one.identity(), other.identity())
        assert (problem.code, problem.where["key"]) == ("SR-ORDER-MISMATCH", "sha256")
        assert ExplicitOrder([1, 2], [3]).identity() != ExplicitOrder([1], [2, 3]).identity()
        assert len(check_order(one.identity(), SequentialOrder(3).identity())) == 3
        assert json.loads(json.dumps(one.identity())) == one.identity()

    def test_what_is_no_order_is_refused(self) -> None:
        for wrong in ((), ([],), ([[1]],)):
            with pytest.raises(ValueError):
                ExplicitOrder(*wrong)
        with pytest.raises(ValueError):
            SequentialOrder(0)
        for start, stop in ((-1, 2), (2, 1), (0, 6)):
            with pytest.raises(ValueError, match="outside an epoch"):
                SequentialOrder(5).ids(0, start, stop)


class TestCommitted:
    def test_json_round_trip_and_numpy_scalars(self) -> None:
        at = Committed(update=3, epoch=1, samples_in_epoch=4, samples=20, tokens=None)
        assert Committed.from_json({**at.to_json(), "more": 1}) == at
        assert Committed.from_json({name: value and np.int64(value) for name, value in at.to_json().items()}) == at

    def test_every_unusable_field_is_named(self) -> None:
        with pytest.raises(FormatError) as caught:
            Committed.from_json({"update": -1, "epoch": "0", "samples": True, "tokens": 1.5})
        found = [(problem.code, problem.where["key"]) for problem in caught.value.problems]
        assert found == [
            ("SR-ORDER-STATE", name) for name in ("update", "epoch", "samples_in_epoch", "samples", "tokens")
        ]
        assert "SR-ORDER-STATE" in load_catalog()

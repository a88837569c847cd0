"""The elastic sampler against plain lists and against torch's own sampler and loader, moved between rank counts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from samerun.catalog import load_catalog
from samerun.core.batch import Dealing, RampUp, deal
from samerun.core.mesh import Layout
from samerun.core.order import ExplicitOrder, GlobalOrder
from samerun.core.progress import LastBatch, check_phase
from samerun.errors import FormatError, UsageError, VerificationError
from samerun.train.sampler import ElasticSampler, TorchDistributedOrder

LAST: list[LastBatch] = ["keep", "drop", "carry"]


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain(*parts))


def samplers(order: int | GlobalOrder, replicas: int, batch: int, micro: int, **more: Any) -> list[ElasticSampler]:
    return [
        ElasticSampler(order, global_batch=batch, replicas=replicas, replica=r, max_microbatch=micro, **more)
        for r in range(replicas)
    ]


def order_prefix(order: GlobalOrder, batch: int, last: LastBatch, num_updates: int) -> list[list[int]]:
    """The dumb oracle: the global batches of the first updates, cut from plain lists."""
    found: list[list[int]] = []
    carried: list[int] = []
    for epoch in itertools.count():
        samples = carried + order.ids(epoch, 0, order.num_samples(epoch)).tolist()
        parts = [samples[i : i + batch] for i in range(0, len(samples), batch)]
        carried = parts.pop() if last == "carry" and len(parts[-1]) < batch else []
        found += [part for part in parts if last != "drop" or len(part) == batch]
        if len(found) >= num_updates:
            return found[:num_updates]
    raise AssertionError


def check_update(parts: list[ElasticSampler], dealt: list[list[list[int]]], expected: list[int]) -> None:
    """One update: every sample of the global batch once, equal passes, in the dealing's sizes."""
    assert parts[0].global_ids().tolist() == expected
    assert sorted(itertools.chain(*itertools.chain(*dealt))) == sorted(expected)
    assert {len(passes) for passes in dealt} == {parts[0].passes}
    sizes = [tuple(len(dealt[r][p]) for r in range(len(parts))) for p in range(parts[0].passes)]
    assert tuple(sizes) == parts[0].update_dealing.microbatches
    for r, part in enumerate(parts):
        assert part.update_ids().tolist() == list(itertools.chain(*dealt[r]))
        assert parts[0].update_ids(r).tolist() == part.update_ids().tolist()


class TestTorchOrder:
    @given(
        st.integers(1, 40),
        st.integers(1, 9),
        st.integers(0, 5),
        st.integers(0, 3),
        st.booleans(),
        st.booleans(),
    )
    @settings(max_examples=200, deadline=None)
    def test_it_is_distributed_samplers_own(
        self, length: int, replicas: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
    ) -> None:
        real: list[list[int]] = []
        for rank in range(replicas):
            sampler = DistributedSampler(range(length), replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            real.append(list(sampler))
        expected = [sample for turn in zip(*real, strict=True) for sample in turn]
        if not expected:
            with pytest.raises(ValueError, match="leaves no sample"):
                TorchDistributedOrder(length, seed, shuffle, drop_last, replicas)
            return
        order = TorchDistributedOrder(length, seed, shuffle, drop_last, replicas)
        assert order.num_samples(epoch) == len(expected)
        assert order.ids(epoch, 0, len(expected)).tolist() == expected
        assert [list(expected[rank::replicas]) for rank in range(replicas)] == real
        middle = len(expected) // 3
        assert order.ids(epoch, middle, len(expected)).tolist() == expected[middle:]

    @pytest.mark.parametrize("loader_drops", [False, True])
    @pytest.mark.parametrize(
        ("length", "replicas", "per_pass", "accumulation"), [(97, 4, 2, 3), (64, 2, 4, 2), (50, 3, 5, 1)]
    )
    def test_in_place_of_distributed_sampler_every_rank_sees_what_it_saw(
        self, length: int, replicas: int, per_pass: int, accumulation: int, loader_drops: bool
    ) -> None:
        data = list(range(length))
        order = TorchDistributedOrder(length, 5, num_replicas=replicas, loader_batch=per_pass if loader_drops else None)
        ours = samplers(order, replicas, replicas * per_pass * accumulation, per_pass)
        for rank, sampler in enumerate(ours):
            theirs = DistributedSampler(data, replicas, rank, seed=5)  # type: ignore[arg-type]
            loader = DataLoader(data, per_pass, sampler=theirs, drop_last=loader_drops)  # type: ignore[arg-type]
            for epoch in range(3):
                theirs.set_epoch(epoch)
                real = [batch.tolist() for batch in loader]
                whole = len(real) // accumulation * accumulation
                assert len(sampler) >= whole
                mine = list(sampler)
                assert mine[:whole] == real[:whole]  # pass by pass, in the same order
                assert flat(mine) == flat(real)
                while (sampler.committed.epoch, sampler.committed.samples_in_epoch) < (epoch, order.num_samples(epoch)):
                    sampler.commit()

    def test_identity_tells_what_matters(self) -> None:
        base = TorchDistributedOrder(10, 3).identity()
        assert base == TorchDistributedOrder(10, 3).identity()
        others = [
            TorchDistributedOrder(11, 3),
            TorchDistributedOrder(10, 4),
            TorchDistributedOrder(10, 3, shuffle=False),
            TorchDistributedOrder(10, 3, drop_last=True),
            TorchDistributedOrder(10, 3, num_replicas=4),
            TorchDistributedOrder(10, 3, loader_batch=2),
        ]
        assert all(other.identity() != base for other in others)
        assert TorchDistributedOrder(9, 1, False).identity() == TorchDistributedOrder(9, 2, False).identity()

    def test_nonsense_is_refused(self) -> None:
        for wrong in ({"length": 0}, {"length": 3, "num_replicas": 0}, {"length": 3, "loader_batch": 4}):
            with pytest.raises(ValueError):
                TorchDistributedOrder(**wrong)


stops = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5
)  # (replicas, max_microbatch, updates committed there)


class TestMoves:
    @given(st.integers(1, 30), st.integers(1, 12), st.sampled_from(LAST), stops, st.booleans())
    @settings(max_examples=300, deadline=None)
    def test_committed_ids_are_the_orders_prefix_once_each(
        self, length: int, batch: int, last: LastBatch, route: list[tuple[int, int, int]], explicit: bool
    ) -> None:
        length = max(length, batch) if last == "drop" else length
        order = ExplicitOrder(range(50, 50 + length)) if explicit else TorchDistributedOrder(length, 1)
        expected = order_prefix(order, batch, last, sum(updates for _, _, updates in route))
        state: dict[str, Any] | None = None
        for replicas, micro, updates in route:
            parts = samplers(order, replicas, batch, micro, last_batch=last)
            for part in parts:
                if state is not None:
                    part.load_state_dict(state)
            taken = 0
            while taken < updates:
                ahead = [list(part) for part in parts]  # all of the epoch is read, and not all of it committed
                assert [len(part) for part in parts] == [len(microbatches) for microbatches in ahead]
                assert len({len(microbatches) for microbatches in ahead}) == 1
                while taken < updates and ahead[0]:
                    passes = parts[0].passes
                    check_update(parts, [microbatches[:passes] for microbatches in ahead], expected.pop(0))
                    ahead = [microbatches[passes:] for microbatches in ahead]
                    for part in parts:
                        part.commit()
                    taken += 1
            states = [part.state_dict() for part in parts]
            assert all(other == states[0] for other in states)
            state = states[0]
        assert expected == []

    @given(st.integers(1, 5), st.integers(1, 30))
    @settings(deadline=None)
    def test_a_distributed_sampler_run_is_continued_at_another_degree(self, replicas: int, done: int) -> None:
        """A run with the real sampler stops after `done` updates; every later update holds what it would have held."""
        length, per_pass, accumulation, source = 41, 2, 2, 4
        data = list(range(length))
        updates: list[list[int]] = []
        for epoch in range(8):
            ranks: list[list[list[int]]] = []
            for rank in range(source):
                sampler = DistributedSampler(data, source, rank, seed=9)  # type: ignore[arg-type]
                sampler.set_epoch(epoch)
                batches = [batch.tolist() for batch in DataLoader(data, per_pass, sampler=sampler)]  # type: ignore[arg-type]
                ranks.append([flat(batches[i : i + accumulation]) for i in range(0, len(batches), accumulation)])
            updates += [flat(parts) for parts in zip(*ranks, strict=True)]
        order = TorchDistributedOrder(length, 9, num_replicas=source)
        parts = samplers(order, replicas, source * per_pass * accumulation, per_pass)
        for part in parts:
            part.seek(done)
        for expected in updates[done : done + 9]:
            assert sorted(itertools.chain(*(part.update_ids().tolist() for part in parts))) == sorted(expected)
            for part in parts:
                part.commit()


class TestRamp:
    RAMP = RampUp(start=4, increment=3, over_samples=60, final=13)

    @pytest.mark.parametrize("last", LAST)
    def test_a_growing_batch_is_the_same_run_on_any_ranks(self, last: LastBatch) -> None:
        """4 -> 3 -> 5 -> 2 after every update: the ramp follows committed samples, as Megatron's does."""
        state: dict[str, Any] | None = None
        sizes: list[int] = []
        seen: list[int] = []
        for replicas in itertools.islice(itertools.cycle([4, 3, 5, 2]), 14):
            parts = samplers(200, replicas, 13, 2, last_batch=last, ramp=self.RAMP)
            for part in parts:
                if state is not None:
                    part.load_state_dict(state)
            loaders = [DataLoader(Squares(200), batch_sampler=part, collate_fn=collate) for part in parts]
            dealt = [[m.batch for m in next(part.updates(loader))] for part, loader in zip(parts, loaders, strict=True)]
            ids = [sample for passes in dealt for batch in passes for sample, _ in batch]
            assert sorted(ids) == sorted(parts[0].global_ids().tolist())
            assert [len(part) for part in parts] == [len(list(part)) for part in parts]
            sizes.append(len(ids))
            seen += ids
            for part in parts:
                part.commit()
            state = parts[0].state_dict()
            here = samplers(200, 1, 13, 2, last_batch=last, ramp=self.RAMP)[0]
            assert replace(here.seek(len(sizes)), tokens=None) == replace(parts[0].committed, tokens=None)
        assert (sum(sizes), set(sizes)) == (self.RAMP.samples_after(14), {4, 7, 10, 13})
        assert sorted(seen) == sorted(samplers(200, 1, 13, 2)[0].order.ids(0, 0, len(seen)).tolist())

    def test_what_does_not_fit_a_ramp(self) -> None:
        with pytest.raises(UsageError, match=r"SR-ORDER-INVALID.*ramp"):
            samplers(200, 2, 12, 2, ramp=self.RAMP)
        part = samplers(200, 2, 13, 2, ramp=self.RAMP, last_batch="carry")[0]
        with pytest.raises(UsageError, match=r"SR-ORDER-INVALID.*growing"):
            part.endless()
        part.seek(12)
        assert part.endless() is not None


class Squares(torch.utils.data.Dataset[tuple[int, int]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def collate(samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return list(samples)


def open_loader(sampler: ElasticSampler, workers: int) -> DataLoader[Any]:
    more: dict[str, Any] = {"prefetch_factor": 3, "persistent_workers": True} if workers else {}
    return DataLoader(
        Squares(37),
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        multiprocessing_context=None,
        **more,
    )


class TestRealLoaders:
    @pytest.mark.parametrize("last", LAST)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_saved_and_moved_after_every_update(self, workers: int, last: LastBatch) -> None:
        """4 -> 3 -> 5 -> 2 -> 4 ... replicas, one update each; at every stop the loaders have read ahead."""
        order = TorchDistributedOrder(37, 2, num_replicas=4)  # padded to 40
        num_updates = 8 if workers else 14
        expected = order_prefix(order, 9, last, num_updates)
        state: dict[str, Any] | None = None
        for number, replicas in zip(range(1, num_updates + 1), itertools.cycle([4, 3, 5, 2]), strict=False):
            parts = samplers(order, replicas, 9, 1 if number % 2 else 2, last_batch=last)
            for part in parts:
                if state is not None:
                    part.load_state_dict(state)
            streams = [part.updates(open_loader(part, workers)) for part in parts]
            updates = [next(stream) for stream in streams]
            assert {update.number for update in updates} == {number}
            dealt: list[list[list[int]]] = []
            for update in updates:
                taken = list(update)
                assert all(m.batch == [(sample, sample * sample) for sample in m.ids] for m in taken)
                assert [m.is_empty for m in taken] == [not m.ids for m in taken]
                dealt.append([list(m.ids) for m in taken])
                assert update.sample_ids == list(itertools.chain(*dealt[-1]))
            check_update(parts, dealt, expected[number - 1])
            state = parts[-1].commit(tokens=7) and parts[-1].state_dict()
            del streams
        assert state is not None
        assert (state["update"], state["samples"]) == (num_updates, sum(map(len, expected)))
        assert state["tokens"] == 7 * num_updates

    @pytest.mark.parametrize("workers", [0, 2])
    def test_one_loader_over_epochs_and_a_rollback_within_the_loop(self, workers: int) -> None:
        sampler = ElasticSampler(37, global_batch=8, replicas=3, replica=1, max_microbatch=2, seed=4)
        loader = open_loader(sampler, workers)
        seen: list[tuple[int, list[int]]] = []
        saved: dict[str, Any] = {}
        for update in sampler.updates(loader, until=13):
            assert update.sample_ids == sampler.update_ids().tolist()
            assert [sample for m in update for sample, _ in m.batch] == update.sample_ids
            seen.append((update.number, update.sample_ids))
            sampler.commit()
            if update.number == 4 and not saved:
                saved = sampler.state_dict()
            if len(seen) == 8:
                sampler.load_state_dict(saved)  # four updates are thrown away, in the next epoch
        assert [number for number, _ in seen] == [*range(1, 9), *range(5, 14)]
        assert seen[4:8] == seen[8:12]
        expected = order_prefix(sampler.order, 8, "keep", 13)
        assert all(set(ids) <= set(expected[number - 1]) for number, ids in seen)
        assert sampler.committed.epoch == 2

    def test_default_collate_and_placeholders(self) -> None:
        parts = samplers(10, 4, 6, 1, empty="placeholder")
        for streams in itertools.islice(
            zip(*(p.updates(DataLoader(Squares(10), batch_sampler=p)) for p in parts), strict=True), 2
        ):
            for update in streams:
                for m in update:
                    ids = m.batch[0].tolist()
                    assert ids == list(m.ids) if m.ids else (m.is_empty and ids[0] in parts[0].global_ids())
            for part in parts:
                part.commit()

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_the_state_travels_through_dcp_to_another_degree(self, tmp_path: Path) -> None:
        saved = ElasticSampler(37, global_batch=8, replicas=4, replica=0, max_microbatch=2, seed=4)
        for tokens in (5, 6, None):
            saved.commit(tokens)
        dcp.save({"sampler": saved}, checkpoint_id=tmp_path, no_dist=True)
        found = ElasticSampler(37, global_batch=8, replicas=3, replica=2, max_microbatch=4, seed=4)
        dcp.load({"sampler": found}, checkpoint_id=tmp_path, no_dist=True)
        assert found.committed == saved.committed
        other = ElasticSampler(37, global_batch=8, replicas=3, replica=2, max_microbatch=4, seed=5)
        with pytest.raises(VerificationError, match="seed"):
            dcp.load({"sampler": other}, checkpoint_id=tmp_path, no_dist=True)


class TestLayouts:
    def test_ranks_of_one_replica_share_its_samples(self) -> None:
        layout = Layout(tp=2, dp_shard=2, dp_replicate=2)
        parts = [ElasticSampler.from_layout(layout, rank, 64, global_batch=8, max_microbatch=2) for rank in range(8)]
        ids = [part.update_ids().tolist() for part in parts]
        assert ids[0::2] == ids[1::2]
        assert sorted(flat(ids[0::2])) == sorted(parts[0].global_ids().tolist())

    def test_a_smaller_last_update_has_a_dealing_of_its_own(self) -> None:
        sampler = ElasticSampler(14, global_batch=6, replicas=2, replica=0, max_microbatch=2)
        sampler.seek(2)
        assert (sampler.passes, sampler.update_dealing) == (1, deal(2, 2, 2))
        assert sampler.dealing == deal(6, 2, 2)  # what a plan or a trace means by the run's dealing

    def test_a_dealing_of_ones_own(self) -> None:
        dealing = Dealing(((3, 1), (1, 1)))
        parts = [ElasticSampler(14, global_batch=6, replicas=2, replica=r, dealing=dealing) for r in range(2)]
        assert [[len(m) for m in part] for part in parts] == [[3, 1, 3, 1, 1], [1, 1, 1, 1, 1]]
        assert parts[0].max_microbatch == 3


class TestFindings:
    def sampler(self, **more: Any) -> ElasticSampler:
        arguments: dict[str, Any] = {"global_batch": 4, "replicas": 2, "replica": 0, "max_microbatch": 1}
        return ElasticSampler(**{"order": 10, **arguments, **more})

    def loop(self, sampler: ElasticSampler, **more: Any) -> Any:
        return sampler.updates(DataLoader(Squares(10), batch_sampler=sampler, collate_fn=collate, **more))

    @pytest.mark.parametrize(
        ("arguments", "codes"),
        [
            ({"replica": 2}, ["SR-ORDER-INVALID"]),
            ({"replicas": 0, "global_batch": 0}, ["SR-BATCH-INVALID", "SR-BATCH-INVALID"]),
            ({"last_batch": "maybe", "empty": "full", "order": 0}, ["SR-ORDER-INVALID"] * 3),
            ({"order": ExplicitOrder([1, 2]), "seed": 1}, ["SR-ORDER-INVALID"]),
            ({"max_microbatch": None}, ["SR-ORDER-INVALID"]),
            ({"dealing": deal(6, 3, 2)}, ["SR-ORDER-INVALID"] * 3),
            ({"global_batch": 11, "last_batch": "drop"}, ["SR-ORDER-INVALID"]),
        ],
    )
    def test_arguments_that_make_no_sense(self, arguments: dict[str, Any], codes: list[str]) -> None:
        with pytest.raises(UsageError) as caught:
            self.sampler(**arguments)
        assert [problem.code for problem in caught.value.problems] == codes

    def test_another_order_is_refused_part_by_part(self) -> None:
        state = self.sampler(seed=3).state_dict()
        self.sampler(seed=3, replicas=1, max_microbatch=4).load_state_dict(state)
        with pytest.raises(VerificationError) as caught:
            self.sampler(order=11).load_state_dict(state)
        assert [(p.code, p.where["key"]) for p in caught.value.problems] == [
            ("SR-ORDER-MISMATCH", "num_samples"),
            ("SR-ORDER-MISMATCH", "seed"),
        ]

    def test_a_state_that_is_none(self) -> None:
        state = self.sampler().state_dict()
        for damage in ({"order": None}, {"samples_in_epoch": 11}, {"epoch": "1"}):
            with pytest.raises(FormatError) as caught:
                self.sampler().load_state_dict({**state, **damage})
            assert [problem.code for problem in caught.value.problems] == ["SR-ORDER-STATE"]

    def test_forgetting_to_commit(self) -> None:
        loop = self.loop(self.sampler())
        list(next(loop))
        with pytest.raises(UsageError, match="SR-ORDER-UNCOMMITTED"):
            next(loop)

    def test_committing_a_skipped_step_is_enough(self) -> None:
        sampler = self.sampler()
        loop = self.loop(sampler)
        list(next(loop))
        sampler.commit(skipped=True)
        update = next(loop)
        assert update.number == 1
        assert update.sample_ids == sampler.update_ids().tolist()

    def test_committing_too_early(self) -> None:
        sampler = self.sampler()
        loop = self.loop(sampler)
        next(next(loop))
        sampler.commit()
        with pytest.raises(UsageError, match="SR-ORDER-PASSES"):
            next(loop)

    def test_a_loader_that_is_not_the_samplers(self) -> None:
        with pytest.raises(UsageError, match="SR-ORDER-LOADER"):
            next(self.sampler().updates(DataLoader(Squares(10), batch_size=2)))
        with pytest.raises(UsageError, match="SR-ORDER-LOADER"):
            list(next(self.sampler().updates([[1]])))

    def test_an_empty_microbatch_that_cannot_be_collated(self) -> None:
        sampler = self.sampler(global_batch=3)  # shares of 2 and 1, two passes
        with pytest.raises(UsageError, match="SR-ORDER-EMPTY"):
            next(sampler.updates(DataLoader(Squares(10), batch_sampler=sampler)))
        for silent in ({"global_batch": 3, "empty": "placeholder"}, {"global_batch": 2, "last_batch": "drop"}):
            sampler = self.sampler(**silent)
            list(next(sampler.updates(DataLoader(Squares(10), batch_sampler=sampler))))

    def test_reading_a_whole_epoch_again_warns(self) -> None:
        sampler = self.sampler()
        first = list(sampler)
        with pytest.warns(UserWarning, match="call commit"):
            assert list(sampler) == first
        sampler.commit()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list(sampler) == first[2:]

    def test_a_save_within_an_update_is_told(self) -> None:
        def build() -> ElasticSampler:
            return ElasticSampler(12, global_batch=4, replicas=1, replica=0, max_microbatch=2)

        sampler = build()
        for update in sampler.updates(DataLoader(range(12), batch_sampler=sampler), until=2):  # type: ignore[arg-type]
            assert "passes_taken" not in sampler.state_dict()
            next(update)
            within = sampler.state_dict()
            list(update)
            sampler.commit()
            assert "passes_taken" not in sampler.state_dict()
        assert within["passes_taken"] == 1
        assert [problem.code for problem in check_phase(within)] == ["SR-ORDER-PHASE"]
        again = build()
        with pytest.warns(UserWarning, match="SR-ORDER-PHASE"):
            again.load_state_dict(within)
        assert again.committed.samples == 4
        assert "SR-ORDER-PHASE" in load_catalog()

    def test_every_code_is_catalogued(self) -> None:
        catalog = load_catalog()
        for name in ("INVALID", "MISMATCH", "STATE", "UNCOMMITTED", "PASSES", "LOADER", "EMPTY"):
            assert f"SR-ORDER-{name}" in catalog

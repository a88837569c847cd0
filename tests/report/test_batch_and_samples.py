"""Slots and strips: pictures of dealings, checked against the dealings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samerun.core.batch import Dealing, deal
from samerun.report.batch import draw_grid
from samerun.report.samples import Placed, in_global_order, view_samples
from samerun.trace import Header
from samerun.verify.evidence.observed import Observed, ObservedUpdate


def test_a_small_dealing_is_drawn_cell_by_cell() -> None:
    grid = draw_grid(deal(32, 3, 2), 2, idle=1)
    assert grid.columns == ("0", "1", "2")
    assert [[cell.samples for cell in row] for row in grid.cells] == deal(32, 3, 2).to_json()
    assert grid.cells[4][2].percent == 50.0
    assert grid.summary == "32 samples dealt to 3 replicas in 6 passes, 11/10 to each; 1 idle"


def test_a_large_dealing_is_drawn_in_runs() -> None:
    grid = draw_grid(deal(10_003, 1000, 1), 1)
    assert grid.columns == ("0–2", "3–999")
    assert grid.rows == ("0–9", "10")
    assert [[cell.samples for cell in row] for row in grid.cells] == [[1, 1], [1, 0]]
    assert grid.whole


def test_an_irregular_dealing_is_cut_off_and_says_so() -> None:
    grid = draw_grid(Dealing((tuple(i % 3 for i in range(100)),)), 2)
    assert len(grid.columns) == 16
    assert not grid.whole


def update(index: int, ids: dict[int, tuple[int, ...]]) -> ObservedUpdate:
    samples = sum(map(len, ids.values()))
    return ObservedUpdate(
        update=index, loss=1.0, grad_norm=1.0, update_norm=1.0, lr=(0.1,), loss_scale=None, skipped=0, finite=True,
        ids=ids, samples=samples, tokens=None, deltas={}, moved=None,
    )  # fmt: skip


def job(dealing: Dealing | None, *updates: ObservedUpdate) -> Observed:
    batch = {"microbatches": dealing.to_json()} if dealing else None
    header = Header(
        rank=0, world_size=1, stage="window", coordinate={}, layout=None, declared_layout=None, batch=batch,
        versions={}, environment={},
    )  # fmt: skip
    return Observed(
        headers={0: header}, updates=updates, evals=(), states=(), boundaries=frozenset(), ended=True, finished=True,
        problems=(),
    )  # fmt: skip


@pytest.mark.parametrize(("batch", "replicas", "micro"), [(32, 4, 2), (32, 3, 2), (7, 3, 2), (5, 4, 1)])
def test_ids_are_put_back_into_the_global_order(batch: int, replicas: int, micro: int) -> None:
    dealing = deal(batch, replicas, micro)
    order = [100 + i for i in range(batch)]
    ids = {r: tuple(order[i] for part in dealing.replica_positions(r) for i in part) for r in range(replicas)}
    found = in_global_order(update(1, ids), job(dealing))
    assert [sample for sample, _ in found] == order
    assert all(sample in ids[replica] for sample, replica in found)


def test_without_a_dealing_ids_come_replica_by_replica() -> None:
    ids = {0: (5, 3), 1: (4,)}
    for dealing in (None, deal(4, 2, 2), deal(3, 1, 3)):
        assert in_global_order(update(1, ids), job(dealing)) == [(5, 0), (3, 0), (4, 1)]


@pytest.fixture
def make(promote_model):
    def with_jobs(control: Observed, candidate: Observed | None):
        followed = promote_model.followed
        jobs = {} if candidate is None else {"06-window": replace(followed, observed=candidate)}
        reference = replace(promote_model.control, observed=control)
        return replace(promote_model, controls=(reference,), candidates=jobs)

    return with_jobs


def test_replayed_and_omitted_samples_show_in_their_strip(make) -> None:
    control = job(None, update(13, {0: (1, 2), 1: (3, 4)}), update(14, {0: (5, 6), 1: (7, 8)}))
    candidate = job(None, update(13, {0: (1, 2, 3, 4)}), update(14, {0: (5, 6, 7, 1)}))
    view = view_samples(make(control, candidate))
    assert view is not None
    assert not view.exactly_once
    assert view.first_difference == 14
    assert view.counts["replayed"] == 1
    first, second = view.strips
    assert first.exact
    assert first.placed[2] == Placed(3, 1, 0, 13)
    assert second.placed[3] == Placed(8, 1, None, None)
    assert [(extra.sample, extra.kind) for extra in second.extras] == [(1, "replayed")]
    assert [(part.standing, part.first, part.last) for part in view.stretches] == [
        ("exact", 13, 13),
        ("differs", 14, 14),
    ]


def test_a_control_alone_shows_what_it_consumed(make) -> None:
    view = view_samples(make(job(None, update(13, {0: (1, 2)})), None))
    assert view is not None
    assert not view.compared
    assert view.stretches[0].standing == "not-run"
    assert view.strips[0].placed[0].destination is None
    assert not view.strips[0].ran


def test_updates_before_the_seam_are_kept_apart(make) -> None:
    control = job(None, *(update(i, {0: (10 * i, 10 * i + 1)}) for i in range(8, 16)))
    view = view_samples(make(control, job(None, update(13, {0: (130, 131)}))))
    assert view is not None
    assert [strip.update for strip in view.strips if strip.before_seam] == [11, 12]
    assert view.first_update == 13


def test_very_large_batches_are_counted_not_drawn(make) -> None:
    ids = {0: tuple(range(20_000))}
    view = view_samples(make(job(None, update(13, ids)), job(None, update(13, ids))))
    assert view is not None
    assert view.exactly_once
    assert view.strips == ()


def fates(view) -> dict[str, int | None]:
    return {fate.kind: fate.count for fate in view.fates}


def test_what_became_of_the_samples_around_the_seam(make) -> None:
    control = job(None, *(update(13 + i, {0: tuple(range(4 * i, 4 * i + 4))}) for i in range(4)))

    def seen(*ids: tuple[int, ...]):
        view = view_samples(make(control, job(None, *(update(13 + i, {0: own}) for i, own in enumerate(ids)))))
        assert view is not None
        return view

    exact = seen((0, 1, 2, 3), (4, 5, 6, 7))
    assert fates(exact) == {"committed": 384, "consumed": 8, "replayed": 0, "prefetched": 0, "omitted": 0}
    assert "whatever had been read ahead was issued again" in exact.fates[3].text
    ahead = seen((4, 5, 6, 7), (8, 9, 10, 11))  # one batch had been read ahead, and counted as consumed
    assert (ahead.passed_over, fates(ahead)["prefetched"], fates(ahead)["omitted"]) == (4, 4, 0)
    beyond = seen((4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15), (16, 17, 18, 19))  # further than the control went
    assert (beyond.passed_over, fates(beyond)["prefetched"]) == (4, 4)
    skipped = seen((0, 1, 2, 3), (8, 9, 10, 11))
    assert (skipped.passed_over, fates(skipped)["omitted"]) == (0, 4)
    again = seen((0, 1, 2, 3), (0, 1, 2, 3))
    assert fates(again)["replayed"] == 4
    lost = seen((90, 91, 2, 3))
    assert (lost.passed_over, fates(lost)["prefetched"], fates(lost)["omitted"]) == (0, None, 2)
    elsewhere = seen((90, 91, 92, 93))
    assert (elsewhere.passed_over, fates(elsewhere)["prefetched"]) == (0, None)

"""Who owns which slice: the picture against what every rank of a real job holds."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from samerun.core.mesh import Layout
from samerun.report.layout import Held, draw_mesh, plan_ownership, slices, usual_cuts
from support import toy
from support.gloo import run_ranks


def look(rank: int, world_size: int, layout: Layout) -> tuple[dict[str, Any], dict[str, list[list[tuple[int, int]]]]]:
    """Returns what the job reports, and the intervals that this rank really holds of every parameter."""
    from samerun.train.capture import capture_state
    from samerun.train.measure import read_local

    job = toy.build(layout)
    reported = capture_state(job.model, job.optimizer).to_json()["tensors"]
    held = read_local(job.model, None).held
    return reported, {item.key: [list(part) for part in item.shard.intervals] for item in held if item.shard}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=3),
        Layout(dp_shard=4),
        Layout(dp_replicate=2),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(tp=2, dp_shard=2),
    ],
    ids=str,
)
def test_the_picture_is_what_every_rank_holds(layout: Layout) -> None:
    results = run_ranks(layout.world_size, look, layout)
    drawn = 0
    for key, fact in results[0][0].items():
        if not key.startswith("param:"):
            continue
        assert fact["cuts"] is not None
        held = Held(tuple(fact["shape"]), tuple(tuple(cut) for cut in fact["cuts"]), fact.get("lead", 0))
        owned = slices(layout, held)
        assert owned is not None
        for rank, parts in owned.items():
            intervals = results[rank][1][key]
            rows = [tuple(part) for part in intervals[0]]
            columns = [tuple(part) for part in intervals[1]] if len(intervals) > 1 else [(0, 1)]
            expected = {(row, column) for row in rows for column in columns if row[0] < row[1]}
            assert {(part.rows, part.columns) for part in parts} == expected, (key, rank)
            drawn += 1
    assert drawn >= layout.dp_shard * layout.tp * 8


@pytest.mark.parametrize("layout", [Layout(dp_shard=4), Layout(tp=2, dp_shard=2), Layout(dp_shard=3, cp=2)], ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (8, 6), (5, 6), (259, 40, 2)], ids=str)
def test_usual_cuts_tile_the_tensor(layout: Layout, shape: tuple[int, ...]) -> None:
    owned = slices(layout, Held(shape))
    assert owned is not None
    cells: set[tuple[int, int]] = set()
    for parts in owned.values():
        for part in parts:
            cells |= {(row, column) for row in range(*part.rows) for column in range(*part.columns)}
    assert len(cells) == math.prod(shape)


def test_what_makes_no_rectangles_is_not_drawn() -> None:
    assert slices(Layout(dp_shard=2), Held((4, 4, 4), (("dp_shard", 2, 1),))) is None
    assert slices(Layout(dp_shard=2), Held((4, 4), (("experts", 0, 1),))) is None
    layout = Layout(dp_shard=2)
    assert plan_ownership(layout, layout, {"w": Held((4,), (("experts", 0, 1),))}, {"w": Held((4,))}) == ()


def test_ribbons_carry_every_row_once() -> None:
    (owned,) = plan_ownership(
        Layout(dp_shard=4), Layout(dp_shard=3), {"a": Held((259, 40)), "b": Held((259, 40))}, {"a": Held((259, 40))}
    )
    assert owned.example == "a"
    assert owned.others == ()
    assert not owned.reported
    assert [mark.rows for mark in owned.before] == [(0, 65), (65, 130), (130, 195), (195, 259)]
    assert [mark.rows for mark in owned.after] == [(0, 87), (87, 174), (174, 259)]
    assert [(item.source, item.destination) for item in owned.ribbons] == [
        *((0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2))
    ]
    # Rows 65..86, 130..173 and 195..258 have another owner afterwards.
    assert owned.moved_share == pytest.approx((22 + 44 + 64) / 259)


def test_ranks_that_own_nothing_are_named() -> None:
    (owned,) = plan_ownership(Layout(dp_shard=4), Layout(dp_shard=2), {"a": Held((3, 30))}, {"a": Held((3, 30))})
    assert owned.empty_before == (3,)
    assert owned.empty_after == ()


def test_tensor_parallel_ranks_share_a_replica() -> None:
    mesh = draw_mesh(Layout(tp=2, dp_shard=4))
    assert (mesh.world_size, mesh.batch_replicas) == (8, 4)
    assert [[member.rank for member in replica.members] for replica in mesh.replicas] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert mesh.replicas[0].members[1].place == "tp1"
    assert usual_cuts(Layout(tp=2), (5, 6)) == (("tp", 1, 1), ("dp_shard_cp", 0, 1))


def test_very_large_worlds_are_counted_not_drawn() -> None:
    mesh = draw_mesh(Layout(dp_shard=1000))
    assert len(mesh.replicas) + mesh.left_out == 1000
    assert plan_ownership(Layout(dp_shard=5000), Layout(dp_shard=3), {"a": Held((9,))}, {"a": Held((9,))}) == ()


def test_with_many_ranks_the_largest_tensors_are_drawn() -> None:
    held = {f"w{i}": Held((8192 + i, 4)) for i in range(20)}
    owned = plan_ownership(Layout(dp_shard=1024), Layout(dp_shard=768), held, held)
    assert [item.example for item in owned] == ["w19", "w18", "w17", "w16"]
    assert sum(len(item.before) + len(item.after) for item in owned) <= 8_000
    carried = sorted(ribbon.left for ribbon in owned[0].ribbons)
    assert all(one[1] <= two[0] + 1e-3 for one, two in pairwise(carried))

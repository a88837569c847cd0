"""The tiling check against sets of cells, and its speed."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.box import Box, check_tiling, check_tilings, find_outside
from samerun.core.state import Tiling

Cells = set[tuple[int, ...]]


def tiling(offsets: list[tuple[int, ...]], sizes: list[tuple[int, ...]], ndim: int) -> Tiling:
    shape = (len(offsets), ndim)
    return Tiling(np.array(offsets, np.int64).reshape(shape), np.array(sizes, np.int64).reshape(shape))


def cells(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Cells:
    return set(itertools.product(*(range(first, first + size) for first, size in zip(offsets, sizes, strict=True))))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """A small shape and boxes: a random tiling by repeated cuts, then perhaps damaged."""
    ndim = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim)))
    boxes = [((0,) * ndim, shape)]
    for _ in range(draw(st.integers(0, 6)) if ndim else 0):
        i = draw(st.integers(0, len(boxes) - 1))
        d = draw(st.integers(0, ndim - 1))
        offsets, sizes = boxes[i]
        cut = draw(st.integers(0, sizes[d]))
        left = (*sizes[:d], cut, *sizes[d + 1 :])
        right = (*sizes[:d], sizes[d] - cut, *sizes[d + 1 :])
        boxes[i : i + 1] = [(offsets, left), ((*offsets[:d], offsets[d] + cut, *offsets[d + 1 :]), right)]
    for _ in range(draw(st.integers(0, 3))):
        action = draw(st.sampled_from(["drop", "repeat", "add"]))
        if action == "drop" and boxes:
            boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        elif action == "repeat" and boxes:
            boxes.append(draw(st.sampled_from(boxes)))
        elif action == "add":
            corner = tuple(draw(st.integers(-1, 5)) for _ in range(ndim))
            boxes.append((corner, tuple(draw(st.integers(-1, 5)) for _ in range(ndim))))
    boxes = draw(st.permutations(boxes))
    return shape, [offsets for offsets, _ in boxes], [sizes for _, sizes in boxes]


@settings(max_examples=600, deadline=None)
@given(tensors())
def test_coverage_equals_counting_cells(tensor: tuple[tuple[int, ...], list[tuple[int, ...]], list[tuple[int, ...]]]):
    shape, offsets, sizes = tensor
    boxes = tiling(offsets, sizes, len(shape))
    found = check_tiling(shape, boxes)

    outside = {
        i
        for i, (first, size) in enumerate(zip(offsets, sizes, strict=True))
        if any(a < 0 or n < 0 or a + n > whole for a, n, whole in zip(first, size, shape, strict=True))
    }
    assert set(found.outside) == outside == set(find_outside(shape, boxes))
    inside = {(o, s) for i, (o, s) in enumerate(zip(offsets, sizes, strict=True)) if i not in outside}
    distinct = [cells(*box) for box in sorted(inside) if math.prod(box[1])]
    counts: dict[tuple[int, ...], int] = {}
    for box in distinct:
        for cell in box:
            counts[cell] = counts.get(cell, 0) + 1
    whole = cells((0,) * len(shape), shape)
    missing = whole - counts.keys()
    assert found.missing_elements == len(missing)
    assert found.shared_elements == sum(count > 1 for count in counts.values())
    assert (found.first_gap is None) == (not missing)
    if found.first_gap is not None:
        assert cells(found.first_gap.offsets, found.first_gap.sizes) <= missing
    for a, b in found.overlapping:
        assert cells(offsets[a], sizes[a]) & cells(offsets[b], sizes[b])
    assert found.exact == (not missing and not outside and all(count == 1 for count in counts.values()))
    assert found.replicas == len([1 for i, s in enumerate(sizes) if i not in outside and math.prod(s)]) - len(distinct)
    assert check_tilings([(shape, boxes)])[0].exact == found.exact


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors(), max_size=6))
def test_many_at_once_equal_one_by_one(
    batch: list[tuple[tuple[int, ...], list[tuple[int, ...]], list[tuple[int, ...]]]],
):
    tilings = [(shape, tiling(offsets, sizes, len(shape))) for shape, offsets, sizes in batch]
    assert [found.exact for found in check_tilings(tilings)] == [check_tiling(*one).exact for one in tilings]


def test_pinwheel_has_no_splitting_plane_and_is_exact():
    offsets = [(0, 0), (0, 2), (1, 0), (2, 1), (1, 1)]
    sizes = [(1, 2), (2, 1), (2, 1), (1, 2), (1, 1)]
    assert check_tiling((3, 3), tiling(offsets, sizes, 2)).exact
    holed = check_tiling((3, 3), tiling(offsets[:-1], sizes[:-1], 2))
    assert holed.missing_elements == 1
    assert holed.first_gap == Box((1, 1), (1, 1))


def test_empty_chunk_beyond_the_last_row_is_allowed():
    boxes = tiling([(0, 0), (1, 0), (2, 0), (3, 0)], [(1, 30), (1, 30), (1, 30), (0, 30)], 2)
    assert check_tilings([((3, 30), boxes)])[0].exact


def test_replicas_are_counted_once():
    found = check_tiling((4,), tiling([(0,), (2,), (0,)], [(2,), (2,), (2,)], 1))
    assert found.exact
    assert found.replicas == 1


def test_huge_shapes_do_not_overflow():
    shape = (1 << 40, 1 << 40)
    found = check_tiling(shape, tiling([(0, 0)], [(1 << 40, 1)], 2))
    assert found.missing_elements == (1 << 80) - (1 << 40)
    assert not check_tilings([(shape, tiling([(0, 0)], [(1 << 40, 1)], 2))])[0].exact


def grid(*counts: int) -> tuple[tuple[int, ...], Tiling]:
    corners = np.stack(np.meshgrid(*(np.arange(n) * 3 for n in counts), indexing="ij"), -1).reshape(-1, len(counts))
    return tuple(n * 3 for n in counts), Tiling(corners.astype(np.int64), np.full(corners.shape, 3, np.int64))


@pytest.mark.parametrize("counts", [(100_000,), (320, 320), (46, 46, 46)])
def test_time_is_near_linear(counts: tuple[int, ...]):
    shape, boxes = grid(*counts)
    start = time.perf_counter()
    assert check_tiling(shape, boxes).exact
    assert check_tilings([(shape, boxes)])[0].exact
    assert time.perf_counter() - start < 5.0


def test_awkward_boxes_end_in_bounded_time():
    rng = np.random.default_rng(0)
    offsets = rng.integers(0, 500, (3000, 3))
    boxes = Tiling(offsets, rng.integers(1, 500, (3000, 3)))
    start = time.perf_counter()
    found = check_tiling((1000, 1000, 1000), boxes)
    assert not found.exact
    assert time.perf_counter() - start < 30.0

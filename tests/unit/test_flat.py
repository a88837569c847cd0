"""Flat intervals and strided views as boxes, against NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.flat import Block, flat_boxes, meet, row_major_strides, strided_blocks, unravel

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    total = math.prod(shape)
    start = draw(st.integers(0, total))
    return shape, start, draw(st.integers(start, total))


def cut(array: np.ndarray, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    return array[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]


@given(intervals())
def test_boxes_of_an_interval_are_its_elements_in_order(interval: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = interval
    array = np.arange(math.prod(shape)).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    found = [cut(array, box.offsets, box.sizes).reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate(found) if found else np.empty(0), np.arange(start, stop))
    assert all(values.size and values[0] == box.start for values, box in zip(found, boxes, strict=True))


@given(intervals())
def test_an_interval_is_at_most_twice_its_dimensions_less_one(interval: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = interval
    assert len(flat_boxes(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_an_interval_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="inside a tensor of 12"):
        flat_boxes((3, 4), start, stop)


@given(intervals())
def test_unravel_inverts_strides(interval: tuple[tuple[int, ...], int, int]) -> None:
    shape, element, _ = interval
    if element < math.prod(shape):
        assert unravel(element, row_major_strides(shape)) == tuple(int(i) for i in np.unravel_index(element, shape))


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...], tuple[int, ...]]:
    """A box cut out of a tensor, and where it lands in another tensor."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    box = tuple(
        slice(first, draw(st.integers(first, size))) for size in shape for first in [draw(st.integers(0, size))]
    )
    target_shape = tuple((part.stop - part.start) + draw(st.integers(0, 3)) for part in box)
    room = [whole - (part.stop - part.start) for whole, part in zip(target_shape, box, strict=True)]
    return shape, target_shape, box, tuple(draw(st.integers(0, space)) for space in room)


@given(views())
def test_a_strided_view_is_the_same_elements_in_both_tensors(
    view: tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...], tuple[int, ...]],
) -> None:
    shape, target_shape, box, target = view
    sizes = tuple(part.stop - part.start for part in box)
    strides, target_strides = row_major_strides(shape), row_major_strides(target_shape)
    begin = sum(part.start * step for part, step in zip(box, strides, strict=True))
    target_begin = sum(first * step for first, step in zip(target, target_strides, strict=True))
    blocks = strided_blocks(sizes, (begin, strides, shape), (target_begin, target_strides, target_shape))
    expected = np.zeros(target_shape, int)
    array = np.arange(1, math.prod(shape) + 1).reshape(shape)
    cut(expected, target, sizes)[...] = array[box]
    found = np.zeros(target_shape, int)
    for block in blocks:
        cut(found, block.target, block.sizes)[...] = cut(array, block.source, block.sizes)
    assert np.array_equal(found, expected)
    assert len(blocks) <= 1


def test_a_view_through_another_shape_is_cut_into_boxes() -> None:
    """Heads seen as (3, 2, 4) of a (24, 5) tensor whose shard holds one head of each of three kinds."""
    blocks = strided_blocks((3, 4, 5), (4 * 5, (8 * 5, 5, 1), (24, 5)), (0, (4 * 5, 5, 1), (12, 5)))
    assert blocks == [
        Block((4, 0), (0, 0), (4, 5)),
        Block((12, 0), (4, 0), (4, 5)),
        Block((20, 0), (8, 0), (4, 5)),
    ]


def test_a_view_that_reaches_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="reaches element"):
        strided_blocks((2, 2), (3, (2, 1), (2, 2)), (0, (2, 1), (2, 2)))


def test_meeting_blocks_keep_their_distance() -> None:
    assert meet((0,), (4,), Block((2,), (10,), (5,))) == Block((2,), (10,), (2,))
    assert meet((0,), (2,), Block((2,), (10,), (5,))) is None

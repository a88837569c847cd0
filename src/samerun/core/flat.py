"""Flat intervals of a tensor, and strided blocks of one, as boxes.

Sharded optimizers cut a tensor's row-major elements, not the tensor: rank r holds elements `start` to `stop` of it.
Such an interval is at most `2 * ndim - 1` boxes: partial rows on the way out to a whole block, the block, and partial
rows on the way in again. Boxes are in elements, half-open, and come in the order of the interval, so that each is a
contiguous run of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """A box that lies at `source` in one tensor and at `target` in another. All three in elements per dimension."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Block:
        """Returns the block of a tensor that is the same tensor in both places."""
        origin = (0,) * len(shape)
        return cls(origin, origin, tuple(shape))

    @property
    def num_elements(self) -> int:
        """Number of elements in the block."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A box inside a tensor that is also a run of its row-major elements, beginning at element `start`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a densely packed tensor.

    >>> row_major_strides((4, 3, 2))
    (6, 2, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[FlatBox]:
    """Returns the boxes that together are elements `start` to `stop` (row-major, half-open) of a tensor.

    At most `2 * ndim - 1` boxes (one for a scalar), none empty, in the order of the interval.

    >>> [(box.offsets, box.sizes) for box in flat_boxes((4, 5), 3, 17)]
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]

    Raises:
        ValueError: if the interval does not lie inside the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"elements {start} to {stop} do not lie inside a tensor of {total} elements")
    if start == stop:
        return []
    strides = row_major_strides(shape)
    boxes: list[FlatBox] = []
    while start < stop:
        boxes.append(_longest_box(shape, strides, start, stop))
        start += math.prod(boxes[-1].sizes)
    return boxes


def _longest_box(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> FlatBox:
    """Returns the largest box that begins at element `start` and is a run of elements not reaching beyond `stop`."""
    offsets = unravel(start, strides)
    for axis in range(len(shape)):
        if any(offsets[axis + 1 :]):
            continue  # a box that begins inside a row cannot be longer than that row
        count = min(shape[axis] - offsets[axis], (stop - start) // strides[axis])
        if count > 0:
            return FlatBox(offsets, (*((1,) * axis), count, *shape[axis + 1 :]), start)
    return FlatBox(offsets, (1,) * len(shape), start)


def unravel(element: int, strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the coordinates of a row-major element number.

    >>> unravel(17, (5, 1))
    (3, 2)
    """
    coordinates: list[int] = []
    for stride in strides:
        coordinate, element = divmod(element, stride)
        coordinates.append(coordinate)
    return tuple(coordinates)


def meet(first: Sequence[int], sizes: Sequence[int], block: Block) -> Block | None:
    """Returns the part of a block whose source lies inside the box at `first` of size `sizes`; None if there is none.

    >>> meet((0, 3), (2, 4), Block((1, 0), (9, 0), (5, 5)))
    Block(source=(1, 3), target=(9, 3), sizes=(1, 2))
    """
    low = tuple(map(max, first, block.source))
    high = [min(a + n, b + m) for a, n, b, m in zip(first, sizes, block.source, block.sizes, strict=True)]
    if any(b <= a for a, b in zip(low, high, strict=True)):
        return None
    target = tuple(t + a - s for t, a, s in zip(block.target, low, block.source, strict=True))
    return Block(low, target, tuple(b - a for a, b in zip(low, high, strict=True)))


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, where its values begin in a run of elements, and the number of the block it belongs to."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    block: int


def run_parts(shape: Sequence[int], blocks: Sequence[Block], first: int, count: int) -> list[Part]:
    """Returns where elements `first` to `first + count` (row-major) of a tensor lie in another one.

    `blocks` lead from the tensor of this `shape` to the other. Starts count from element `first`; values of a part are
    apart by the row-major strides of `shape`. Elements in no block are left out.

    >>> [(part.offsets, part.sizes, part.start) for part in run_parts((4,), [Block((0,), (6,), (4,))], 1, 2)]
    [((7,), (2,), 0)]
    """
    strides = row_major_strides(shape)
    parts: list[Part] = []
    for box in flat_boxes(shape, first, first + count):
        for number, block in enumerate(blocks):
            inside = meet(box.offsets, box.sizes, block)
            if inside is not None:
                at = sum(map(int.__mul__, inside.source, strides))
                parts.append(Part(inside.target, inside.sizes, at - first, number))
    return parts


def strided_blocks(
    sizes: Sequence[int],
    source: tuple[int, Sequence[int], Sequence[int]],
    target: tuple[int, Sequence[int], Sequence[int]],
) -> list[Block]:
    """Returns a strided view of two tensors (the same elements in the same order) as blocks that are boxes in both.

    `sizes` is the view's own shape. `source` and `target` each give the element where the view begins, its strides in
    elements, and the shape of the tensor that it is a view of. A view that is a box in both tensors is one block; any
    other is cut along its outermost dimension until it is.

    Raises:
        ValueError: if the view reaches outside a tensor.
    """
    if 0 in sizes:
        return []
    if not sizes or len(sizes) == len(source[1]) == len(target[1]):
        return list(_cut(tuple(sizes), source, target))
    raise ValueError(f"a view of {len(sizes)} dimensions has {len(source[1])} and {len(target[1])} strides")


def _cut(
    sizes: tuple[int, ...],
    source: tuple[int, Sequence[int], Sequence[int]],
    target: tuple[int, Sequence[int], Sequence[int]],
) -> Iterator[Block]:
    here = _as_box(sizes, *source)
    there = _as_box(sizes, *target)
    if here is not None and there is not None and here[1] == there[1]:
        yield Block(here[0], there[0], here[1])
        return
    if not sizes:
        raise ValueError("a view of one element is a box of different size in the two tensors")
    for i in range(sizes[0]):
        inner_source = (source[0] + i * source[1][0], source[1][1:], source[2])
        inner_target = (target[0] + i * target[1][0], target[1][1:], target[2])
        yield from _cut(sizes[1:], inner_source, inner_target)


def _as_box(
    sizes: tuple[int, ...], start: int, strides: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns offsets and sizes of the box that a strided view is in a tensor, None if it is none."""
    last = start + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if start < 0 or min((0, *strides)) < 0 or last >= math.prod(shape):
        raise ValueError(f"a view reaches element {last} of a tensor of {math.prod(shape)} elements")
    whole = row_major_strides(shape)
    offsets = unravel(start, whole)
    extents = [1] * len(shape)
    axis = 0
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        while axis < len(shape) and (whole[axis] != stride or shape[axis] == 1):
            axis += 1
        if axis == len(shape) or offsets[axis] + size > shape[axis]:
            return None
        extents[axis] = size
        axis += 1
    return offsets, tuple(extents)

"""How the elements of some tensors are the elements of others: boxes that correspond, axis by axis.

Renaming, splitting, joining, stacking, transposing, taking a fused attention projection apart: each is a set of links,
and a link can be followed in either direction, so what undoes a step needs no second description. Steps compose by
intersecting the boxes in between; no value is ever looked at. Sizes and offsets are in elements.

A box may be strided: every second row of a head is one link, however many rows there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

Shape = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A box of tensor `source` that is a box of tensor `target` (both numbers of tensors in their lists).

    `axes` pairs an axis of the source with the axis of the target that runs along it, and `sizes` gives the length of
    each pair. Every other axis has length 1 in the box. `steps` are the distances of neighbours in source and target
    along each pair; none at all where they are 1 everywhere.
    """

    source: int
    target: int
    source_offsets: Shape
    target_offsets: Shape
    axes: Pairs
    sizes: Shape
    steps: Pairs = ()

    def source_sizes(self) -> Shape:
        """Returns how many elements are linked along each axis of the source."""
        sizes = [1] * len(self.source_offsets)
        for (axis, _), size in zip(self.axes, self.sizes, strict=True):
            sizes[axis] = size
        return tuple(sizes)

    def target_sizes(self) -> Shape:
        """Returns how many elements are linked along each axis of the target."""
        sizes = [1] * len(self.target_offsets)
        for (_, axis), size in zip(self.axes, self.sizes, strict=True):
            sizes[axis] = size
        return tuple(sizes)

    def source_steps(self) -> Shape:
        """Returns the distance of neighbours along each axis of the source."""
        steps = [1] * len(self.source_offsets)
        for (axis, _), (step, _) in zip(self.axes, self.steps, strict=False):
            steps[axis] = step
        return tuple(steps)

    def target_steps(self) -> Shape:
        """Returns the distance of neighbours along each axis of the target."""
        steps = [1] * len(self.target_offsets)
        for (_, axis), (_, step) in zip(self.axes, self.steps, strict=False):
            steps[axis] = step
        return tuple(steps)

    def reversed(self) -> Link:
        """Returns the link followed the other way."""
        axes, steps = (tuple((theirs, mine) for mine, theirs in pairs) for pairs in (self.axes, self.steps))
        return Link(self.target, self.source, self.target_offsets, self.source_offsets, axes, self.sizes, steps)


def whole(shape: Shape, source: int = 0, target: int = 0) -> Link:
    """Returns the link of a tensor with itself."""
    origin = (0,) * len(shape)
    return Link(source, target, origin, origin, tuple((axis, axis) for axis in range(len(shape))), shape)


def compose(first: Sequence[Link], second: Sequence[Link]) -> list[Link]:
    """Returns the links from the sources of `first` to the targets of `second`, through the tensors in between."""
    by_source: dict[int, list[Link]] = {}
    for link in second:
        by_source.setdefault(link.source, []).append(link)
    rows = {source: _Rows(links) for source, links in by_source.items()}
    found = [_through(one, two) for one in first if one.target in rows for two in rows[one.target].near(one)]
    return [link for link in found if link is not None]


class _Rows:
    """The links from one tensor in the order of its first axis, to find those that another link may meet."""

    def __init__(self, links: list[Link]) -> None:
        spans = [_span(link.source_offsets, link.source_steps(), link.source_sizes()) for link in links]
        order = sorted(range(len(links)), key=lambda number: spans[number][0])
        self._links = [links[number] for number in order]
        self._starts = [spans[number][0] for number in order]
        self._stops = list(accumulate((spans[number][1] for number in order), max))

    def near(self, link: Link) -> list[Link]:
        """Returns the links that may share elements with the target's side of another."""
        start, stop = _span(link.target_offsets, link.target_steps(), link.target_sizes())
        return self._links[bisect_right(self._stops, start) : bisect_left(self._starts, stop)]


def _span(offsets: Shape, steps: Shape, sizes: Shape) -> tuple[int, int]:
    """Returns the first position along the first axis and the one after the last; of a scalar, one position."""
    return (offsets[0], offsets[0] + steps[0] * (sizes[0] - 1) + 1) if offsets else (0, 1)


def _through(first: Link, second: Link) -> Link | None:
    """Follows `first` and then `second` over what both have of the tensor between them."""
    ends = zip(
        zip(first.target_offsets, first.target_steps(), first.target_sizes(), strict=True),
        zip(second.source_offsets, second.source_steps(), second.source_sizes(), strict=True),
        strict=True,
    )
    met = [_meet(*one, *two) for one, two in ends]
    if any(found is None for found in met):
        return None
    between = [found for found in met if found is not None]
    source_offsets, target_offsets = list(first.source_offsets), list(second.target_offsets)
    before, after = first.source_steps(), second.target_steps()
    mine = {axis: theirs for theirs, axis in first.axes}
    theirs = dict(second.axes)
    for axis, outer in mine.items():
        source_offsets[outer] += between[axis].first * before[outer]
    for axis, outer in theirs.items():
        target_offsets[outer] += between[axis].second * after[outer]
    shared = [axis for axis in mine if axis in theirs]
    axes = tuple((mine[axis], theirs[axis]) for axis in shared)
    sizes = tuple(between[axis].count for axis in shared)
    steps = tuple(
        (before[mine[axis]] * between[axis].each_first, after[theirs[axis]] * between[axis].each_second)
        if between[axis].count > 1
        else (1, 1)
        for axis in shared
    )
    dense = all(pair == (1, 1) for pair in steps)
    offsets = tuple(source_offsets), tuple(target_offsets)
    return Link(first.source, second.target, *offsets, axes, sizes, () if dense else steps)


@dataclass(frozen=True, slots=True)
class _Met:
    """What two rows of positions share: `count` of them, from member `first` of the one and `second` of the other on.

    From one to the next it is `each_first` members of the one and `each_second` of the other.
    """

    first: int
    second: int
    count: int
    each_first: int = 1
    each_second: int = 1


def _meet(a: int, a_step: int, a_size: int, b: int, b_step: int, b_size: int) -> _Met | None:
    """Returns what the positions `a`, `a + a_step`, ... and `b`, `b + b_step`, ... share; None if nothing."""
    low, high = max(a, b), min(a + a_step * (a_size - 1), b + b_step * (b_size - 1))
    if high < low:
        return None
    if a_step == b_step == 1:
        return _Met(low - a, low - b, high - low + 1)
    common = gcd(a_step, b_step)
    if (b - a) % common:
        return None
    each_first, each_second = b_step // common, a_step // common
    # the first member of `a`'s row, counted without end, that is one of `b`'s (Chinese remainders)
    start = a + a_step * ((b - a) // common * pow(each_second, -1, each_first) % each_first)
    step = a_step * each_first
    start += -(-(low - start) // step) * step
    if start > high:
        return None
    return _Met((start - a) // a_step, (start - b) // b_step, (high - start) // step + 1, each_first, each_second)

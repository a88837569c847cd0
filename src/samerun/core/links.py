"""How the elements of some tensors are the elements of others: boxes that correspond, axis by axis.

Renaming, splitting, joining, stacking, transposing, taking a fused attention projection apart: each is a set of links,
and a link can be followed in either direction, so what undoes a step needs no second description. Steps compose by
intersecting the boxes in between; no value is ever looked at. Sizes and offsets are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A box of tensor `source` that is a box of tensor `target` (both numbers of tensors in their lists).

    `axes` pairs an axis of the source with the axis of the target that runs along it, and `sizes` gives the length of
    each pair. Every other axis has length 1 in the box.
    """

    source: int
    target: int
    source_offsets: Shape
    target_offsets: Shape
    axes: tuple[tuple[int, int], ...]
    sizes: Shape

    def source_sizes(self) -> Shape:
        """Returns the box's size in the source, per axis of the source."""
        sizes = [1] * len(self.source_offsets)
        for (axis, _), size in zip(self.axes, self.sizes, strict=True):
            sizes[axis] = size
        return tuple(sizes)

    def target_sizes(self) -> Shape:
        """Returns the box's size in the target, per axis of the target."""
        sizes = [1] * len(self.target_offsets)
        for (_, axis), size in zip(self.axes, self.sizes, strict=True):
            sizes[axis] = size
        return tuple(sizes)

    def reversed(self) -> Link:
        """Returns the link followed the other way."""
        axes = tuple((theirs, mine) for mine, theirs in self.axes)
        return Link(self.target, self.source, self.target_offsets, self.source_offsets, axes, self.sizes)


def whole(shape: Shape, source: int = 0, target: int = 0) -> Link:
    """Returns the link of a tensor with itself."""
    origin = (0,) * len(shape)
    return Link(source, target, origin, origin, tuple((axis, axis) for axis in range(len(shape))), shape)


def compose(first: Sequence[Link], second: Sequence[Link]) -> list[Link]:
    """Returns the links from the sources of `first` to the targets of `second`, through the tensors in between."""
    by_source: dict[int, list[Link]] = {}
    for link in second:
        by_source.setdefault(link.source, []).append(link)
    found = [_through(one, two) for one in first for two in by_source.get(one.target, ())]
    return [link for link in found if link is not None]


def _through(first: Link, second: Link) -> Link | None:
    """Follows `first` and then `second` over the box that both have of the tensor between them."""
    low = tuple(map(max, first.target_offsets, second.source_offsets))
    ends = zip(first.target_offsets, first.target_sizes(), second.source_offsets, second.source_sizes(), strict=True)
    high = tuple(min(a + n, b + m) for a, n, b, m in ends)
    if any(stop <= start for start, stop in zip(low, high, strict=True)):
        return None
    source_offsets, target_offsets = list(first.source_offsets), list(second.target_offsets)
    mine = {between: axis for axis, between in first.axes}
    theirs = dict(second.axes)
    for between, axis in mine.items():
        source_offsets[axis] += low[between] - first.target_offsets[between]
    for between, axis in theirs.items():
        target_offsets[axis] += low[between] - second.source_offsets[between]
    shared = [between for between in mine if between in theirs]
    axes = tuple((mine[between], theirs[between]) for between in shared)
    sizes = tuple(high[between] - low[between] for between in shared)
    return Link(first.source, second.target, tuple(source_offsets), tuple(target_offsets), axes, sizes)

"""Half-open boxes in N dimensions, as columns, and whether a set of them tiles a tensor exactly.

A box is a row of `offsets` and of `sizes`, both (boxes, ndim) int64, in elements. Coverage is counted in values: names
that are present and files that are whole both pass on checkpoints in which part of a tensor was never written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samerun.core.state import Tiling

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# What counting may cost before it gives up: so many box visits in all and so many more per box, a region costing some
# by itself. A regular tiling costs a few per box; only boxes laid out to be awkward come near this, after seconds.
_BUDGET, _BUDGET_PER_BOX, _REGION_COST = 10_000_000, 100, 1_500
_PAIRS_SHOWN = 4
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class Box:
    """One box: first element and extent along every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of values inside."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        """Returns slices, as Python writes them.

        >>> str(Box((0, 3), (4, 2)))
        '[0:4, 3:5]'
        """
        spans = (f"{first}:{first + size}" for first, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"


@dataclass(frozen=True, slots=True)
class Coverage:
    """How a tiling covers its tensor.

    `missing_elements` counts values in no box, `shared_elements` values in several boxes that are not replicas of each
    other. Both are None when the boxes are too irregular to be counted; such a tiling does not count as exact.
    `outside` and `overlapping` name boxes by row, the latter only the first few pairs. `replicas` counts boxes that
    repeat another one.
    """

    missing_elements: int | None = 0
    shared_elements: int | None = 0
    first_gap: Box | None = None
    outside: tuple[int, ...] = ()
    overlapping: tuple[tuple[int, int], ...] = ()
    replicas: int = 0

    @property
    def exact(self) -> bool:
        """Whether every value lies in exactly one box, replicas apart, and no box reaches outside."""
        return self.missing_elements == 0 and self.shared_elements == 0 and not self.outside


_EXACT = Coverage()
_FEW = 16  # boxes that are looked at one by one


def find_outside(shape: tuple[int, ...], tiling: Tiling) -> tuple[int, ...]:
    """Returns the rows of boxes that are not inside a tensor of this shape (negative sizes included)."""
    return tuple(np.flatnonzero(_outside(np.array(shape, np.int64), tiling.offsets, tiling.sizes)).tolist())


def _outside(shape: Ints, offsets: Ints, sizes: Ints) -> Mask:
    bad = (offsets < 0) | (sizes < 0) | (sizes > shape) | (offsets > shape - sizes)
    return np.any(bad, axis=1)


def check_tilings(tensors: Sequence[tuple[tuple[int, ...], Tiling]]) -> list[Coverage]:
    """Returns how each (shape, tiling) is covered, in order.

    Tensors cut along a grid, as every sharding of whole dimensions is, are checked together in a few array operations;
    only what that leaves is looked at one by one. Time is near-linear in the number of boxes.
    """
    found: list[Coverage | None] = [None] * len(tensors)
    by_ndim: dict[int, list[int]] = {}
    for i, (shape, _) in enumerate(tensors):
        by_ndim.setdefault(len(shape), []).append(i)
    for rows in by_ndim.values():
        for i, regular in zip(rows, _gridded([tensors[i] for i in rows]), strict=True):
            if regular:
                found[i] = _EXACT
    budget = _Budget(sum(len(tiling) for _, tiling in tensors))
    return [
        known if known is not None else _check_tiling(*tensor, budget)
        for known, tensor in zip(found, tensors, strict=True)
    ]


def _gridded(tensors: Sequence[tuple[tuple[int, ...], Tiling]]) -> list[bool]:
    """Returns, for tensors of one number of dimensions, which are cut along a full grid without replicas.

    A tensor is, when the distinct offsets along each dimension cut it into cells, every box is one cell, and every cell
    is one box. False means only that this could not be shown.
    """
    shapes = np.array([shape for shape, _ in tensors], np.int64).reshape(len(tensors), -1)
    counts = np.array([len(tiling) for _, tiling in tensors], np.int64)
    owner = np.repeat(np.arange(len(tensors)), counts)
    offsets = np.concatenate([tiling.offsets for _, tiling in tensors])
    sizes = np.concatenate([tiling.sizes for _, tiling in tensors])
    if shapes.size and (int(shapes.max()) + 1) * len(tensors) >= _LARGEST:
        return [False] * len(tensors)
    regular = np.ones(len(tensors), np.bool_)
    regular[owner[_outside(shapes[owner], offsets, sizes)]] = False
    filled = (sizes > 0).all(axis=1) & regular[owner]
    owner, offsets, sizes = owner[filled], offsets[filled], sizes[filled]
    cells, cell = np.ones(len(tensors), np.int64), np.zeros(len(owner), np.int64)
    span = int(shapes.max()) + 1 if shapes.size else 1
    for d in range(shapes.shape[1]):
        position, per_owner, fits = _cells_along(owner, offsets[:, d], sizes[:, d], shapes[:, d], span)
        regular[owner[~fits]] = False
        cell = cell * per_owner[owner] + position
        cells = np.where(regular, cells * per_owner, 1)
    boxes = np.bincount(owner, minlength=len(tensors))
    hollow = (shapes == 0).any(axis=1)
    regular &= np.where(hollow, boxes == 0, (cells == boxes) & (boxes > 0))
    return (regular & _each_once(owner, cell, boxes, regular)).tolist()


def _cells_along(owner: Ints, offsets: Ints, sizes: Ints, lengths: Ints, span: int) -> tuple[Ints, Ints, Mask]:
    """Cuts every tensor at the distinct offsets of its boxes along one dimension.

    Returns each box's cell number, the number of cells per tensor, and whether each box is exactly its cell.
    """
    keys = owner * span + offsets
    distinct, at = np.unique(keys, return_inverse=True)
    owners = distinct // span
    per_owner = np.bincount(owners, minlength=len(lengths))
    first = np.cumsum(per_owner) - per_owner
    stops = lengths[owners]
    if len(distinct) > 1:
        same = owners[1:] == owners[:-1]
        stops[:-1][same] = (distinct % span)[1:][same]
    starts_at_zero = (distinct % span)[first[owner]] == 0 if len(owner) else np.ones(0, np.bool_)
    return at - first[owner], per_owner, (offsets + sizes == stops[at]) & starts_at_zero


def _each_once(owner: Ints, cell: Ints, boxes: Ints, regular: Mask) -> Mask:
    """Returns the tensors in which no cell number comes twice, among those with as many cells as boxes."""
    base = np.cumsum(boxes) - boxes
    kept = regular[owner]
    seen = np.bincount(base[owner[kept]] + cell[kept], minlength=int(boxes.sum()))
    once = np.ones(len(boxes), np.bool_)
    once[owner[(seen != 1) & kept]] = False
    return once


def check_tiling(shape: tuple[int, ...], tiling: Tiling) -> Coverage:
    """Returns how one tensor's boxes cover it, counted exactly.

    Boxes that repeat another one are replicas and count once. Empty boxes are allowed. The region is split wherever a
    plane cuts no box, until boxes stand alone; what no plane splits is cut into slabs.
    """
    if len(tiling) <= _FEW and _in_a_row(shape, tiling):
        return _EXACT
    return _check_tiling(shape, tiling, _Budget(len(tiling)))


class _Budget:
    """What is left to spend on counting, shared by all tensors of one checkpoint."""

    def __init__(self, num_boxes: int) -> None:
        self.left = _BUDGET + _BUDGET_PER_BOX * num_boxes

    def spend(self, num_boxes: int) -> bool:
        """Takes the cost of visiting a region with so many boxes; returns False once nothing is left."""
        self.left -= num_boxes + _REGION_COST
        return self.left >= 0


def _in_a_row(shape: tuple[int, ...], tiling: Tiling) -> bool:
    """Whether the boxes follow each other along one dimension, whole in all others: a tensor in one piece, or in rows.

    Seen without array operations, which cost more than everything else where there are only a few boxes.
    """
    offsets, sizes = tiling.offsets.tolist(), tiling.sizes.tolist()
    if not offsets or 0 in shape:
        return False
    cut = next((dim for dim, size in enumerate(sizes[0]) if size != shape[dim]), 0)
    at = 0
    for offset, size in zip(offsets, sizes, strict=True):
        for dim, length in enumerate(shape):
            first, long = (at, size[dim]) if dim == cut else (0, length)
            if offset[dim] != first or size[dim] != long or long <= 0:
                return False
        at += size[cut] if shape else 1
    return at == (shape[cut] if shape else 1)


def _check_tiling(shape: tuple[int, ...], tiling: Tiling, budget: _Budget) -> Coverage:
    outside = find_outside(shape, tiling)
    rows = np.flatnonzero((tiling.sizes > 0).all(axis=1))
    rows = rows[~np.isin(rows, np.array(outside, np.int64))] if outside else rows
    unique = _first_of_each(tiling, rows)
    sweep = _Sweep(tiling.offsets, tiling.offsets + tiling.sizes, budget)
    counted = sweep.run(np.zeros(len(shape), np.int64), np.array(shape, np.int64), unique)
    return Coverage(
        sweep.missing if counted else None,
        sweep.shared if counted else None,
        sweep.first_gap,
        outside,
        tuple(sweep.overlapping),
        len(rows) - len(unique),
    )


def _first_of_each(tiling: Tiling, rows: Ints) -> Ints:
    """Returns the rows that remain when every box is kept once."""
    if len(rows) < 2:
        return rows
    columns = np.concatenate([tiling.offsets[rows], tiling.sizes[rows]], axis=1)
    if columns.shape[1] == 0:
        return rows[:1]
    order = np.lexsort(columns.T[::-1])
    ordered = columns[order]
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.sort(rows[order[fresh]])


class _Sweep:
    """Counts missing and shared values of one region. `low` and `high` are the boxes' corners, by row."""

    def __init__(self, low: Ints, high: Ints, budget: _Budget) -> None:
        self.low = low
        self.high = high
        self.budget = budget
        self.missing = 0
        self.shared = 0
        self.first_gap: Box | None = None
        self.overlapping: list[tuple[int, int]] = []

    def run(self, low: Ints, high: Ints, rows: Ints) -> bool:
        """Sweeps the region; returns False if it gave up because the boxes are too irregular."""
        work = [(low, high, rows)]
        while work:
            low, high, rows = work.pop()
            if not self.budget.spend(len(rows)):
                return False
            if (high <= low).any():
                continue
            if len(rows) == 0:
                self._gap(low, high)
                continue
            starts = np.maximum(self.low[rows], low)
            stops = np.minimum(self.high[rows], high)
            if not self._split(low, high, rows, starts, stops, work):
                self._slice(low, high, rows, starts, stops, work)
        return True

    def _gap(self, low: Ints, high: Ints) -> None:
        self.missing += math.prod((high - low).tolist())
        box = Box(tuple(low.tolist()), tuple((high - low).tolist()))
        if self.first_gap is None or box.offsets < self.first_gap.offsets:
            self.first_gap = box

    def _split(
        self, low: Ints, high: Ints, rows: Ints, starts: Ints, stops: Ints, work: list[tuple[Ints, Ints, Ints]]
    ) -> bool:
        """Splits the region by planes that cut no box, along the first dimension that has any."""
        for d in range(len(low)):
            order = np.argsort(starts[:, d], kind="stable")
            reach = np.maximum.accumulate(stops[order, d])
            cuts = np.flatnonzero(starts[order, d][1:] >= reach[:-1]) + 1
            edges = np.concatenate([[0], cuts, [len(rows)]])
            begins, ends = starts[order[edges[:-1]], d], reach[edges[1:] - 1]
            if len(cuts) == 0 and int(begins[0]) == int(low[d]) and int(ends[0]) == int(high[d]):
                continue
            self._gaps_along(d, low, high, begins, ends)
            self._descend(d, low, high, rows[order], edges, begins, ends, work)
            return True
        return False

    def _gaps_along(self, d: int, low: Ints, high: Ints, begins: Ints, ends: Ints) -> None:
        first = np.concatenate([low[d : d + 1], ends])
        last = np.concatenate([begins, high[d : d + 1]])
        for i in np.flatnonzero(last > first).tolist():
            corner, opposite = low.copy(), high.copy()
            corner[d], opposite[d] = first[i], last[i]
            self._gap(corner, opposite)

    def _descend(
        self,
        d: int,
        low: Ints,
        high: Ints,
        rows: Ints,
        edges: Ints,
        begins: Ints,
        ends: Ints,
        work: list[tuple[Ints, Ints, Ints]],
    ) -> None:
        """Queues the parts between planes, except those that one box fills entirely."""
        alone = edges[1:] - edges[:-1] == 1
        lone = rows[edges[:-1]]
        across = np.arange(len(low)) != d
        fills = ((self.low[lone] <= low) & (self.high[lone] >= high))[:, across].all(axis=1)
        for i in np.flatnonzero(~(alone & fills)).tolist():
            corner, opposite = low.copy(), high.copy()
            corner[d], opposite[d] = begins[i], ends[i]
            work.append((corner, opposite, rows[edges[i] : edges[i + 1]]))

    def _slice(
        self, low: Ints, high: Ints, rows: Ints, starts: Ints, stops: Ints, work: list[tuple[Ints, Ints, Ints]]
    ) -> None:
        """Cuts a region that no plane splits into slabs at every box's edge along one dimension."""
        edges = [np.unique(np.concatenate([starts[:, d], stops[:, d]])) for d in range(len(low))]
        cuttable = [d for d in range(len(low)) if len(edges[d]) > 2]
        if not cuttable:
            self._leaf(low, high, rows)
            return
        d = min(cuttable, key=lambda dimension: len(edges[dimension]))
        for begin, end in zip(edges[d][:-1], edges[d][1:], strict=True):
            corner, opposite = low.copy(), high.copy()
            corner[d], opposite[d] = begin, end
            work.append((corner, opposite, rows[(starts[:, d] < end) & (stops[:, d] > begin)]))

    def _leaf(self, low: Ints, high: Ints, rows: Ints) -> None:
        """Counts a region that every one of its boxes fills."""
        if len(rows) > 1:
            self.shared += math.prod((high - low).tolist())
            pair = (int(rows[0]), int(rows[1]))
            if pair not in self.overlapping and len(self.overlapping) < _PAIRS_SHOWN:
                self.overlapping.append(pair)

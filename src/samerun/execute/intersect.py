"""Where the boxes of two tilings meet, for all tensors at once, in time near-linear in the number of boxes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes of many tensors, as columns: `owner` `(boxes,)`, `offsets` and `sizes` `(boxes, ndim)` in elements."""

    owner: Ints
    offsets: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.owner)

    def rows(self, chosen: npt.NDArray[np.intp]) -> Boxes:
        """Returns some of the boxes."""
        return Boxes(self.owner[chosen], self.offsets[chosen], self.sizes[chosen])


def distinct_boxes(boxes: Boxes) -> npt.NDArray[np.intp]:
    """Returns the rows of boxes with values, of exact replicas (same owner, same place) the first, in order."""
    filled = np.flatnonzero((boxes.sizes > 0).all(axis=1))
    columns = np.concatenate([boxes.owner[filled, None], boxes.offsets[filled], boxes.sizes[filled]], axis=1)
    order = np.lexsort(columns.T[::-1])  # stable: of equal rows the first comes first
    ordered = columns[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.sort(filled[order[first]])


def intersect_boxes(left: Boxes, right: Boxes) -> tuple[Ints, Ints]:
    """Returns all pairs (row of `left`, row of `right`) of boxes of one owner that share at least one element.

    Pairs come in the order of `left`. Candidates are found along the dimension in which each owner's right boxes
    start at the most places; what does not meet in the other dimensions is then dropped.
    """
    if not len(left) or not len(right):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    owners = int(max(left.owner.max(), right.owner.max())) + 1
    dim = _cut_dims(right, owners)
    length = np.zeros(owners, np.int64)
    for boxes in (left, right):
        np.maximum.at(length, boxes.owner, _along(boxes.offsets + boxes.sizes, dim, boxes.owner) + 1)
    base = np.cumsum(length) - length
    start = base[right.owner] + _along(right.offsets, dim, right.owner)
    order = np.argsort(start, kind="stable")
    start = start[order]
    stop = np.maximum.accumulate(start + _along(right.sizes, dim, right.owner)[order])
    low = base[left.owner] + _along(left.offsets, dim, left.owner)
    first = np.searchsorted(stop, low, side="right")
    last = np.searchsorted(start, low + _along(left.sizes, dim, left.owner), side="left")
    count = np.maximum(last - first, 0)
    parts: list[tuple[Ints, Ints]] = []
    for rows in _blocks(count):
        a = np.repeat(rows, count[rows])
        within = np.arange(len(a)) - np.repeat(np.cumsum(count[rows]) - count[rows], count[rows])
        b = order[first[a] + within]
        meet = left.owner[a] == right.owner[b]
        meet &= (left.offsets[a] < right.offsets[b] + right.sizes[b]).all(axis=1)
        meet &= (right.offsets[b] < left.offsets[a] + left.sizes[a]).all(axis=1)
        parts.append((a[meet], b[meet]))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _along(columns: Ints, dim: Ints, owner: Ints) -> Ints:
    return np.take_along_axis(columns, dim[owner, None], axis=1)[:, 0]


def _cut_dims(boxes: Boxes, owners: int) -> Ints:
    """Returns, per owner, the dimension along which its boxes have the most distinct offsets."""
    distinct = np.zeros((boxes.offsets.shape[1], owners), np.int64)
    span = int(boxes.offsets.max()) + 1
    for d in range(len(distinct)):
        found = np.unique(boxes.owner * span + boxes.offsets[:, d]) // span
        distinct[d] = np.bincount(found, minlength=owners)
    return np.argmax(distinct, axis=0).astype(np.int64)


def _blocks(count: Ints) -> list[Ints]:
    """Cuts rows into blocks whose candidate pairs fit into memory."""
    if not len(count):
        return [np.zeros(0, np.int64)]
    number = (np.cumsum(count) - count) // _PAIRS_AT_ONCE
    edges = np.flatnonzero(np.diff(number)) + 1
    return [rows.astype(np.int64) for rows in np.split(np.arange(len(count)), edges)]

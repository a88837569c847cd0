"""The pieces of a tensor as rectangles: who holds which box, what nobody holds, what several hold. Pure.

A tensor is drawn along two of its dimensions, those along which it is cut; of what else there is every rectangle is the
projection. What is covered is counted on the grid that the edges of all boxes make, in values, so that a gap is drawn
exactly where it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.state import TensorEntry
from samerun.errors import SamerunError

MAX_PIECES = 2_000
"""Pieces that are drawn and listed."""
MAX_EDGES = 400
"""Edges along a dimension up to which gaps are drawn."""
MAX_SPOTS = 200
"""Gaps, and overlaps, that are drawn one by one."""

Ints = npt.NDArray[np.int64]
Span = tuple[int, int]
_RANKS = (
    re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)"),
    re.compile(r"mp_rank_(?P<mp>\d+)(?:_(?P<pp>\d+))?"),
    re.compile(r"^__(?P<rank>\d+)_\d+\.distcp$"),
    re.compile(r"rank[_-]?(?P<rank>\d+)"),
)


@dataclass(frozen=True, slots=True)
class PieceFacts:
    """One piece: whose it is, in which file and where, its box, and why it cannot be read, if it cannot."""

    number: int
    holder: str
    file: str
    offset_bytes: int | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Spot:
    """A rectangle of the picture: rows and columns, half-open, in elements of the drawn dimensions."""

    rows: Span
    columns: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A tensor, drawn. `dims` are the drawn dimensions; the first is downwards. A vector has only the second.

    `exact` is false where the tensor is cut along more dimensions than are drawn, or into more parts than are counted:
    gaps are then counted but not drawn.
    """

    shape: tuple[int, ...]
    dims: tuple[int | None, int | None]
    extent: tuple[int, int]
    pieces: tuple[PieceFacts, ...]
    left_out: int
    spots: tuple[Spot, ...]
    gaps: tuple[Spot, ...]
    overlaps: tuple[Spot, ...]
    missing_elements: int | None
    shared_elements: int | None
    exact: bool


def holder_of(file: str) -> str:
    """Returns which rank wrote a file, by its name; the file's name where that does not say.

    >>> holder_of("__3_0.distcp"), holder_of("bf16_zero_pp_rank_1_mp_rank_02_optim_states.pt"), holder_of("model.pt")
    ('rank 3', 'dp 1, mp 2', 'model.pt')
    """
    for pattern in _RANKS:
        if found := pattern.search(file):
            return ", ".join(f"{name} {int(number)}" for name, number in found.groupdict().items() if number)
    return file


def draw_tensor(entry: TensorEntry, locate: Callable[[int], Any], missing: int | None, shared: int | None) -> Picture:
    """Returns the picture of a tensor.

    Args:
        entry: the tensor.
        locate: returns the extent of a piece (`Checkpoint.locate`).
        missing: values in no piece, as counted by `samerun.core.box`; None if they could not be counted.
        shared: values in several pieces that are not replicas.
    """
    count = min(len(entry.tiling), MAX_PIECES)
    dims = choose_dims(entry)
    pieces = tuple(_facts(entry, number, locate) for number in range(count))
    gaps, overlaps, exact = _uncovered(entry, dims)
    return Picture(
        shape=entry.shape,
        dims=dims,
        extent=(_length(entry, dims[0]), _length(entry, dims[1])),
        pieces=pieces,
        left_out=len(entry.tiling) - count,
        spots=tuple(Spot(_span(piece, dims[0]), _span(piece, dims[1])) for piece in pieces),
        gaps=tuple(gaps[:MAX_SPOTS]),
        overlaps=tuple(overlaps[:MAX_SPOTS]),
        missing_elements=missing,
        shared_elements=shared,
        exact=exact,
    )


def choose_dims(entry: TensorEntry) -> tuple[int | None, int | None]:
    """Returns the two dimensions to draw, in order: those that are cut before those that are not."""
    ndim = len(entry.shape)
    if ndim < 2:
        return None, 0 if ndim else None
    cut = _cut_dims(entry)
    chosen = sorted([*cut, *(d for d in range(ndim) if d not in cut)][:2])
    return chosen[0], chosen[1]


def _cut_dims(entry: TensorEntry) -> list[int]:
    whole = (entry.tiling.offsets == 0) & (entry.tiling.sizes == np.array(entry.shape, np.int64))
    return [d for d in range(len(entry.shape)) if not bool(whole[:, d].all())]


def _facts(entry: TensorEntry, number: int, locate: Callable[[int], Any]) -> PieceFacts:
    offsets = tuple(entry.tiling.offsets[number].tolist())
    sizes = tuple(entry.tiling.sizes[number].tolist())
    try:
        extent = locate(number)
    except SamerunError as error:
        if error.problems[0].code == "SR-USAGE-PIECE":  # a number kept inside an object: whole, but in no place
            return PieceFacts(number, "in an object", "", None, offsets, sizes)
        return PieceFacts(number, "unreadable", "", None, offsets, sizes, error.problems[0].message)
    return PieceFacts(number, holder_of(extent.file.name), extent.file.name, extent.offset_bytes, offsets, sizes)


def _length(entry: TensorEntry, dim: int | None) -> int:
    return 1 if dim is None else entry.shape[dim]


def _span(piece: PieceFacts, dim: int | None) -> Span:
    return (0, 1) if dim is None else (piece.offsets[dim], piece.offsets[dim] + piece.sizes[dim])


def _uncovered(entry: TensorEntry, dims: tuple[int | None, int | None]) -> tuple[list[Spot], list[Spot], bool]:
    """Returns (gaps, overlaps, exact) on the grid of all edges. Replicas count once."""
    drawn = [d for d in dims if d is not None]
    if not drawn or any(d not in drawn for d in _cut_dims(entry)) or math.prod(entry.shape) == 0:
        exact = not any(d not in drawn for d in _cut_dims(entry))
        gap = exact and len(entry.tiling) == 0 and math.prod(entry.shape) > 0
        return ([Spot((0, _length(entry, dims[0])), (0, _length(entry, dims[1])))] if gap else []), [], exact
    spans = [_spans(entry, dim) for dim in dims]
    filled = (entry.tiling.sizes > 0).all(axis=1)
    boxes = np.unique(np.concatenate([spans[0][filled], spans[1][filled]], axis=1), axis=0)
    edges = [_edges(boxes[:, 2 * axis : 2 * axis + 2], _length(entry, dim)) for axis, dim in enumerate(dims)]
    if max(len(edge) for edge in edges) > MAX_EDGES:
        return [], [], False
    covered = np.zeros((len(edges[0]) - 1, len(edges[1]) - 1), np.int64)
    for first, last, left, right in boxes.tolist():
        rows = slice(*np.searchsorted(edges[0], (first, last)))
        columns = slice(*np.searchsorted(edges[1], (left, right)))
        covered[rows, columns] += 1
    return _rectangles(covered == 0, edges), _rectangles(covered > 1, edges), True


def _spans(entry: TensorEntry, dim: int | None) -> Ints:
    """Returns (first, end) of every box along a dimension, kept inside the tensor."""
    if dim is None:
        return np.tile(np.array([[0, 1]], np.int64), (len(entry.tiling), 1))
    first = entry.tiling.offsets[:, dim]
    ends = np.stack([first, first + entry.tiling.sizes[:, dim]], axis=1)
    return np.clip(ends, 0, entry.shape[dim])


def _edges(spans: Ints, length: int) -> Ints:
    return np.unique(np.concatenate([spans.reshape(-1), np.array([0, length], np.int64)]))


def _rectangles(marked: npt.NDArray[np.bool_], edges: Sequence[Ints]) -> list[Spot]:
    """Returns the marked cells as few rectangles: runs along a row, joined with equal runs of the rows below."""
    spots: list[Spot] = []
    growing: dict[Span, int] = {}
    for row in range(marked.shape[0] + 1):
        runs = _runs(marked[row]) if row < marked.shape[0] else []
        for run in [run for run in growing if run not in runs]:
            first = growing.pop(run)
            spots.append(
                Spot(
                    (int(edges[0][first]), int(edges[0][row])),
                    (int(edges[1][run[0]]), int(edges[1][run[1]])),
                )
            )
        for run in runs:
            growing.setdefault(run, row)
    return sorted(spots, key=lambda spot: (spot.rows, spot.columns))


def _runs(line: npt.NDArray[np.bool_]) -> list[Span]:
    padded = np.concatenate([[False], line, [False]])
    changes = np.flatnonzero(padded[1:] != padded[:-1])
    return [(int(first), int(last)) for first, last in zip(changes[::2], changes[1::2], strict=True)]

"""Collecting the pieces of tensors from many files: one copy becomes the tensor, others are kept for comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from samerun.core.dtype import DType
from samerun.core.flat import Part, row_major_strides, run_parts
from samerun.core.state import TensorEntry, TensorKey, Tiling
from samerun.errors import Problem
from samerun.formats.base import Extent
from samerun.formats.deepspeed.slices import Slice
from samerun.formats.placement import Piece, Placement, place

Copy = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Another copy of (a part of) a tensor, to be compared with the tensor itself. `label` says whose it is."""

    key: str
    placement: Placement
    label: str


def parts_of_run(shape: Sequence[int], cut: Slice, first: int, count: int) -> tuple[Part, ...]:
    """Returns where elements `first` to `first + count` of a rank's tensor of this shape lie in the whole tensor.

    Starts count from the rank's element `first`.
    """
    return tuple(run_parts(shape, cut.blocks, first, count))


def pieces_of_run(
    buffer: Extent, start: int, shape: Sequence[int], cut: Slice, parts: Iterable[Part], slot: str | None
) -> list[Piece]:
    """Returns the pieces of a run that begins at element `start` of a flat buffer."""
    strides = row_major_strides(shape)
    return [
        Piece(buffer, part.offsets, part.sizes, start + part.start, strides, cut.divisor(part.block, slot))
        for part in parts
    ]


def pieces_of_tensor(buffer: Extent, cut: Slice) -> list[Piece]:
    """Returns the pieces of a tensor that a rank holds as such, with strides of its own."""
    return [
        Piece(
            buffer,
            block.target,
            block.sizes,
            sum(map(int.__mul__, block.source, buffer.strides)),
            buffer.strides,
            cut.divisor(number, None),
        )
        for number, block in enumerate(cut.blocks)
        if block.num_elements
    ]


@dataclass(slots=True)
class _Gathered:
    key: TensorKey
    original: str
    dtype: DType
    shape: tuple[int, ...]
    copies: dict[Copy, list[Piece]]


class Gatherer:
    """Pieces by key and copy. `finish` picks, for each key, the copy with the most values; the first of equals."""

    def __init__(self) -> None:
        self._found: dict[str, _Gathered] = {}
        self.problems: list[Problem] = []

    def __contains__(self, key: TensorKey) -> bool:
        return str(key) in self._found

    def add(
        self, key: TensorKey, original: str, dtype: DType, shape: tuple[int, ...], copy: Copy, pieces: Iterable[Piece]
    ) -> None:
        """Adds pieces of one copy of a tensor. One in another shape or type than the first is left out, a finding."""
        text = str(key)
        held = self._found.setdefault(text, _Gathered(key, original, dtype, shape, {}))
        added = list(pieces)
        if (held.dtype, held.shape) == (dtype, shape):
            held.copies.setdefault(copy, []).extend(added)
        elif not any(problem.where.get("tensor") == text for problem in self.problems):
            self.problems.append(_differs(text, held, dtype, shape, added))

    def finish(
        self, aliases: dict[str, tuple[str, ...]]
    ) -> tuple[dict[str, TensorEntry], dict[str, Placement], list[Replica]]:
        """Returns the tensors, where they lie, and their other copies. `aliases` are tied names by owner."""
        tensors: dict[str, TensorEntry] = {}
        placements: dict[str, Placement] = {}
        replicas: list[Replica] = []
        for text, held in self._found.items():
            chosen = max(held.copies, key=lambda copy: (_elements(held.copies[copy]), [-part for part in copy]))
            placements[text] = place(held.copies[chosen], len(held.shape))
            tensors[text] = TensorEntry(
                held.key,
                held.shape,
                held.dtype,
                placements[text].tiling,
                held.original,
                aliases.get(held.key.fqn, ()) if held.key.slot is None else (),
            )
            replicas += [
                Replica(text, place(pieces, len(held.shape)), _label(pieces))
                for copy, pieces in held.copies.items()
                if copy != chosen and pieces
            ]
        return tensors, placements, replicas


def _elements(pieces: Sequence[Piece]) -> int:
    return sum(math.prod(piece.sizes) for piece in pieces)


def _label(pieces: Sequence[Piece]) -> str:
    names = sorted({piece.buffer.file.name for piece in pieces})
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _differs(key: str, held: _Gathered, dtype: DType, shape: tuple[int, ...], added: Sequence[Piece]) -> Problem:
    where = {"tensor": key}
    if added:
        where["file"] = str(added[0].buffer.file)
    return Problem(
        "SR-ZERO-LAYOUT",
        "ranks hold this tensor in different shapes or types",
        where=where,
        expected=f"{held.dtype.name} {list(held.shape)}",
        found=f"{dtype.name} {list(shape)}",
        hint="files of different saves lie in one directory, or of different models; restore the whole directory",
    )


def scalar_tiling() -> Tiling:
    """Returns the tiling of a number."""
    return Tiling.whole(())

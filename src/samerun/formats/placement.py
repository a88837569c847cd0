"""Tensors whose pieces lie anywhere inside larger tensors of files, and a checkpoint made of them.

For formats that keep flat or concatenated buffers: a piece is a box of the logical tensor and a strided view of a
buffer. Readers build one `Placement` per tensor and hand them to `PlacedCheckpoint`, which reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DType
from samerun.core.state import LogicalState, Tiling
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.formats.base import Array, Extent, assemble_box, numpy_dtype, require_key, view_extent
from samerun.stores.local import MappedFiles

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a logical tensor, and where its values begin in a buffer: element and strides, in elements.

    `divisor` is what the stored values must be divided by to be the logical ones.
    """

    buffer: Extent
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    divisor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a tensor's pieces lie, as columns: row i belongs to piece i of the tensor's tiling.

    `cast` is the element type in which values are handed out, where that is not the stored one.
    """

    tiling: Tiling
    buffers: tuple[Extent, ...]
    buffer: Ints
    start: Ints
    strides: Ints
    divisors: tuple[float, ...] = ()
    cast: DType | None = None

    def extent(self, piece: int) -> Extent:
        """Returns where the stored values of a piece lie."""
        whole = self.buffers[int(self.buffer[piece])]
        return replace(
            whole,
            offset_bytes=whole.offset_bytes + int(self.start[piece]) * whole.dtype.num_bytes,
            shape=tuple(self.tiling.sizes[piece].tolist()),
            strides=tuple(self.strides[piece].tolist()),
            divisor=self.divisors[piece] if self.divisors else 1.0,
        )

    def view(
        self, piece: int, files: MappedFiles, part: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    ) -> Array:
        """Returns the values of a piece, or of the box `part` (offsets, sizes) in it.

        They are a view of the file unless they are cast or rescaled.
        """
        extent = self.extent(piece)
        if part is not None:
            first = sum(offset * stride for offset, stride in zip(part[0], extent.strides, strict=True))
            at = extent.offset_bytes + first * extent.dtype.num_bytes
            extent = replace(extent, offset_bytes=at, shape=part[1])
        values = view_extent(files, extent)
        if self.divisors and self.divisors[piece] != 1.0:
            values = (values / np.asarray(self.divisors[piece], values.dtype)).astype(values.dtype)
        if self.cast is None:
            return values
        with np.errstate(all="ignore"):
            return values.astype(numpy_dtype(self.cast))


def place(pieces: Sequence[Piece], ndim: int, cast: DType | None = None) -> Placement:
    """Builds the columns from pieces, sharing buffers that come more than once."""
    buffers: dict[tuple[Path, int], int] = {}
    kept: list[Extent] = []
    numbers: list[int] = []
    for piece in pieces:
        identity = (piece.buffer.file, piece.buffer.offset_bytes)
        if identity not in buffers:
            buffers[identity] = len(kept)
            kept.append(piece.buffer)
        numbers.append(buffers[identity])
    count = len(pieces)
    tiling = Tiling(
        np.array([piece.offsets for piece in pieces], np.int64).reshape(count, ndim),
        np.array([piece.sizes for piece in pieces], np.int64).reshape(count, ndim),
    )
    scaled = any(piece.divisor != 1.0 for piece in pieces)
    return Placement(
        tiling,
        tuple(kept),
        np.array(numbers, np.int64),
        np.array([piece.start for piece in pieces], np.int64),
        np.array([piece.strides for piece in pieces], np.int64).reshape(count, ndim),
        tuple(piece.divisor for piece in pieces) if scaled else (),
        cast,
    )


def place_whole(extent: Extent, cast: DType | None = None) -> Placement:
    """Returns the placement of a tensor that lies in one piece."""
    origin = (0,) * len(extent.shape)
    return place([Piece(extent, origin, extent.shape, 0, extent.strides)], len(extent.shape), cast)


class PlacedCheckpoint:
    """A checkpoint whose tensors are placements, or plain numbers. See `samerun.formats.base.Checkpoint`."""

    def __init__(
        self,
        path: Path,
        state: LogicalState,
        placements: Mapping[str, Placement],
        constants: Mapping[str, int | float],
        files: MappedFiles,
    ) -> None:
        self.path = path
        self.state = state
        self._placements = placements
        self._constants = constants
        self._files = files

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the stored bytes of a piece lie. Their type is not the tensor's where values are cast.

        Raises:
            UsageError: for an unknown key or piece.
            CorruptCheckpoint: if the value is a number kept inside an object.
        """
        entry = require_key(self.state, key)
        if not 0 <= piece < len(entry.tiling):
            raise UsageError(Problem("SR-USAGE-PIECE", f"{key} has {len(entry.tiling)} pieces, none is number {piece}"))
        placement = self._placements.get(key)
        if placement is None:
            raise CorruptCheckpoint(
                Problem("SR-USAGE-PIECE", f"{key} is a number kept inside an object, not in a file")
            )
        return placement.extent(piece)

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece. See `Checkpoint.read_piece`."""
        constant = self._constants.get(key)
        if constant is not None:
            return np.asarray(constant, numpy_dtype(require_key(self.state, key).dtype))
        self.locate(key, piece)
        return self._placements[key].view(piece, self._files)

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor. See `Checkpoint.read`."""
        entry = require_key(self.state, key)
        placement = self._placements.get(key)
        if placement is None or key in self._constants:
            return assemble_box(entry, lambda piece: self.read_piece(key, piece), offsets, sizes)
        return assemble_box(
            entry,
            lambda piece: placement.view(piece, self._files),
            offsets,
            sizes,
            read_part=lambda piece, first, count: placement.view(piece, self._files, (first, count)),
        )

    def close(self) -> None:
        """Releases the files."""
        self._files.close()

"""A tensor of a saved state dict: its global shape, the boxes that tile it, and where each box's bytes lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samerun.core.dtype import DType
from samerun.core.state import Role, TensorEntry, TensorKey, Tiling
from samerun.errors import FormatError
from samerun.formats.base import Array, Checkpoint, Extent, assemble_box, view_extent
from samerun.stores.local import MappedFiles


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """One tensor. `extents[i]` holds the values of box i of `tiling`; a tensor that cannot be read has no boxes.

    A tensor that a checkpoint inside this one holds has no extents of its own but `inner`: that checkpoint, and the key
    there.
    """

    shape: tuple[int, ...]
    dtype: DType
    tiling: Tiling
    extents: tuple[Extent, ...]
    inner: tuple[Checkpoint, str] | None = None

    @property
    def num_elements(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Global number of bytes, replicas counted once."""
        return self.num_elements * self.dtype.num_bytes

    def extent(self, piece: int) -> Extent:
        """Returns where the bytes of box `piece` lie.

        Raises:
            CorruptCheckpoint: if a checkpoint inside this one does not hold them as it says.
        """
        if self.inner is not None:
            return self.inner[0].locate(self.inner[1], piece)
        return self.extents[piece]

    def view(self, piece: int, files: MappedFiles) -> Array:
        """Returns the values of box `piece`. Raises as `extent` does, or if the file is too short."""
        if self.inner is not None:
            return self.inner[0].read_piece(self.inner[1], piece)
        return view_extent(files, self.extents[piece])

    @property
    def whole(self) -> bool:
        """Whether one extent holds the whole tensor."""
        return len(self.extents) == 1 and self.extents[0].shape == self.shape


def store_whole(extent: Extent) -> Stored:
    """Returns the tensor that lies at one extent."""
    return Stored(extent.shape, extent.dtype, Tiling.whole(extent.shape), (extent,))


def store_boxes(
    shape: tuple[int, ...], dtype: DType, boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...], Extent]]
) -> Stored:
    """Returns the tensor of this global shape whose parts (offsets, sizes, extent) lie where they say."""
    count, ndim = len(boxes), len(shape)
    return Stored(
        shape,
        dtype,
        Tiling(
            np.array([box[0] for box in boxes], np.int64).reshape(count, ndim),
            np.array([box[1] for box in boxes], np.int64).reshape(count, ndim),
        ),
        tuple(box[2] for box in boxes),
    )


def store_nothing(shape: tuple[int, ...], dtype: DType) -> Stored:
    """Returns a tensor that is known but lies nowhere: its file is missing or damaged."""
    return store_boxes(shape, dtype, ())


def read_stored(stored: Stored, files: MappedFiles) -> Array:
    """Reads a whole tensor.

    Raises:
        CorruptCheckpoint: if part of it lies nowhere or cannot be read.
    """
    entry = TensorEntry(TensorKey(Role.BUFFER, "tensor"), stored.shape, stored.dtype, stored.tiling, "tensor")
    return assemble_box(entry, lambda piece: stored.view(piece, files))


def place_of(stored: Stored) -> tuple[object, ...] | None:
    """Returns what two names of one and the same stored tensor have in common, None for one that lies nowhere."""
    if not stored.extents or stored.num_elements == 0:
        return None
    return (
        stored.shape,
        stored.dtype.name,
        tuple((extent.file, extent.offset_bytes, extent.shape, extent.strides) for extent in stored.extents),
    )


def checksum_of(stored: Stored) -> tuple[object, ...] | None:
    """Returns the recorded checksums of a tensor's boxes in order of place; None unless each has its storage alone."""
    parts: list[object] = []
    count = len(stored.tiling)
    order = np.lexsort(stored.tiling.offsets.T[::-1]).tolist() if stored.shape else range(count)
    for box in order:
        if not bool((stored.tiling.sizes[box] > 0).all()):
            continue
        try:
            extent = stored.extent(box)
        except FormatError:
            return None
        if extent.crc32 is None or not extent.contiguous or extent.storage_bytes != extent.num_bytes:
            return None
        parts.append((tuple(stored.tiling.offsets[box].tolist()), extent.shape, extent.crc32))
    return (stored.shape, stored.dtype.name, tuple(parts)) if parts else None

"""Plans a conversion: the boxes of the destination met with the pieces of the source, all tensors at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DTYPES, DType
from samerun.core.state import TensorEntry
from samerun.core.written import DestinationPlan
from samerun.errors import CorruptCheckpoint
from samerun.execute.intersect import Boxes, distinct_boxes, intersect_boxes
from samerun.execute.plan import DTYPE_INDEX, MADE, ConversionPlan, Copies, Slots
from samerun.formats.base import Checkpoint, Extent

Ints = npt.NDArray[np.int64]

DEFAULT_BUDGET_BYTES = 48 << 20


def plan_conversion(
    destination: DestinationPlan,
    checkpoint: Checkpoint,
    source_fingerprint: str,
    *,
    embedded: Collection[str] = (),
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    trust_checksums: bool = False,
) -> ConversionPlan:
    """Returns which source bytes go where. Reads the source's structure, none of its tensors.

    Of replicas in the source one is read. Values that lie in no file as they are wanted (numbers kept inside objects)
    become copies from `MADE`. Tensors of the destination that the state lacks are left without copies, which
    `check_plan` reports.

    Args:
        destination: the writer's layout of the destination.
        checkpoint: the opened source.
        source_fingerprint: the digest of the source tree.
        embedded: keys whose values the writer put into literals.
        budget_bytes: the memory that copying may use, which the plan's estimate is made from.
        trust_checksums: whether the checksums that the source records were just compared with its bytes; those of the
            destination are then made from them, where they are of the same bytes.
    """
    tensors = destination.tensors
    ndim = max([1, *(slots.offsets.shape[1] for slots in tensors)])
    entries = [checkpoint.state.tensors.get(slots.key) for slots in tensors]
    ndim = max([ndim, *(len(entry.shape) for entry in entries if entry is not None)])
    slots = _slot_columns(destination, ndim)
    copies, sources = _plan_copies(checkpoint, destination, slots, entries, ndim, trust=trust_checksums)
    return ConversionPlan(
        destination=destination,
        keys=tuple(slots.key for slots in tensors),
        shapes=tuple(
            entry.shape if entry is not None else (-1,) * item.offsets.shape[1]
            for item, entry in zip(tensors, entries, strict=True)
        ),
        dtypes=tuple(slots.dtype for slots in tensors),
        sources=sources,
        source_fingerprint=source_fingerprint,
        slots=slots,
        copies=copies,
        embedded=frozenset(embedded),
        peak_memory_bytes=min(budget_bytes, 3 * destination.num_bytes) + _plan_bytes(slots, copies),
        problems=destination.problems,
    )


def _plan_bytes(slots: Slots, copies: Copies) -> int:
    columns = [getattr(part, name) for part in (slots, copies) for name in part.__slots__]
    return sum(int(column.nbytes) for column in columns)


def _aligned(columns: Ints, ndim: int, fill: int) -> Ints:
    """Returns `(rows, ndim)` columns with the given ones at the right."""
    wide = np.full((len(columns), ndim), fill, np.int64)
    if columns.shape[1]:
        wide[:, -columns.shape[1] :] = columns
    return wide


def _slot_columns(destination: DestinationPlan, ndim: int) -> Slots:
    tensors = destination.tensors
    counts = [len(slots) for slots in tensors]
    itemsize = np.array([slots.dtype.num_bytes for slots in tensors], np.int64)
    tensor = np.repeat(np.arange(len(tensors), dtype=np.int64), counts)

    def join(parts: list[Ints]) -> Ints:
        return np.concatenate(parts) if parts else np.zeros((0, ndim), np.int64)

    return Slots(
        tensor,
        np.concatenate([np.zeros(0, np.int64), *(slots.file for slots in tensors)]),
        np.concatenate([np.zeros(0, np.int64), *(slots.at for slots in tensors)]),
        join([_aligned(slots.offsets, ndim, 0) for slots in tensors]),
        join([_aligned(slots.sizes, ndim, 1) for slots in tensors]),
        itemsize[tensor] if len(tensors) else np.zeros(0, np.int64),
    )


@dataclass(slots=True)
class _Located:
    """What is known of the pieces that are needed, as lists that become columns."""

    sources: dict[str, int] = field(default_factory=dict[str, int])
    source: list[int] = field(default_factory=list[int])
    offset: list[int] = field(default_factory=list[int])
    strides: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    stored: list[int] = field(default_factory=list[int])
    swapped: list[bool] = field(default_factory=list[bool])
    divisor: list[float] = field(default_factory=list[float])
    crc: list[int] = field(default_factory=list[int])

    def add(self, extent: Extent | None, dtype: DType, ndim: int) -> None:
        if extent is None:
            self._append(MADE, 0, (0,) * ndim, dtype, False, 1.0, None)
            return
        number = self.sources.setdefault(str(extent.file), len(self.sources))
        strides = tuple(stride * extent.dtype.num_bytes for stride in extent.strides)
        padded = (0,) * (ndim - len(strides)) + strides
        swapped = extent.big_endian and extent.dtype.num_bytes > 1
        alone = extent.contiguous and extent.storage_bytes == extent.num_bytes
        crc = extent.crc32 if alone and extent.storage_offset_bytes == extent.offset_bytes else None
        self._append(number, extent.offset_bytes, padded, extent.dtype, swapped, extent.divisor, crc)

    def _append(
        self,
        source: int,
        offset: int,
        strides: tuple[int, ...],
        dtype: DType,
        swapped: bool,
        divisor: float,
        crc: int | None,
    ) -> None:
        self.source.append(source)
        self.offset.append(offset)
        self.strides.append(strides)
        self.stored.append(DTYPE_INDEX[dtype.name])
        self.swapped.append(swapped)
        self.divisor.append(divisor)
        self.crc.append(-1 if crc is None else crc)


def _plan_copies(
    checkpoint: Checkpoint,
    destination: DestinationPlan,
    slots: Slots,
    entries: list[TensorEntry | None],
    ndim: int,
    *,
    trust: bool,
) -> tuple[Copies, tuple[str, ...]]:
    numbers = [number for number, entry in enumerate(entries) if entry is not None and len(entry.tiling)]
    held = [entry for entry in entries if entry is not None and len(entry.tiling)]
    counts = [len(entry.tiling) for entry in held]
    pieces = Boxes(
        np.repeat(np.array(numbers, np.int64), counts),
        np.concatenate([np.zeros((0, ndim), np.int64), *(_aligned(e.tiling.offsets, ndim, 0) for e in held)]),
        np.concatenate([np.zeros((0, ndim), np.int64), *(_aligned(e.tiling.sizes, ndim, 1) for e in held)]),
    )
    piece_number = np.concatenate([np.zeros(0, np.int64), *(np.arange(count, dtype=np.int64) for count in counts)])
    unique = distinct_boxes(pieces)
    pieces, piece_number = pieces.rows(unique), piece_number[unique]
    filled = np.flatnonzero((slots.sizes > 0).all(axis=1))
    wanted = Boxes(slots.tensor[filled], slots.offsets[filled], slots.sizes[filled])
    slot, piece = intersect_boxes(wanted, pieces)
    slot = filled[slot]
    needed, row = np.unique(piece, return_inverse=True)
    located = _locate(checkpoint, destination, entries, pieces.owner[needed], piece_number[needed], ndim)
    low = np.maximum(slots.offsets[slot], pieces.offsets[piece])
    high = np.minimum(slots.offsets[slot] + slots.sizes[slot], pieces.offsets[piece] + pieces.sizes[piece])
    whole = (high - low == pieces.sizes[piece]).all(axis=1) & trust
    strides = np.array(located.strides, np.int64).reshape(len(needed), ndim)[row]
    copies = Copies(
        slot.astype(np.int64),
        np.array(located.source, np.int64)[row],
        np.array(located.offset, np.int64)[row] + ((low - pieces.offsets[piece]) * strides).sum(axis=1),
        strides,
        low - slots.offsets[slot],
        high - low,
        np.array(located.stored, np.int64)[row],
        np.array(located.swapped, np.bool_)[row],
        np.array(located.divisor, np.float64)[row],
        np.where(whole, np.array(located.crc, np.int64)[row], -1),
    )
    return copies, tuple(located.sources)


def _locate(
    checkpoint: Checkpoint,
    destination: DestinationPlan,
    entries: list[TensorEntry | None],
    tensors: Ints,
    pieces: Ints,
    ndim: int,
) -> _Located:
    located = _Located()
    for tensor, piece in zip(tensors.tolist(), pieces.tolist(), strict=True):
        entry = entries[tensor]
        if entry is None:
            continue
        slots = destination.tensors[tensor]
        located.add(_extent(checkpoint, slots.key, piece, entry, slots.dtype), entry.dtype, ndim)
    return located


def _extent(checkpoint: Checkpoint, key: str, piece: int, entry: TensorEntry, written: DType) -> Extent | None:
    """Returns where a piece's values lie, None where the reader has to make them.

    A reader that casts what is stored, for a writer that casts again, makes them too: rounding twice is not rounding
    once, and the copy knows of one cast only.
    """
    try:
        extent = checkpoint.locate(key, piece)
    except CorruptCheckpoint:
        return None
    if extent.dtype.name not in DTYPES or (entry.dtype != extent.dtype and written != entry.dtype):
        return None
    return extent

"""Fingerprints of tensors without reading them: the checksums that zip containers record, put together.

torch writes a CRC-32 of every storage and never compares it. Where a tensor is cut along its first dimension only, and
each storage holds nothing else, the checksum of the whole tensor follows: the same number whatever the number of ranks.
Cut otherwise, the checksums of the pieces with their boxes are a fingerprint that only the same cut can be compared by.
"""

from __future__ import annotations

import numpy as np

from samerun.core.crc import combine_crc32
from samerun.core.state import TensorEntry
from samerun.errors import FormatError, UsageError
from samerun.formats.base import Checkpoint, Extent
from samerun.verify.state.digest import unique_pieces

MAX_PIECES = 65_536


def fingerprint_tensor(checkpoint: Checkpoint, key: str) -> str | None:
    """Returns `crc32:<8 hex digits>` for a whole tensor, `pieces:...` for one cut otherwise, None if none is recorded.

    Reads directories of archives only. The recorded checksums may be wrong: `--deep` compares them with the bytes.
    """
    entry = checkpoint.state.tensors[key]
    pieces = unique_pieces(entry)
    if not pieces or len(pieces) > MAX_PIECES or entry.num_elements == 0:
        return None
    parts: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    for piece in pieces:
        found = _recorded(checkpoint, key, piece)
        if found is None:
            return None
        parts.append((*_box(entry, piece), found))
    parts.sort()
    return _whole(entry, parts) or "pieces:" + ",".join(f"{offsets}{sizes}{crc:08x}" for offsets, sizes, crc in parts)


def _recorded(checkpoint: Checkpoint, key: str, piece: int) -> int | None:
    try:
        extent = checkpoint.locate(key, piece)
    except (FormatError, UsageError, OSError):
        return None
    return extent.crc32 if _alone(extent) else None


def _alone(extent: Extent) -> bool:
    """Whether a storage holds the piece's values in order and nothing else."""
    return (
        extent.contiguous
        and not extent.big_endian
        and extent.storage_offset_bytes == extent.offset_bytes
        and extent.storage_bytes == extent.num_bytes
    )


def _box(entry: TensorEntry, piece: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(entry.tiling.offsets[piece].tolist()), tuple(entry.tiling.sizes[piece].tolist())


def _whole(entry: TensorEntry, parts: list[tuple[tuple[int, ...], tuple[int, ...], int]]) -> str | None:
    """Returns the fingerprint of the whole tensor if the parts are its rows, one after the other."""
    total, row = 0, 0
    width = entry.dtype.num_bytes
    for offsets, sizes, crc in parts:
        if entry.shape and (offsets[0] != row or sizes[1:] != entry.shape[1:] or any(offsets[1:])):
            return None
        total = combine_crc32(total, crc, int(np.prod(sizes, dtype=np.int64)) * width)
        row += sizes[0] if sizes else 0
    return f"crc32:{total:08x}" if not entry.shape or row == entry.shape[0] else None

"""Opens a DCP directory as logical state: model, optimizer, groups and the rest, and reads its values."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from samerun.core.state import LogicalState
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.formats.base import Array, Extent, PayloadCheck, assemble_box, numpy_dtype, require_key, view_extent
from samerun.formats.dcp.assemble import Assembled, assemble_state
from samerun.formats.dcp.evidence import check_items, check_payloads
from samerun.formats.dcp.files import RANK_METADATA
from samerun.formats.dcp.index import merge_indexes, read_index
from samerun.formats.dcp.items import Items
from samerun.stores.local import MappedFiles
from samerun.stores.remote import Buffer, RemoteFile

_MAX_METADATA_BYTES = 16 << 30  # about 200 bytes per chunk: 80 million chunks


def metadata_files(root: Path) -> tuple[Path, ...]:
    """Returns the metadata of a DCP directory: `.metadata`, or every rank's own; empty if it is none."""
    whole = root / ".metadata"
    if os.path.lexists(whole):
        return (whole,)
    found = [(int(match.group(1)), name) for name in os.listdir(root) if (match := RANK_METADATA.match(name))]
    return tuple(root / name for _, name in sorted(found))


def open_dcp(path: Path) -> DcpCheckpoint:
    """Opens a DCP directory. Reads metadata and small objects; tensors stay on disk.

    Raises:
        CorruptCheckpoint: if the metadata cannot be used at all. Anything less is a finding of the state.
    """
    maps = MappedFiles()
    metadata = metadata_files(path)
    for file in metadata:
        _check_size(file)
    index = merge_indexes([(file, read_index(_whole(maps.map(file)), file)) for file in metadata])
    return DcpCheckpoint(path, assemble_state(path, index, metadata, maps), maps)


def _whole(buffer: Buffer) -> mmap.mmap | bytes:
    return bytes(buffer) if isinstance(buffer, RemoteFile) else buffer


def _check_size(file: Path) -> None:
    size = os.stat(file).st_size
    if size > _MAX_METADATA_BYTES:
        raise CorruptCheckpoint(
            Problem(
                "SR-PKL-HOSTILE",
                f"the metadata is {size} bytes long, more than any checkpoint needs",
                where={"file": str(file)},
                hint="restore it from the source",
            )
        )


class DcpCheckpoint:
    """A DCP directory. See `samerun.formats.base.Checkpoint`."""

    def __init__(self, path: Path, assembled: Assembled, maps: MappedFiles) -> None:
        self.path = path
        self.state: LogicalState = assembled.state
        self._assembled = assembled
        self._maps = maps

    @property
    def items(self) -> Items:
        """The items of the directory, for checks that go below the logical state."""
        return self._assembled.items

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the bytes of one piece lie. See `Checkpoint.locate`."""
        entry = require_key(self.state, key)
        if not 0 <= piece < len(entry.tiling):
            raise UsageError(Problem("SR-USAGE-PIECE", f"{key} has {len(entry.tiling)} pieces, none is number {piece}"))
        stored = self._assembled.stored.get(key)
        if stored is None:
            raise CorruptCheckpoint(
                Problem("SR-USAGE-PIECE", f"{key} is a number kept inside an object, not in a file")
            )
        return self.items.extent(stored, piece)

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece as a read-only view. See `Checkpoint.read_piece`."""
        constant = self._assembled.constants.get(key)
        if constant is not None:
            return np.asarray(constant, numpy_dtype(require_key(self.state, key).dtype))
        return view_extent(self._maps, self.locate(key, piece))

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor. See `Checkpoint.read`."""
        entry = require_key(self.state, key)
        return assemble_box(entry, lambda piece: self.read_piece(key, piece), offsets, sizes)

    @property
    def num_files(self) -> int:
        """Metadata and data files that are there."""
        return self._assembled.num_metadata + sum(file.found_bytes is not None for file in self.items.files)

    def check_items(self, limit: int | None = None) -> list[Problem]:
        """Checks the archive of every item, at most `limit` spread over all. See `Inspectable.check_items`."""
        return check_items(self._assembled.index, self.items, limit)

    def check_payloads(self, advance: Callable[[int], None] | None = None) -> PayloadCheck:
        """Compares every payload with the checksum in its archive. See `Inspectable.check_payloads`."""
        return check_payloads(self._assembled.index, self.items, advance)

    def close(self) -> None:
        """Releases the files."""
        self._maps.close()

"""The opened checkpoint that every reader of saved state dicts hands out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samerun.core.state import LogicalState
from samerun.errors import CorruptCheckpoint, FormatError, Problem, UsageError
from samerun.formats.base import Array, Checkpoint, Extent, PayloadCheck, assemble_box, numpy_dtype, require_key
from samerun.formats.base import view_extent
from samerun.formats.statedict.stored import Stored
from samerun.formats.torchfile.archive import checksum_problem
from samerun.stores.local import MappedFiles


@dataclass(frozen=True, slots=True)
class Delegate:
    """A tensor that another opened checkpoint holds under `key`."""

    checkpoint: Checkpoint
    key: str


Held = Stored | Delegate | int | float


class StateDictCheckpoint:
    """Tensors in files, plain numbers, and tensors of checkpoints inside this one.

    See `samerun.formats.base.Checkpoint`.
    """

    def __init__(
        self, path: Path, state: LogicalState, held: Mapping[str, Held], files: MappedFiles, paths: tuple[Path, ...]
    ) -> None:
        self.path = path
        self.state = state
        self._held = held
        self._files = files
        self._paths = paths

    @property
    def num_files(self) -> int:
        """Number of files that belong to the checkpoint."""
        return len(self._paths)

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the bytes of one piece lie. See `Checkpoint.locate`."""
        entry = require_key(self.state, key)
        if not 0 <= piece < len(entry.tiling):
            raise UsageError(Problem("SR-USAGE-PIECE", f"{key} has {len(entry.tiling)} pieces, none is number {piece}"))
        held = self._held[key]
        if isinstance(held, Delegate):
            return held.checkpoint.locate(held.key, piece)
        if isinstance(held, Stored):
            return held.extents[piece]
        raise CorruptCheckpoint(Problem("SR-USAGE-PIECE", f"{key} is a number kept inside an object, not in a file"))

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece as a read-only view. See `Checkpoint.read_piece`."""
        entry = require_key(self.state, key)
        held = self._held[key]
        if isinstance(held, int | float):
            return np.asarray(held, numpy_dtype(entry.dtype))
        if isinstance(held, Delegate):
            return held.checkpoint.read_piece(held.key, piece)
        return view_extent(self._files, self.locate(key, piece))

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor. See `Checkpoint.read`."""
        entry = require_key(self.state, key)
        return assemble_box(entry, lambda piece: self.read_piece(key, piece), offsets, sizes)

    def check_items(self, limit: int | None = None) -> list[Problem]:
        """Checks that every piece lies inside its file; reads no payload. `limit` is not needed, this is cheap."""
        problems: list[Problem] = []
        for held in self._held.values():
            for extent in held.extents if isinstance(held, Stored) else ():
                if 0 in extent.shape:
                    continue
                try:
                    view_extent(self._files, extent)
                except FormatError as error:
                    problems.extend(error.problems)
        return problems

    def check_payloads(self, advance: Callable[[int], None] | None = None) -> PayloadCheck:
        """Reads every storage once and compares it with the checksum that its container records."""
        problems: list[Problem] = []
        seen: dict[tuple[Path, int], bool] = {}
        for key, held in self._held.items():
            for extent in held.extents if isinstance(held, Stored) else ():
                place = (extent.file, extent.storage_offset_bytes if extent.crc32 is not None else extent.offset_bytes)
                if place in seen or 0 in extent.shape:
                    continue
                seen[place] = extent.crc32 is not None
                if extent.crc32 is None:
                    continue
                found = self._checksum(extent)
                if found != extent.crc32:
                    problems.append(checksum_problem(extent.file, key, extent.crc32, found))
                if advance is not None:
                    advance(extent.storage_bytes)
        checked = sum(seen.values())
        one_file = len({file for file, _ in seen}) == 1
        intact = False if problems else (True if seen and checked == len(seen) and one_file else None)
        return PayloadCheck(checked, len(seen), intact, tuple(problems))

    def _checksum(self, extent: Extent) -> int:
        stop = extent.storage_offset_bytes + extent.storage_bytes
        return zlib.crc32(memoryview(self._files.map(extent.file))[extent.storage_offset_bytes : stop])

    def close(self) -> None:
        """Releases the files, those of checkpoints inside this one too."""
        for checkpoint in {id(h.checkpoint): h.checkpoint for h in self._held.values() if isinstance(h, Delegate)}.values():
            checkpoint.close()
        self._files.close()

"""The opened checkpoint that every reader of saved state dicts hands out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState
from samerun.errors import CorruptCheckpoint, FormatError, Problem, UsageError
from samerun.formats.base import (
    Array,
    Checkpoint,
    Extent,
    Inspectable,
    PayloadCheck,
    Rigid,
    assemble_box,
    numpy_dtype,
    require_key,
    view_extent,
)
from samerun.formats.statedict.stored import Stored
from samerun.formats.torchfile.archive import checksum_problem
from samerun.stores.crc32 import crc32
from samerun.stores.local import MappedFiles

Held = Stored | int | float


class StateDictCheckpoint:
    """Tensors in files, plain numbers, and tensors of the checkpoints `inners` inside this one.

    See `samerun.formats.base.Checkpoint`, `Inspectable` and `Rigid`. `per_rank` says that each rank loads its own file.
    """

    def __init__(
        self,
        path: Path,
        state: LogicalState,
        held: Mapping[str, Held],
        files: MappedFiles,
        paths: tuple[Path, ...],
        inners: tuple[Checkpoint, ...] = (),
        *,
        per_rank: bool = False,
    ) -> None:
        self.path = path
        self.state = state
        self._held = held
        self._files = files
        self._paths = paths
        self._inners = inners
        self._per_rank = per_rank

    @property
    def num_files(self) -> int:
        """Number of files that belong to the checkpoint."""
        return len(self._paths) + sum(inner.num_files for inner in self._inners if isinstance(inner, Inspectable))

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the bytes of one piece lie. See `Checkpoint.locate`."""
        held = self._require(key, piece)
        if isinstance(held, Stored):
            return held.extent(piece)
        raise CorruptCheckpoint(Problem("SR-USAGE-PIECE", f"{key} is a number kept inside an object, not in a file"))

    def _require(self, key: str, piece: int) -> Held:
        entry = require_key(self.state, key)
        if not 0 <= piece < len(entry.tiling):
            raise UsageError(Problem("SR-USAGE-PIECE", f"{key} has {len(entry.tiling)} pieces, none is number {piece}"))
        return self._held[key]

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece as a read-only view. See `Checkpoint.read_piece`."""
        held = self._require(key, piece)
        if isinstance(held, Stored):
            return held.view(piece, self._files)
        return np.asarray(held, numpy_dtype(self.state.tensors[key].dtype))

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor. See `Checkpoint.read`."""
        entry = require_key(self.state, key)
        held = self._held[key]
        if isinstance(held, Stored) and held.inner is not None:
            return held.inner[0].read(held.inner[1], offsets, sizes)
        return assemble_box(entry, lambda piece: self.read_piece(key, piece), offsets, sizes)

    def _extents(self) -> Iterator[tuple[str, Extent]]:
        """Yields every piece with values that lies in this checkpoint's own files."""
        for key, held in self._held.items():
            for extent in held.extents if isinstance(held, Stored) else ():
                if 0 not in extent.shape:
                    yield key, extent

    def check_items(self, limit: int | None = None) -> list[Problem]:
        """Checks that every piece lies inside its file; reads no payload. `limit` bounds checks inside `inners`."""
        problems: list[Problem] = []
        for _, extent in self._extents():
            try:
                view_extent(self._files, extent)
            except FormatError as error:
                problems.extend(error.problems)
        for inner in self._inners:
            if isinstance(inner, Inspectable):
                problems.extend(inner.check_items(limit))
        return problems

    def check_payloads(self, advance: Callable[[int], None] | None = None) -> PayloadCheck:
        """Reads every storage once and compares it with the checksum that its container records.

        `intact` is true only if everything had one, and lies in one file: several might be of several saves.
        """
        problems: list[Problem] = []
        seen: dict[tuple[Path, int], bool] = {}
        for key, extent in self._extents():
            recorded = extent.crc32 is not None
            place = (extent.file, extent.storage_offset_bytes if recorded else extent.offset_bytes)
            if place in seen:
                continue
            seen[place] = recorded
            if recorded:
                problems += self._check_payload(key, extent, advance)
        checked, total = sum(seen.values()), len(seen)
        for inner in self._inners:
            if isinstance(inner, Inspectable):
                found = inner.check_payloads(advance)
                checked, total = checked + found.checked, total + found.total
                problems += found.problems
        alone = not self._inners and len({file for file, _ in seen}) == 1
        damaged = any(problem.code == "SR-FILE-CRC" for problem in problems)
        return PayloadCheck(checked, total, False if damaged else (alone and checked == total) or None, tuple(problems))

    def _check_payload(self, key: str, extent: Extent, advance: Callable[[int], None] | None) -> list[Problem]:
        stop = extent.storage_offset_bytes + extent.storage_bytes
        found = crc32(self._files.range(extent.file, extent.storage_offset_bytes, stop))
        if advance is not None:
            advance(extent.storage_bytes)
        recorded = extent.crc32
        if recorded is None or found == recorded:
            return []
        return [checksum_problem(extent.file, key, recorded, found)]

    def check_destination(self, destination: Layout) -> list[Problem]:
        """Returns why the checkpoint, or one inside it, would be refused at that layout. See `Rigid`."""
        problems = [
            problem
            for inner in self._inners
            if isinstance(inner, Rigid)
            for problem in inner.check_destination(destination)
        ]
        world = self.state.topology.world_size
        if self._per_rank and world is not None and world != destination.world_size:
            problems.append(_rigid(world, destination))
        return problems

    def close(self) -> None:
        """Releases the files, those of checkpoints inside this one too."""
        for inner in self._inners:
            inner.close()
        self._files.close()


def _rigid(world_size: int, destination: Layout) -> Problem:
    return Problem(
        "SR-RANK-RIGID",
        f"each rank loads the file that it saved: {world_size} ranks can, {destination.world_size} cannot",
        expected=world_size,
        found=destination.world_size,
        hint="with fewer ranks the rest of every tensor is silently left out, with more a file is missing. Convert "
        "to dcp (`samerun convert SRC DEST --to dcp`), which any number of ranks loads",
    )

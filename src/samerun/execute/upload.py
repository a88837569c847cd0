"""Makes the files of a destination in order, a part at a time, for a store that takes nothing else.

What is copied goes into a file that nobody sees (in the temporary directory), at the place that it has in its own file;
what is complete from the front on is handed out and its room given back. So a destination file of any size needs the
room of one window. Where a format wants a checksum ahead of what it is of, and the file is larger than a window, the
values are read twice: once for the checksum alone.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Event

import numpy as np
import numpy.typing as npt

from samerun.core.written import FilePlan, Literal
from samerun.execute.engine import Execution, Settings, sum_file
from samerun.execute.journal import Segment
from samerun.execute.move import OpenFiles, write_all
from samerun.execute.plan import ConversionPlan
from samerun.execute.work import Unit
from samerun.formats.base import Checkpoint

WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """Something that is copied as one into a file: bytes `at` to `at + num_bytes`. `crc` is known, or -1."""

    at: int
    num_bytes: int
    unit: Unit
    crc: int


class FileStreams:
    """The files of a plan as streams. A context that closes its files. Threads may share it, a file each."""

    def __init__(
        self,
        plan: ConversionPlan,
        checkpoint: Checkpoint,
        settings: Settings,
        cancel: Event,
    ) -> None:
        self.plan = plan
        self._execution = Execution(plan, checkpoint, Path(), None, {}, settings, cancel, None)
        self._execution.targets = OpenFiles(_open_scratch)

    def __enter__(self) -> FileStreams:
        return self

    def __exit__(self, *error: object) -> None:
        self._execution.__exit__(*error)

    def parts(self, number: int, part_bytes: int) -> Iterator[bytearray]:
        """Yields the bytes of file `number` in order, `part_bytes` at a time; the last part may be shorter.

        Raises:
            CorruptCheckpoint: if a source file ends too early.
            ExecutionError: if the source cannot be read.
            InterruptedError: if the work was cancelled.
            OSError: if the temporary directory is full.
        """
        file = self.plan.destination.files[number]
        window = max(WINDOW_BYTES, part_bytes)
        literals = list(file.literals)
        if file.checksums and file.size > window:
            literals += self._sums(file, number, self._sum(number, window))
        scratch = self._execution.targets.get(self._execution.paths[number])
        segments: list[Segment] = []
        done = held = 0
        pieces = self._pieces(number)
        for place, piece in enumerate(pieces):
            segments += self._execution.write_unit(piece.unit)
            held += piece.num_bytes
            complete = pieces[place + 1].at if place + 1 < len(pieces) else done
            if held >= window and file.size > window and complete - done >= part_bytes:
                stop = complete - (complete - done) % part_bytes
                yield from _read_parts(scratch, literals, done, stop, part_bytes)
                rest = os.pread(scratch, complete - stop, stop)
                _empty(scratch)
                write_all(scratch, rest, stop)
                done, held = stop, len(rest)
        if file.checksums and file.size <= window:
            literals += self._sums(file, number, segments)
        yield from _read_parts(scratch, literals, done, file.size, part_bytes)
        _empty(scratch)

    def _sum(self, number: int, window: int) -> list[Segment]:
        """Returns the checksums of all that is copied into a file, reading what has none that is known."""
        scratch = self._execution.targets.get(self._execution.paths[number])
        segments: list[Segment] = []
        held = 0
        for piece in self._pieces(number):
            if piece.crc >= 0:
                segments.append((number, piece.at, piece.num_bytes, piece.crc))
                continue
            segments += self._execution.write_unit(piece.unit)
            held += piece.num_bytes
            if held >= window:
                _empty(scratch)
                held = 0
        _empty(scratch)
        return segments

    def _sums(self, file: FilePlan, number: int, segments: Sequence[Segment]) -> list[Literal]:
        parts = [(at, length, crc) for _, at, length, crc in segments]
        found = sum_file(file, parts, self._execution.work.cuts.get(number, ()))
        return [Literal(place, crc.to_bytes(4, "little")) for checksum, crc in found for place in checksum.places]

    def _pieces(self, number: int) -> list[_Piece]:
        runs = self._execution.work.runs
        first, last = np.searchsorted(runs.file[self._by_file], [number, number + 1]).tolist()
        pieces = [
            _Piece(int(runs.at[run]), int(runs.length[run]), Unit(run, run + 1), int(runs.crc[run]))
            for run in self._by_file[first:last].tolist()
        ]
        pieces += self._tiles.get(number, [])
        return sorted(pieces, key=lambda piece: piece.at)

    @cached_property
    def _by_file(self) -> npt.NDArray[np.intp]:
        return np.argsort(self._execution.work.runs.file, kind="stable")

    @cached_property
    def _tiles(self) -> dict[int, list[_Piece]]:
        found: dict[int, list[_Piece]] = {}
        for unit in self._execution.work.units:
            for tile in unit.tiles:
                file = int(self.plan.slots.file[tile.slot])
                found.setdefault(file, []).append(_Piece(tile.at, tile.num_bytes, Unit(tiles=(tile,)), -1))
        return found


def _open_scratch(path: str) -> int:
    """Opens a file that has no name: it is gone with its last descriptor, however this process ends."""
    descriptor, name = tempfile.mkstemp(prefix="samerun-window-")
    os.unlink(name)
    return descriptor


def _empty(scratch: int) -> None:
    os.ftruncate(scratch, 0)


def _read_parts(scratch: int, literals: list[Literal], start: int, stop: int, part_bytes: int) -> Iterator[bytearray]:
    """Yields bytes `start` to `stop`: what was copied, and over it what is known. What is neither is padding."""
    known = sorted(literals, key=lambda literal: literal.at)  # a checksum comes behind the literal that it lies in
    ends = [0, *np.maximum.accumulate([literal.at + len(literal.content) for literal in known]).tolist()]
    for low, high in pairwise([*range(start, stop, part_bytes), stop]):
        part = bytearray(high - low)
        view, read = memoryview(part), 0
        while read < len(part) and (count := os.preadv(scratch, [view[read:]], low + read)):
            read += count
        for literal in known[max(0, bisect_right(ends, low) - 1) :]:
            if literal.at >= high:
                break
            a, b = max(low, literal.at), min(high, literal.at + len(literal.content))
            if a < b:
                view[a - low : b - low] = literal.content[a - literal.at : b - literal.at]
        view.release()
        yield part

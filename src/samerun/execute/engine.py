"""Executes a plan: copies, and nothing else. What the values mean is not known here."""

from __future__ import annotations

import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np

from samerun.core.crc import combine_crc32, crc32_of_zeros
from samerun.core.written import Checksum, FilePlan
from samerun.execute.journal import Journal, Segment
from samerun.execute.move import (
    Mover,
    OpenFiles,
    open_destination,
    open_source,
    read_exactly,
    read_remote,
    read_strided,
    reserve,
    sum_segments,
    write_all,
)
from samerun.execute.plan import DTYPE_LIST, MADE, ConversionPlan
from samerun.execute.planner import DEFAULT_BUDGET_BYTES
from samerun.execute.work import Tile, Unit, Work, plan_work
from samerun.formats.base import Array, Checkpoint, numpy_dtype
from samerun.stores.remote import find_remote

_BUFFERS_PER_THREAD = 4  # what is stored, what it is cast to, what is written, and one to spare
_SMALLEST_TILE_BYTES = 64 << 10
_FLUSHING = 4  # files flushed to disk at once: each waits for the disk, which takes several in hardly more time


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage is. `rate` is bytes per second since the stage began, `remaining` seconds to its end."""

    stage: str
    done_bytes: int
    total_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds left at this rate, None before there is one."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate else None


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the executor may use: anonymous memory for buffers, and threads.

    `agreed_tile_bytes` is what several processes agreed on, each with a budget and threads of its own.
    """

    budget_bytes: int = DEFAULT_BUDGET_BYTES
    threads: int = 2
    agreed_tile_bytes: int | None = None

    @property
    def tile_bytes(self) -> int:
        """The most that one thread puts together in memory at once."""
        if self.agreed_tile_bytes is not None:
            return self.agreed_tile_bytes
        return max(_SMALLEST_TILE_BYTES, self.budget_bytes // (self.threads * _BUFFERS_PER_THREAD))


def execute_plan(
    plan: ConversionPlan,
    checkpoint: Checkpoint,
    root: Path,
    journal: Journal,
    done: dict[int, list[Segment]],
    settings: Settings,
    *,
    cancel: Event | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes every file of the plan below `root` (for a single file: at `root`) and flushes them to disk.

    Units in `done` are not written again. What is written is noted in the journal unit by unit.

    Raises:
        CorruptCheckpoint: if a source file ends too early.
        InterruptedError: if `cancel` was set.
        OSError: if reading or writing fails.
    """
    with Execution(plan, checkpoint, root, journal, done, settings, cancel or Event(), progress) as execution:
        execution.make_files()
        execution.write_units()
        execution.finish_files()


class Execution:
    """The steps of `execute_plan` one by one, for several processes that share them. A context that closes its files.

    One process calls `make_files`; then every process calls `write_units` with its own share and `flush_units`; when
    all of them have, one whose `done` holds the units of all calls `finish_files`.
    """

    def __init__(
        self,
        plan: ConversionPlan,
        checkpoint: Checkpoint,
        root: Path,
        journal: Journal | None,
        done: dict[int, list[Segment]],
        settings: Settings,
        cancel: Event,
        progress: ProgressCallback | None,
    ) -> None:
        self.plan, self.checkpoint, self.root, self.journal = plan, checkpoint, root, journal
        self.settings, self.cancel, self.progress = settings, cancel, progress
        self.work: Work = plan_work(plan, settings.tile_bytes)
        self.done = {number: segments for number, segments in done.items() if number < len(self.work.units)}
        single = plan.destination.single_file
        self.paths = [str(root) if single else str(root / file.path) for file in plan.destination.files]
        self.sources, self.targets = OpenFiles(open_source), OpenFiles(open_destination)
        self.mover = Mover(cancel.is_set)
        self.reading = Lock()
        order = np.argsort(plan.copies.slot, kind="stable")
        self.copies_of = order, np.searchsorted(plan.copies.slot[order], np.arange(len(plan.slots) + 1))
        self.started = time.monotonic()
        self.done_bytes = 0

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *error: object) -> None:
        self.sources.close()
        self.targets.close()

    # --- files --------------------------------------------------------------------------------------------------

    def make_files(self) -> None:
        """Creates every file at its full size, with its literals; padding is never written and reads as zeros."""
        for path, file in zip(self.paths, self.plan.destination.files, strict=True):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            target = os.open(path, flags if self.done else flags | os.O_EXCL, 0o666)
            try:
                os.ftruncate(target, file.size)
                reserve(target, file.size)
                for literal in file.literals:
                    write_all(target, literal.content, literal.at)
            finally:
                os.close(target)

    def finish_files(self) -> None:
        """Puts checksums in their places and flushes files and directories."""
        segments: dict[int, list[tuple[int, int, int]]] = {}
        for parts in self.done.values():
            for file, at, length, checksum in parts:
                segments.setdefault(file, []).append((at, length, checksum))

        def finish(number: int) -> None:
            self.look()
            file, target = self.plan.destination.files[number], self.targets.get(self.paths[number])
            summed = sum_file(file, segments.get(number, []), self.work.cuts.get(number, ()))
            for checksum, value in summed:
                for place in checksum.places:
                    write_all(target, value.to_bytes(4, "little"), place)
            os.fsync(target)

        with ThreadPoolExecutor(max_workers=_FLUSHING) as pool:
            for _ in pool.map(finish, range(len(self.paths))):
                pass
        for folder in sorted({os.path.dirname(path) for path in self.paths}):
            flush_directory(folder)

    # --- units --------------------------------------------------------------------------------------------------

    def left(self) -> list[int]:
        """Returns the units that are not done, in order."""
        return [number for number in range(len(self.work.units)) if number not in self.done]

    def write_units(self, numbers: Sequence[int] | None = None) -> None:
        """Writes the units that are not done, or those of them that are given."""
        units = self.work.units
        left = self.left() if numbers is None else [number for number in numbers if number not in self.done]
        self.advance(sum(units[number].num_bytes for number in self.done))
        failed: list[BaseException] = []

        def write(number: int) -> tuple[int, list[Segment]] | None:
            if self.cancel.is_set() or failed:
                return None
            try:
                segments = self.write_unit(units[number])
                if self.journal is not None:
                    self.journal.unit(number, segments)
            except BaseException as error:
                failed.append(error)
                return None
            return number, segments

        with ThreadPoolExecutor(max_workers=max(1, self.settings.threads)) as pool:
            try:
                for result in pool.map(write, left):
                    if result is not None:
                        self.done[result[0]] = result[1]
                        self.advance(units[result[0]].num_bytes)
            except BaseException:  # an interrupt from the keyboard: let the threads see it before they are waited for
                self.cancel.set()
                raise
        if failed:
            raise failed[0]
        self.look()

    def flush_units(self, numbers: Sequence[int]) -> None:
        """Flushes the files that these units lie in to disk."""
        files: set[int] = set()
        for unit in (self.work.units[number] for number in numbers):
            files.update(self.work.runs.file[unit.first : unit.last].tolist())
            files.update(int(self.plan.slots.file[tile.slot]) for tile in unit.tiles)
        for file in sorted(files):
            self.look()
            os.fsync(self.targets.get(self.paths[file]))

    def look(self) -> None:
        if self.cancel.is_set():
            raise InterruptedError(4, "the conversion was interrupted")

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        if self.progress is not None:
            seconds = time.monotonic() - self.started
            self.progress(Progress("copying", self.done_bytes, self.work.num_bytes, seconds))

    def write_unit(self, unit: Unit) -> list[Segment]:
        segments: list[Segment] = []
        for run in range(unit.first, unit.last):
            segments += self.write_run(run)
        for tile in unit.tiles:
            segments += self.write_tile(tile)
        return segments

    def write_run(self, run: int) -> list[Segment]:
        runs = self.work.runs
        name = self.plan.sources[int(runs.source[run])]
        file, at, length = int(runs.file[run]), int(runs.at[run]), int(runs.length[run])
        target, offset = self.targets.get(self.paths[file]), int(runs.offset[run])
        if (remote := find_remote(name)) is not None:
            found = self.mover.copy_fetched(remote, offset, target, at, length)
            return [(file, at, length, found)] if file in self.work.cuts else []
        source = self.sources.get(name)
        if file not in self.work.cuts:
            self.mover.copy(source, offset, target, at, length, name)
            return []
        if (known := int(runs.crc[run])) >= 0:
            self.mover.copy(source, offset, target, at, length, name)
            return [(file, at, length, known)]
        return [(file, at, length, self.mover.copy_summed(source, offset, target, at, length, name))]

    def write_tile(self, tile: Tile) -> list[Segment]:
        self.look()
        file = int(self.plan.slots.file[tile.slot])
        dtype = numpy_dtype(self.plan.dtypes[int(self.plan.slots.tensor[tile.slot])])
        box = np.empty(tile.sizes, dtype)
        order, edges = self.copies_of
        rows = order[edges[tile.slot] : edges[tile.slot + 1]]
        low = np.maximum(self.plan.copies.origin[rows], tile.origin)
        high = np.minimum(
            self.plan.copies.origin[rows] + self.plan.copies.sizes[rows],
            np.array(tile.origin, np.int64) + np.array(tile.sizes, np.int64),
        )
        for i in np.flatnonzero((high > low).all(axis=1)).tolist():
            start = (low[i] - tile.origin).tolist()
            size = (high[i] - low[i]).tolist()
            place = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            self.fill(box[place], int(rows[i]), low[i])
        content: memoryview = box.reshape(-1).view(np.uint8).data
        write_all(self.targets.get(self.paths[file]), content, tile.at)
        cuts = self.work.cuts.get(file)
        return [(file, *part) for part in sum_segments(content, tile.at, cuts)] if cuts is not None else []

    def fill(self, out: Array, row: int, low: Any) -> None:
        """Puts the part of a copy that begins at `low` into `out`, as it is to be written."""
        copies = self.plan.copies
        if int(copies.source[row]) == MADE:
            out[...] = self.made(row, low, list(out.shape), out.dtype)
            return
        name = self.plan.sources[int(copies.source[row])]
        stored = numpy_dtype(DTYPE_LIST[int(copies.stored[row])])
        swapped = bool(copies.swapped[row])
        offset = int(copies.offset[row]) + int(((low - copies.origin[row]) * copies.strides[row]).sum())
        divisor = float(copies.divisor[row])

        def change(values: Array) -> Array:
            if swapped and stored.kind not in "fciu":
                values = np.ascontiguousarray(values).view(f"u{stored.itemsize}").byteswap().view(stored)
            with np.errstate(all="ignore"):
                if divisor != 1.0:
                    values = (values / np.asarray(divisor, stored)).astype(stored)
                return values.astype(out.dtype, copy=False)

        remote = find_remote(name)
        read_strided(
            partial(read_exactly, self.sources.get(name), name) if remote is None else partial(read_remote, remote),
            offset,
            copies.strides[row].tolist(),
            out,
            stored.newbyteorder(">") if swapped and stored.kind in "fciu" else stored,
            change,
        )

    def made(self, row: int, low: Any, size: list[int], dtype: np.dtype[Any]) -> Array:
        """Returns values that only the reader can make."""
        slot = int(self.plan.copies.slot[row])
        tensor = int(self.plan.slots.tensor[slot])
        ndim = len(self.plan.shapes[tensor])
        first = (low + self.plan.slots.offsets[slot]).tolist()
        with self.reading, np.errstate(all="ignore"):
            key = self.plan.keys[tensor]
            found = self.checkpoint.read(key, tuple(first[len(first) - ndim :]), tuple(size[len(size) - ndim :]))
            return found.astype(dtype).reshape(size)


def sum_file(file: FilePlan, written: list[tuple[int, int, int]], cuts: tuple[int, ...]) -> list[tuple[Checksum, int]]:
    """Returns the value of each checksum of a file, joined from those of its parts."""
    if not file.checksums:
        return []
    parts = list(written)
    for literal in file.literals:
        parts += sum_segments(memoryview(literal.content), literal.at, cuts)
    for fill in file.fills:
        edges = [
            fill.at,
            *cuts[bisect_right(cuts, fill.at) : bisect_left(cuts, fill.at + fill.size)],
            fill.at + fill.size,
        ]
        parts += [(a, b - a, crc32_of_zeros(b - a)) for a, b in pairwise(edges) if b > a]
    parts.sort()
    starts = [start for start, _, _ in parts]
    values: list[tuple[Checksum, int]] = []
    for checksum in file.checksums:
        value, at = 0, checksum.start
        number = bisect_left(starts, checksum.start)
        while at < checksum.stop:
            start, length, part = parts[number] if number < len(parts) else (-1, 0, 0)
            if start != at:
                raise ValueError(f"{file.path}: nothing was summed at byte {at}")
            value = combine_crc32(value, part, length)
            at, number = at + length, number + 1
        values.append((checksum, value))
    return values


def flush_directory(path: str | os.PathLike[str]) -> None:
    """Flushes a directory's entries to disk, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (22, 95):  # EINVAL, EOPNOTSUPP: this file system flushes no directories
            raise
    finally:
        os.close(descriptor)

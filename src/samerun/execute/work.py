"""A plan cut into units of work: runs of bytes that the kernel copies, and tiles that are put together in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from samerun.execute.plan import MADE, ConversionPlan

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SMALLEST_RUN_BYTES = 128 << 10  # shorter runs of a strided box are put together in memory instead
UNIT_BYTES = 32 << 20
LARGEST_KNOWN_BYTES = 512 << 20  # the longest run that is kept in one for the sake of its known checksum


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Contiguous bytes that move unchanged, as columns `(runs,)`, in the order of the destination.

    `crc` is their CRC32 where it is known and wanted, else -1.
    """

    source: Ints
    offset: Ints
    file: Ints
    at: Ints
    length: Ints
    crc: Ints

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True)
class Tile:
    """A box inside a slot whose values follow each other in the file from byte `at` on; elements."""

    slot: int
    origin: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """What is done and journalled as one: runs `first` to `last`, or some tiles."""

    first: int = 0
    last: int = 0
    tiles: tuple[Tile, ...] = ()
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """All units of a plan, in a fixed order. `cuts` are, by file number, the bytes at which checksums begin or end."""

    runs: Runs
    units: tuple[Unit, ...]
    cuts: dict[int, tuple[int, ...]]

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return sum(unit.num_bytes for unit in self.units)


def plan_work(plan: ConversionPlan, tile_bytes: int) -> Work:
    """Cuts a plan into units. Copies that run contiguously on both sides become runs, merged where they continue.

    Slots with any other copy are put together tile by tile, at most `tile_bytes` at a time.
    """
    cuts = {
        number: tuple(sorted({edge for checksum in file.checksums for edge in (checksum.start, checksum.stop)}))
        for number, file in enumerate(plan.destination.files)
        if file.checksums
    }
    inner = _inner_run_bytes(plan)
    copies = plan.copies
    whole = np.prod(copies.sizes, axis=1) * plan.slots.itemsize[copies.slot]
    tiled = (inner != whole) & (inner < SMALLEST_RUN_BYTES) | (copies.source == MADE) | plan.cast
    in_tiles = np.zeros(len(plan.slots), np.bool_)
    in_tiles[copies.slot[tiled]] = True
    rows = np.flatnonzero(~in_tiles[copies.slot])
    runs = _cut_runs(_merge_runs(_expand_runs(plan, rows, inner, np.array(list(cuts), np.int64))), cuts)
    units = [*_run_units(runs), *_tile_units(plan, np.flatnonzero(in_tiles), tile_bytes)]
    return Work(runs, tuple(units), cuts)


def _slot_strides(plan: ConversionPlan) -> Ints:
    """Returns the steps in bytes along each dimension of every slot."""
    sizes = plan.slots.sizes
    steps = np.ones_like(sizes)
    steps[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    return steps * plan.slots.itemsize[:, None]


def _inner_run_bytes(plan: ConversionPlan) -> Ints:
    """Returns how many bytes of each copy follow each other on both sides, seen from its first value."""
    copies = plan.copies
    steps = _slot_strides(plan)[copies.slot]
    length = plan.slots.itemsize[copies.slot].copy()
    going = np.ones(len(copies), np.bool_)
    for d in reversed(range(copies.sizes.shape[1])):
        fits = (copies.sizes[:, d] == 1) | ((copies.strides[:, d] == length) & (steps[:, d] == length))
        going &= fits
        length = np.where(going, length * copies.sizes[:, d], length)
    return length


def _expand_runs(plan: ConversionPlan, rows: npt.NDArray[np.intp], inner: Ints, summed: Ints) -> Runs:
    """Returns every contiguous run of some copies. Checksums are kept for the files of which one is wanted."""
    copies, slots = plan.copies, plan.slots
    steps = _slot_strides(plan)[copies.slot[rows]]
    offset = copies.offset[rows]
    at = slots.at[copies.slot[rows]] + (copies.origin[rows] * steps).sum(axis=1)
    length, sizes = inner[rows], copies.sizes[rows]
    strides = copies.strides[rows]
    row = np.arange(len(rows))
    left = np.prod(sizes, axis=1) * slots.itemsize[copies.slot[rows]] // np.maximum(length, 1)
    known = (left == 1) & np.isin(slots.file[copies.slot[rows]], summed)
    crc = np.where(known, copies.crc[rows], -1)
    for d in range(sizes.shape[1]):  # outer dimensions become separate runs until only the contiguous part is left
        outer = np.where(left > 1, sizes[:, d], 1)
        left = left // outer
        times = outer[row]
        step = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
        row, offset, at = np.repeat(row, times), np.repeat(offset, times), np.repeat(at, times)
        offset = offset + step * strides[row, d]
        at = at + step * steps[row, d]
    return Runs(copies.source[rows][row], offset, slots.file[copies.slot[rows]][row], at, length[row], crc[row])


def _merge_runs(runs: Runs) -> Runs:
    order = np.lexsort((runs.at, runs.file))
    source, offset, file, at, length, crc = (
        column[order] for column in (runs.source, runs.offset, runs.file, runs.at, runs.length, runs.crc)
    )
    if not len(order):
        return runs
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (
        (source[1:] != source[:-1])
        | (file[1:] != file[:-1])
        | (at[1:] != at[:-1] + length[:-1])
        | (offset[1:] != offset[:-1] + length[:-1])
        | (crc[1:] >= 0)
        | (crc[:-1] >= 0)
    )
    first = np.flatnonzero(begins)
    return Runs(source[first], offset[first], file[first], at[first], np.add.reduceat(length, first), crc[first])


def _cut_runs(runs: Runs, cuts: dict[int, tuple[int, ...]]) -> Runs:
    """Cuts runs where a checksum begins or ends, and those longer than a unit."""
    times = np.ones(len(runs), np.int64)
    inside: dict[int, list[int]] = {}
    for file, edges in cuts.items():
        rows = np.flatnonzero(runs.file == file)
        first = np.searchsorted(np.array(edges), runs.at[rows], side="right")
        last = np.searchsorted(np.array(edges), runs.at[rows] + runs.length[rows], side="left")
        for row, a, b in zip(rows.tolist(), first.tolist(), last.tolist(), strict=True):
            if b > a:
                inside[row] = list(edges[a:b])
    whole = np.where(runs.crc >= 0, LARGEST_KNOWN_BYTES, UNIT_BYTES)
    for row in np.flatnonzero(runs.length > whole).tolist():
        at, length = int(runs.at[row]), int(runs.length[row])
        inside[row] = sorted({*inside.get(row, []), *range(at + UNIT_BYTES, at + length, UNIT_BYTES)})
    if not inside:
        return runs
    for row, edges in inside.items():
        times[row] += len(edges)
    owner = np.repeat(np.arange(len(runs)), times)
    begin = runs.at[owner].copy()
    starts = np.cumsum(times) - times
    for row, edges in inside.items():
        begin[starts[row] + 1 : starts[row] + 1 + len(edges)] = edges
    end = runs.at[owner] + runs.length[owner]
    same = owner[1:] == owner[:-1]
    end[:-1][same] = begin[1:][same]
    crc = np.where(times[owner] == 1, runs.crc[owner], -1)
    offset = runs.offset[owner] + (begin - runs.at[owner])
    return Runs(runs.source[owner], offset, runs.file[owner], begin, end - begin, crc)


def _run_units(runs: Runs) -> Iterator[Unit]:
    if not len(runs):
        return
    number = (np.cumsum(runs.length) - runs.length) // UNIT_BYTES
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(runs)]
    for first, last in pairwise(edges):
        yield Unit(first, last, (), int(runs.length[first:last].sum()))


def _tile_units(plan: ConversionPlan, slots: npt.NDArray[np.intp], tile_bytes: int) -> Iterator[Unit]:
    pending: list[Tile] = []
    held = 0
    for slot in slots.tolist():
        for tile in _tiles(plan, slot, tile_bytes):
            if pending and held + tile.num_bytes > UNIT_BYTES:
                yield Unit(tiles=tuple(pending), num_bytes=held)
                pending, held = [], 0
            pending.append(tile)
            held += tile.num_bytes
    if pending:
        yield Unit(tiles=tuple(pending), num_bytes=held)


def _tiles(plan: ConversionPlan, slot: int, tile_bytes: int) -> Iterator[Tile]:
    """Cuts a slot into contiguous boxes: whole inner dimensions, a range of one, single steps of the outer ones."""
    sizes = plan.slots.sizes[slot].tolist()
    itemsize, at = int(plan.slots.itemsize[slot]), int(plan.slots.at[slot])
    cut, inner = len(sizes) - 1, itemsize
    while cut > 0 and inner * sizes[cut] <= tile_bytes:
        inner *= sizes[cut]
        cut -= 1
    rows = max(1, tile_bytes // inner)
    for outer in np.ndindex(*sizes[:cut]):
        for first in range(0, sizes[cut], rows):
            count = min(rows, sizes[cut] - first)
            origin = (*outer, first, *(0,) * (len(sizes) - cut - 1))
            shape = (*(1,) * cut, count, *sizes[cut + 1 :])
            yield Tile(slot, origin, shape, at, count * inner)
            at += count * inner

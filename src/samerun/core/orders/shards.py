"""Streaming shards: what every rank's cursor had read, and the rest of it, dealt again exactly once.

A streaming loader gives each rank (and each of its workers) whole shards or parts of them, and remembers a cursor into
each. The cursors mean nothing on another number of ranks. What they say about the data does: these half-open ranges of
samples are read, the others are not. `remaining_ranges` is that subtraction, and `RangeOrder` an order over any set of
ranges, which any number of readers can share without a message between them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samerun.core.order import Ids, require_span
from samerun.core.permutation import Permutation
from samerun.errors import FormatError, Problem, Severity


@dataclass(frozen=True, slots=True, order=True)
class ShardRange:
    """Samples start..stop-1 of one shard, 0-based within it."""

    shard: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a range of samples goes up: {self}")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardCursor:
    """How far one reader (a rank, or one worker of it) had come in the range that was its own.

    `position` is the first sample that is *not committed*: what was read ahead into a queue is not committed.
    """

    reader: str
    given: ShardRange
    position: int


def check_cursors(lengths: Mapping[str, int], cursors: Sequence[ShardCursor]) -> list[Problem]:
    """Returns what is wrong with a set of cursors: SR-ORDER-CURSOR for one that cannot be, SR-ORDER-OVERLAP for two
    readers that had the same samples, SR-ORDER-UNREAD (a note) for samples that no reader had been given.
    """
    problems: list[Problem] = []
    given: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for cursor in cursors:
        part, length = cursor.given, lengths.get(cursor.given.shard)
        where = {"key": f"{part.shard}[{part.start}:{part.stop}]", "reader": cursor.reader}
        if length is None or part.stop > length or not part.start <= cursor.position <= part.stop:
            problems.append(
                Problem(
                    "SR-ORDER-CURSOR",
                    "a reader's cursor points outside the samples that it was given",
                    where=where,
                    expected="a shard that is there" if length is None else f"{part.start} to {min(part.stop, length)}",
                    found=cursor.position,
                    hint="the shard list or a shard's length changed since the save",
                )
            )
            continue
        given[part.shard].append((part.start, part.stop, cursor.reader))
    for shard, parts in given.items():
        parts.sort()
        for (_, stop, first), (start, _, second) in itertools.pairwise(parts):
            if start < stop:
                problems.append(
                    Problem(
                        "SR-ORDER-OVERLAP",
                        f"{first} and {second} were given the same samples",
                        where={"key": f"{shard}[{start}:{stop}]"},
                        hint="their samples were consumed twice; was one rank's cursor copied to another?",
                    )
                )
    unread = sum(lengths[shard] - sum(stop - start for start, stop, _ in given.get(shard, ())) for shard in lengths)
    if unread > 0 and not problems:
        problems.append(
            Problem(
                "SR-ORDER-UNREAD",
                f"{unread} samples belong to no reader's cursor and count as not consumed",
                severity=Severity.NOTE,
                hint="shards not opened yet look like this; so does a rank whose state was lost: count the readers",
            )
        )
    return problems


def remaining_ranges(lengths: Mapping[str, int], cursors: Sequence[ShardCursor]) -> tuple[ShardRange, ...]:
    """Returns every sample that no cursor has committed, as ranges in the order of `lengths` and of their start.

    Raises:
        FormatError: for cursors that cannot be, or overlap (see `check_cursors`).
    """
    if wrong := [problem for problem in check_cursors(lengths, cursors) if problem.severity is Severity.ERROR]:
        raise FormatError(wrong)
    read: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for cursor in cursors:
        if cursor.position > cursor.given.start:
            read[cursor.given.shard].append((cursor.given.start, cursor.position))
    left: list[ShardRange] = []
    for shard, length in lengths.items():
        at = 0
        for start, stop in sorted(read[shard]):
            if start > at:
                left.append(ShardRange(shard, at, start))
            at = stop
        if at < length:
            left.append(ShardRange(shard, at, length))
    return tuple(left)


@dataclass(frozen=True, slots=True, eq=False)
class RangeOrder:
    """An order over ranges of shards; an id is the sample's number when all shards stand one behind the other.

    Epoch `epoch` walks `ranges` (what remains after a move); every other epoch walks all of `lengths`. Positions are
    dealt across `lanes` ranges at a time, one sample from each in turn, so that neighbouring samples come from
    different shards and `lanes` readers stay on shards of their own while every reader can still compute every
    position. `lanes=1` is plain sequence. `seed` shuffles the sequence of the ranges (not of samples), anew in every
    epoch.

    Memory is one row per range; a position costs a binary search.
    """

    lengths: Mapping[str, int]
    ranges: tuple[ShardRange, ...]
    epoch: int
    lanes: int
    seed: int | None
    _first: Mapping[str, int]

    def __init__(
        self,
        lengths: Mapping[str, int],
        ranges: Iterable[ShardRange] | None = None,
        *,
        epoch: int = 0,
        lanes: int = 1,
        seed: int | None = None,
    ) -> None:
        first, at = dict[str, int](), 0
        for shard, length in lengths.items():
            first[shard] = at
            at += length
        whole = tuple(ShardRange(shard, 0, length) for shard, length in lengths.items() if length)
        chosen = whole if ranges is None else tuple(part for part in ranges if len(part))
        if not whole or not chosen or lanes < 1:
            raise ValueError("an order over shards needs at least one sample and one lane")
        for name, value in (("lengths", dict(lengths)), ("ranges", chosen), ("epoch", epoch), ("lanes", lanes)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "_first", first)

    def num_samples(self, epoch: int) -> int:
        """Returns how many samples the ranges of that epoch hold."""
        return sum(map(len, self._of(epoch)))

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the sample numbers at positions start..stop-1."""
        require_span(start, stop, self.num_samples(epoch))
        ranges = self._of(epoch)
        found = np.empty(stop - start, dtype=np.int64)
        at = 0
        for begin in range(0, len(ranges), self.lanes):
            group = ranges[begin : begin + self.lanes]
            size = sum(map(len, group))
            low, high = max(start, at), min(stop, at + size)
            if low < high:
                found[low - start : high - start] = self._turns(group, low - at, high - at)
            at += size
            if at >= stop:
                break
        return found

    def locate(self, ids: Ids) -> list[tuple[str, int]]:
        """Returns (shard, place within it) of each id."""
        shards = list(self._first)
        begins = np.array([self._first[shard] for shard in shards])
        number = np.searchsorted(begins, ids, side="right") - 1
        places = (ids - begins[number]).tolist()
        return [(shards[index], place) for index, place in zip(number.tolist(), places, strict=True)]

    def identity(self) -> dict[str, Any]:
        """Returns the kind, lanes, seed, and a SHA-256 over the shard table and the ranges."""
        table = [f"{shard}\0{length}" for shard, length in self.lengths.items()]
        rows = [f"{part.shard}\0{part.start}\0{part.stop}" for part in self.ranges]
        digest = hashlib.sha256("\n".join([*table, "", *rows]).encode()).hexdigest()
        return {"kind": "shards", "lanes": self.lanes, "seed": self.seed, "epoch": self.epoch, "sha256": digest}

    def _of(self, epoch: int) -> Sequence[ShardRange]:
        if epoch == self.epoch:
            ranges = self.ranges
        else:
            ranges = tuple(ShardRange(shard, 0, length) for shard, length in self.lengths.items() if length)
        if self.seed is None:
            return ranges
        return [ranges[place] for place in Permutation.of(len(ranges), self.seed, epoch).span(0, len(ranges)).tolist()]

    def _turns(self, group: Sequence[ShardRange], low: int, high: int) -> Ids:
        """Positions low..high-1 of a group whose ranges take turns until each of them is used up."""
        sizes = np.array([len(part) for part in group], dtype=np.int64)
        begins = np.array([self._first[part.shard] + part.start for part in group], dtype=np.int64)
        levels = np.unique(sizes)  # turn t is taken by the ranges that have more than t samples
        alive = np.array([(sizes > level - 1).sum() for level in levels], dtype=np.int64)
        depth = np.diff(levels, prepend=0)
        ends = np.cumsum(depth * alive)
        position = np.arange(low, high, dtype=np.int64)
        level = np.searchsorted(ends, position, side="right")
        before = position - np.concatenate([[0], ends[:-1]])[level]
        turn, lane = np.divmod(before, alive[level])
        found = np.empty(len(position), dtype=np.int64)
        for number in np.unique(level).tolist():
            mine = level == number
            members = np.flatnonzero(sizes >= levels[number])
            base = int(levels[number - 1]) if number else 0
            found[mine] = begins[members[lane[mine]]] + base + turn[mine]
        return found

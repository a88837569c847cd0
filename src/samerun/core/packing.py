"""Packing variable-length samples into rows, in a way that no rank count can change.

A packer that works on what its rank was given packs other rows on other ranks: samples meet other neighbours, are cut
in other places, and the number of rows in an epoch changes. `PackedOrder` packs along the global order, before
anything is dealt. A row is then an ordinary sample of an ordinary order: dealt, committed and resumed like one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samerun.core.order import GlobalOrder, Ids, require_span
from samerun.errors import Problem


@dataclass(frozen=True, slots=True, eq=False)
class PackedOrder:
    """Rows of whole samples, filled one after the other along `base` (next fit), each up to `capacity` tokens.

    An id is a row's number within its epoch, plus `ROW_STRIDE` times the epoch: the rows of two epochs differ, so
    their ids do. `members` tells a row's samples, `row_tokens` how many valid tokens they have. The rows of one epoch
    are held in memory: 8 bytes per row and per sample.

    Attributes:
        base: the order of the samples.
        lengths: valid tokens of each sample, by id, int64.
        capacity: tokens in a row.
    """

    base: GlobalOrder
    lengths: Ids
    capacity: int
    _rows: dict[int, tuple[Ids, Ids]]

    ROW_STRIDE = 1 << 40

    def __init__(self, base: GlobalOrder, lengths: Sequence[int] | Ids, capacity: int) -> None:
        counts = np.array(lengths, dtype=np.int64)
        if counts.ndim != 1 or not counts.size or counts.min() < 0 or counts.max() > capacity:
            raise ValueError(f"every sample must have between 0 and {capacity} tokens")
        counts.setflags(write=False)
        for name, value in (("base", base), ("lengths", counts), ("capacity", capacity), ("_rows", {})):
            object.__setattr__(self, name, value)

    @property
    def longest(self) -> int:
        """No row has more valid tokens than this."""
        return self.capacity

    def num_samples(self, epoch: int) -> int:
        """Returns the number of rows of an epoch."""
        return len(self._epoch(epoch)[1]) - 1

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the row ids at positions start..stop-1."""
        require_span(start, stop, self.num_samples(epoch))
        return np.arange(start, stop, dtype=np.int64) + epoch * self.ROW_STRIDE

    def members(self, row: int) -> Ids:
        """Returns the ids of a row's samples, in order."""
        epoch, number = divmod(row, self.ROW_STRIDE)
        samples, starts = self._epoch(epoch)
        return samples[starts[number] : starts[number + 1]]

    def row_tokens(self, rows: Iterable[int]) -> int:
        """Returns the valid tokens of some rows: what `ContributionMean` counts and `commit(tokens=...)` is told."""
        return int(self.tokens(np.fromiter(rows, dtype=np.int64)).sum())

    def tokens(self, ids: Ids) -> Ids:
        """Returns the valid tokens of each row."""
        counts = [int(self.lengths[self.members(row)].sum()) for row in ids.tolist()]
        return np.array(counts, dtype=np.int64)

    def identity(self) -> dict[str, Any]:
        """Returns the base order's identity, the capacity, and a SHA-256 over the lengths."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()
        return {"kind": "packed", "base": self.base.identity(), "capacity": self.capacity, "lengths_sha256": digest}

    def _epoch(self, epoch: int) -> tuple[Ids, Ids]:
        if epoch not in self._rows:
            samples = self.base.ids(epoch, 0, self.base.num_samples(epoch))
            starts = np.array(next_fit(self.lengths[samples], self.capacity), dtype=np.int64)
            self._rows.clear()  # one epoch at a time
            self._rows[epoch] = (samples, starts)
        return self._rows[epoch]


def next_fit(lengths: Sequence[int] | Ids, capacity: int) -> list[int]:
    """Returns where rows begin, and at last the number of samples: row i holds samples starts[i]..starts[i+1]-1.

    >>> next_fit([3, 3, 2, 5, 1], 6)
    [0, 2, 3, 5]
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    starts, begin = [0], 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        begin = max(int(np.searchsorted(ends, before + capacity, side="right")), begin + 1)
        starts.append(begin)
    return starts


Packer = Callable[[Sequence[int]], Iterable[Sequence[int]]]
"""A run's own packing: the ids that one rank is given -> its rows."""


def check_packing(pack: Packer, ids: Sequence[int], degrees: Sequence[int]) -> list[Problem]:
    """Returns SR-ORDER-PACKING for every number of ranks at which `pack` makes other rows of the same samples.

    `ids` (a slice of the global order) are dealt like cards to each number of ranks in `degrees`, packed on each rank,
    and the rows of all ranks compared as a multiset with those of the first degree.
    """
    rows = [Counter(tuple(row) for rank in range(n) for row in pack(ids[rank::n])) for n in degrees]
    return [
        Problem(
            "SR-ORDER-PACKING",
            f"the packing depends on the number of ranks: {(rows[0] - other).total()} rows differ",
            where={"ranks": degree},
            expected=f"{rows[0].total()} rows, those of {degrees[0]} ranks",
            found=f"{other.total()} rows",
            hint="pack along the global order before dealing (PackedOrder), or call a change of ranks intentional",
        )
        for degree, other in zip(degrees[1:], rows[1:], strict=True)
        if other != rows[0]
    ]

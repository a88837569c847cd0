"""From one order into another in the middle of an epoch: exactly, or with the bound and the ids.

`RemainderOrder` is the exact way: it goes on with whatever of the epoch was not consumed, in an order of choice, and
with that order from the next epoch on. `compare_switch` tells what a framework does to itself when it takes the same
count of consumed samples into another order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from samerun.core.order import GlobalOrder, Ids, require_span


@dataclass(frozen=True, slots=True, eq=False)
class RemainderOrder:
    """An order whose epoch `epoch` is what of `after`'s epoch is not among `consumed`, and which is `after` otherwise.

    The remainder keeps `after`'s sequence. Ids count as often as they occur: a sample that `after` pads the epoch with
    is consumed by one occurrence at a time, and padding is given up last. Ids that were consumed and that `after` does
    not have in that epoch (it dropped another tail) are not asked for again. Position 0 of the epoch is the first
    sample that is not consumed yet.

    Attributes:
        after: the order that goes on.
        epoch: the epoch that was begun.
        consumed: its ids that are committed, in any order, int64.
    """

    after: GlobalOrder
    epoch: int
    consumed: Ids
    _rest: Ids

    def __init__(self, after: GlobalOrder, epoch: int, consumed: Ids) -> None:
        begun = after.ids(epoch, 0, after.num_samples(epoch))
        rest = begun[_mark_left(begun, np.asarray(consumed, dtype=np.int64))]
        rest.setflags(write=False)
        object.__setattr__(self, "after", after)
        object.__setattr__(self, "epoch", epoch)
        object.__setattr__(self, "consumed", np.sort(np.asarray(consumed, dtype=np.int64)))
        object.__setattr__(self, "_rest", rest)

    def num_samples(self, epoch: int) -> int:
        """Returns the positions of an epoch: what is left of the begun one, `after`'s own number for others."""
        return len(self._rest) if epoch == self.epoch else self.after.num_samples(epoch)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the ids at positions start..stop-1."""
        if epoch != self.epoch:
            return self.after.ids(epoch, start, stop)
        require_span(start, stop, len(self._rest))
        return self._rest[start:stop]

    def identity(self) -> dict[str, Any]:
        """Returns `after`'s identity, the epoch, and a SHA-256 over the sorted consumed ids."""
        digest = hashlib.sha256(self.consumed.astype("<i8").tobytes()).hexdigest()
        return {"kind": "remainder", "after": self.after.identity(), "epoch": self.epoch, "consumed_sha256": digest}


def _mark_left(begun: Ids, consumed: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns which places of `begun` are left once each consumed id has taken its first occurrence that is free."""
    values, counts = np.unique(consumed, return_counts=True)
    by_id = np.argsort(begun, kind="stable")
    ordered = begun[by_id]
    first = np.searchsorted(ordered, ordered, side="left")
    occurrence = np.arange(len(ordered)) - first  # 0 for an id's first place in the epoch, 1 for its second, ...
    place = np.minimum(np.searchsorted(values, ordered), max(len(values) - 1, 0))
    taken = np.where(values[place] == ordered, counts[place], 0) if len(values) else np.zeros(len(ordered), np.int64)
    left = np.empty(len(begun), dtype=np.bool_)
    left[by_id] = occurrence >= taken
    return left


@dataclass(frozen=True, slots=True)
class Switch:
    """What becomes of an epoch when a run goes over from one order to another at the same count of samples.

    `replayed` are consumed again, `omitted` never in this epoch; ids in increasing order, as often as it happens.
    """

    replayed: tuple[int, ...]
    omitted: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every sample of the epoch is consumed as often as without the switch."""
        return not self.replayed and not self.omitted


def compare_switch(before: GlobalOrder, after: GlobalOrder, epoch: int, at: int) -> Switch:
    """Returns what is replayed and omitted when `before` is left, and `after` entered, at position `at` of `epoch`."""
    length = before.num_samples(epoch)
    require_span(at, at, length)
    expected = Counter(before.ids(epoch, 0, length).tolist())
    begin = min(at, after.num_samples(epoch))
    found = Counter(before.ids(epoch, 0, at).tolist())
    found.update(after.ids(epoch, begin, after.num_samples(epoch)).tolist())
    return Switch(tuple(sorted((found - expected).elements())), tuple(sorted((expected - found).elements())))

"""Updates that hold so many valid tokens: which samples they are, whatever the number of ranks.

A trainer that fills token budgets rank by rank makes other updates at another number of ranks: the samples that still
fit are others. Here an update is cut from the global order before anything is dealt. It takes samples in order for as
long as they fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from samerun.core.order import GlobalOrder, Ids
from samerun.core.progress import Committed, LastBatch, Span, UpdateSpan


class MeasuredOrder(GlobalOrder, Protocol):
    """An order whose samples have a known number of valid tokens each."""

    @property
    def longest(self) -> int:
        """No sample has more valid tokens than this."""
        ...

    def tokens(self, ids: Ids) -> Ids:
        """Returns the valid tokens of each of `ids`, int64, in the same order."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSamples:
    """Any order, and how many valid tokens each of its samples has.

    Attributes:
        base: the order of the samples.
        lengths: valid tokens of each sample, by id, int64.
    """

    base: GlobalOrder
    lengths: Ids

    def __init__(self, base: GlobalOrder, lengths: Sequence[int] | Ids) -> None:
        counts = np.array(lengths, dtype=np.int64)
        if counts.ndim != 1 or not counts.size or counts.min() < 0:
            raise ValueError("every sample needs a number of valid tokens of at least 0")
        counts.setflags(write=False)
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "lengths", counts)

    @property
    def longest(self) -> int:
        """The most valid tokens of any sample."""
        return int(self.lengths.max())

    def num_samples(self, epoch: int) -> int:
        """Returns `base`'s number of positions."""
        return self.base.num_samples(epoch)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns `base`'s ids."""
        return self.base.ids(epoch, start, stop)

    def tokens(self, ids: Ids) -> Ids:
        """Returns the valid tokens of each of `ids`."""
        return self.lengths[ids]

    def identity(self) -> dict[str, Any]:
        """Returns the base order's identity and a SHA-256 over the lengths."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()
        return {"kind": "measured", "base": self.base.identity(), "lengths_sha256": digest}


def next_token_update(
    order: MeasuredOrder, at: Committed, num_tokens: int, last_batch: LastBatch = "keep"
) -> UpdateSpan:
    """Returns what the first update after `at` takes: samples in order while they fit into `num_tokens`.

    Pure: every rank computes the same, and no number of ranks is asked for. An update is complete when the next sample
    does not fit. At an epoch's end a last one that is not complete is made all the same (`keep`), left out (`drop`), or
    completed by the next epoch (`carry`).

    Raises:
        ValueError: if a sample has more than `num_tokens`, or `drop` leaves out everything.
    """
    epoch, start, room = at.epoch, at.samples_in_epoch, num_tokens
    spans: list[Span] = []
    while True:
        length = order.num_samples(epoch)
        stop, room = _fill(order, epoch, start, room)
        if stop > start:
            spans.append(Span(epoch, start, stop))
        if stop < length or (spans and not room):
            if not spans:
                raise ValueError(f"the sample at position {stop} of epoch {epoch} has more than {num_tokens} tokens")
            return UpdateSpan(tuple(spans))
        if spans and last_batch == "keep":
            return UpdateSpan(tuple(spans))
        if spans and last_batch == "drop":
            if start == 0:
                raise ValueError(f"all of epoch {epoch} fits into one update of {num_tokens} tokens: it is dropped")
            spans, room = [], num_tokens
        epoch, start = epoch + 1, 0


def _fill(order: MeasuredOrder, epoch: int, start: int, room: int) -> tuple[int, int]:
    """Returns where the samples from `start` on no longer fit into `room` tokens, and what room is left then."""
    length, size = order.num_samples(epoch), 256
    while start < length:
        count = min(size, length - start)
        ends = np.cumsum(order.tokens(order.ids(epoch, start, start + count)))
        fit = int(np.searchsorted(ends, room, side="right"))
        room -= int(ends[fit - 1]) if fit else 0
        start += fit
        if fit < count:
            return start, room
        size *= 2
    return start, room

"""An order of our own: reshuffled in every epoch, and no memory for any number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from samerun.core.order import Ids, require_span
from samerun.core.permutation import VERSION, Permutation


@lru_cache(maxsize=8)
def _permutation(length: int, seed: int, epoch: int) -> Permutation:
    return Permutation.of(length, seed, epoch)


@dataclass(frozen=True, slots=True)
class KeyedOrder:
    """Samples 0..length-1, shuffled anew in every epoch by a keyed permutation (`samerun.core.permutation`).

    Nothing is materialised and any position costs the same: the order for data sets of any size, and for jobs that must
    not hold 8 bytes per sample on every rank.

    >>> sorted(KeyedOrder(4, seed=1).ids(0, 0, 4).tolist())
    [0, 1, 2, 3]
    """

    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"an order needs at least one sample, not {self.length}")

    def num_samples(self, epoch: int) -> int:
        """Returns the number of samples, the same in every epoch."""
        return self.length

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the ids at positions start..stop-1."""
        require_span(start, stop, self.length)
        return _permutation(self.length, self.seed, epoch).span(start, stop)

    def positions(self, epoch: int, ids: Ids) -> Ids:
        """Returns the positions at which these ids stand. Raises ValueError for an id outside 0..length-1."""
        return _permutation(self.length, self.seed, epoch).inverse(ids)

    def identity(self) -> dict[str, Any]:
        """Returns the kind, the construction's version, the length and the seed."""
        return {"kind": "keyed", "version": VERSION, "num_samples": self.length, "seed": self.seed}

"""The global sample order: which sample stands at which position of an epoch, on any rank set.

An order has random access: `ids(epoch, start, stop)` needs no iteration from the beginning. It never depends on how
many ranks read it. Orders that are made of torch's own permutations live in `samerun.train.sampler`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from samerun.errors import Problem

Ids = npt.NDArray[np.int64]


class GlobalOrder(Protocol):
    """A deterministic, infinite sequence of epochs, each a finite sequence of sample ids."""

    def num_samples(self, epoch: int) -> int:
        """Returns how many positions `epoch` (0-based) has, padding included; at least 1."""
        ...

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the sample ids at positions start..stop-1 of `epoch`, shape `(stop - start,)` int64.

        Raises:
            ValueError: unless 0 <= start <= stop <= num_samples(epoch).
        """
        ...

    def identity(self) -> dict[str, Any]:
        """Returns what makes this order this order, as plain JSON data: equal identities mean equal ids everywhere."""
        ...


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """Samples 0, 1, 2, ... in every epoch.

    >>> SequentialOrder(5).ids(0, 1, 4).tolist()
    [1, 2, 3]
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"an order needs at least one sample, not {self.length}")

    def num_samples(self, epoch: int) -> int:
        """Returns the number of samples, the same in every epoch."""
        return self.length

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the positions themselves."""
        require_span(start, stop, self.length)
        return np.arange(start, stop, dtype=np.int64)

    def identity(self) -> dict[str, Any]:
        """Returns the kind and the length."""
        return {"kind": "sequential", "num_samples": self.length}


@dataclass(frozen=True, slots=True, eq=False)
class ExplicitOrder:
    """Epochs given as lists of ids; after the last one the last is repeated.

    The order for data that was sorted, filtered or mixed beforehand. Ids may occur more than once in an epoch. The
    arrays are copied and made read-only.
    """

    epochs: tuple[Ids, ...]

    def __init__(self, *epochs: Sequence[int] | Ids) -> None:
        arrays = tuple(np.array(epoch, dtype=np.int64) for epoch in epochs)
        if not arrays or any(array.ndim != 1 or not array.size for array in arrays):
            raise ValueError("an explicit order needs at least one epoch, and every epoch a flat list of ids")
        for array in arrays:
            array.setflags(write=False)
        object.__setattr__(self, "epochs", arrays)

    def num_samples(self, epoch: int) -> int:
        """Returns the length of that epoch's list."""
        return len(self.epochs[min(epoch, len(self.epochs) - 1)])

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns a read-only view of that epoch's list."""
        require_span(start, stop, self.num_samples(epoch))
        return self.epochs[min(epoch, len(self.epochs) - 1)][start:stop]

    def identity(self) -> dict[str, Any]:
        """Returns the kind, the lengths and a SHA-256 over the ids as little-endian int64."""
        digest = hashlib.sha256()
        for array in self.epochs:
            digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
        lengths = [len(array) for array in self.epochs]
        return {"kind": "explicit", "num_samples": lengths, "sha256": digest.hexdigest()}


def require_span(start: int, stop: int, length: int) -> None:
    """Raises ValueError unless start..stop lies inside an epoch of `length` positions."""
    if not 0 <= start <= stop <= length:
        raise ValueError(f"positions {start}..{stop} lie outside an epoch of {length}")


def check_order(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[Problem]:
    """Returns one problem (SR-ORDER-MISMATCH) for every part in which two order identities differ.

    `expected` is the identity that was saved with the progress, `found` that of the order at hand.
    """
    return [
        Problem(
            "SR-ORDER-MISMATCH",
            f"the saved position counts samples of another order: its {name} is not this order's",
            where={"key": name},
            expected=expected.get(name),
            found=found.get(name),
            hint="build the order that the run had (same dataset length, seed, shuffle, padding); a position means "
            "nothing in another one",
        )
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]

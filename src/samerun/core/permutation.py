"""A keyed permutation of 0..n-1 with random access: position -> id and back, without memory, for any n below 2**63.

A shuffle that has to be materialised costs 8 bytes per sample and per rank, and a position in it can only be looked
up after all of it was drawn. This one is a function: `Permutation.of(n, seed, epoch)` maps any array of positions to
ids, vectorised, and `inverse` maps ids back.

Construction (version 1; `docs/order.md` publishes test vectors). A position is written in mixed radix as
`left * b + right` with `a = ceil(sqrt(n))` and `b = ceil(n / a)`. An alternating Feistel network adds to one half,
modulo its radix, a keyed hash of the other (the unbalanced form of Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002). What lands outside 0..n-1 is mapped again until it does not ("cycle walking", same source);
since `a * b - n < a`, hardly anything does. The hash is two multiply-xorshift rounds with the constants of
splitmix64 (Steele, Lea, Flood 2014), of which the upper 32 bits are scaled to the radix. It is a shuffle for training
data, not a cipher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samerun.core.mix import GOLDEN, M1, M2, MASK, fold_key, mix64

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

VERSION = 1
ROUNDS = 16
"""Rounds of the network, eight on each half. Fewer pass at large lengths; the whole symmetric group of 6 needs
these."""

_BLOCK = 1 << 14  # positions worked on at once: three arrays of this size stay in a core's cache


@dataclass(frozen=True, slots=True)
class Permutation:
    """One permutation of 0..length-1. `keys` are one 64-bit word per round.

    >>> shuffle = Permutation.of(10, seed=1)
    >>> shuffle.at(np.arange(10)).tolist()
    [3, 0, 1, 4, 6, 2, 7, 8, 9, 5]
    >>> shuffle.inverse(shuffle.at(np.arange(3, 6))).tolist()
    [3, 4, 5]
    """

    length: int
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.length < 1 << 63:
            raise ValueError(f"a permutation has between 1 and 2**63 - 1 positions, not {self.length}")
        if not self.keys or any(not 0 <= key <= MASK for key in self.keys):
            raise ValueError("every round has a key of 64 bits")

    @classmethod
    def of(cls, length: int, seed: int, epoch: int = 0) -> Self:
        """Returns the permutation of `length` that belongs to a seed and an epoch (0-based)."""
        state = fold_key(VERSION, length, seed, epoch)
        return cls(length, tuple(mix64(state + GOLDEN * (number + 1)) for number in range(ROUNDS)))

    def at(self, positions: npt.ArrayLike) -> Ids:
        """Returns the ids at these positions, any shape, int64.

        Raises:
            ValueError: for a position outside 0..length-1.
        """
        return self._map(positions, forward=True)

    def inverse(self, ids: npt.ArrayLike) -> Ids:
        """Returns the positions at which these ids stand, any shape, int64. Raises as `at` does."""
        return self._map(ids, forward=False)

    def span(self, start: int, stop: int) -> Ids:
        """Returns the ids at positions start..stop-1, shape `(stop - start,)`."""
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"positions {start}..{stop} lie outside a permutation of {self.length}")
        return self._walk(np.arange(start, stop, dtype=np.uint64), forward=True)

    def _map(self, values: npt.ArrayLike, *, forward: bool) -> Ids:
        given: npt.NDArray[Any] = np.asarray(values)
        if given.size and (given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= self.length):
            raise ValueError(f"positions and ids are whole numbers from 0 to {self.length - 1}")
        flat = given.astype(np.uint64).reshape(-1)  # a copy: worked on in place
        return self._walk(flat, forward=forward).reshape(given.shape)

    def _walk(self, values: Words, *, forward: bool) -> Ids:
        step = self._forward if forward else self._backward
        for begin in range(0, values.size, _BLOCK):
            block = values[begin : begin + _BLOCK]
            step(block)
            while (outside := np.flatnonzero(block >= np.uint64(self.length))).size:
                again = block[outside]
                step(again)
                block[outside] = again
        return values.view(np.int64)

    def _forward(self, values: Words) -> None:
        a, b = _radices(self.length)
        left, right = np.divmod(values, np.uint64(b))
        hashed, spare = np.empty_like(values), np.empty_like(values)
        for number, key in enumerate(self.keys):
            target, source, radix = (left, right, a) if number % 2 == 0 else (right, left, b)
            _hash(source, key, radix, hashed, spare)
            np.add(target, hashed, out=target)
            np.subtract(target, np.uint64(radix), out=spare)
            np.minimum(target, spare, out=target)  # below the radix the difference wraps around to something huge
        np.multiply(left, np.uint64(b), out=values)
        np.add(values, right, out=values)

    def _backward(self, values: Words) -> None:
        a, b = _radices(self.length)
        left, right = np.divmod(values, np.uint64(b))
        hashed, spare = np.empty_like(values), np.empty_like(values)
        for number in range(len(self.keys) - 1, -1, -1):
            target, source, radix = (left, right, a) if number % 2 == 0 else (right, left, b)
            _hash(source, self.keys[number], radix, hashed, spare)
            np.subtract(target, hashed, out=target)
            np.add(target, np.uint64(radix), out=spare)
            np.minimum(target, spare, out=target)  # after a borrow `target` is huge and the sum is the right one
        np.multiply(left, np.uint64(b), out=values)
        np.add(values, right, out=values)


def _radices(length: int) -> tuple[int, int]:
    a = math.isqrt(length - 1) + 1
    return a, -(-length // a)


def _hash(source: Words, key: int, radix: int, out: Words, spare: Words) -> None:
    """Writes a keyed hash of `source`, scaled to 0..radix-1, into `out`."""
    np.add(source, np.uint64(key), out=out)
    np.right_shift(out, np.uint64(30), out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, np.uint64(M1), out=out)
    np.right_shift(out, np.uint64(27), out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, np.uint64(M2), out=out)
    np.right_shift(out, np.uint64(32), out=out)
    np.multiply(out, np.uint64(radix), out=out)
    np.right_shift(out, np.uint64(32), out=out)

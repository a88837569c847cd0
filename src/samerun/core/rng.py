"""Random numbers that belong to a sample, not to a rank: counter-based streams keyed by what they are for.

A generator that is advanced gives other numbers once another rank, another microbatch or another worker advances it. A
counter-based one is a function: the n-th number of the stream of (seed, epoch, sample, operation) is the same wherever
and whenever it is computed.

The function is Philox 4x64 with ten rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), the one in NumPy's `Philox`: block b of the stream of key (k0, k1) is what
`numpy.random.Philox(counter=b - 1, key=[k0, k1])` gives first. `samerun.train.rng` computes the same bits with torch.
`docs/rng.md` has the test vectors.

Keys (version 1). k0 = fold(version, text of the operation, seed, epoch), k1 = the sample id modulo 2**64, where `fold`
is `samerun.core.mix.fold_key` and a text is the first 8 bytes of its blake2b, big-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import numpy as np
import numpy.typing as npt

from samerun.core.mix import MASK, fold_key

VERSION = 1
Words = npt.NDArray[np.uint64]

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10


def text_key(text: str) -> int:
    """Returns the 64-bit word that stands for a name."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class StreamKey:
    """The 128-bit key of a stream."""

    words: tuple[int, int]

    @classmethod
    def of(cls, seed: int, *, epoch: int = 0, sample: int = 0, operation: str = "") -> Self:
        """Returns the key of what `operation` draws for `sample` in `epoch`. Numbers count modulo 2**64."""
        return cls((fold_key(VERSION, text_key(operation), seed, epoch), sample & MASK))

    @classmethod
    def named(cls, seed: int, name: str) -> Self:
        """Returns the key of an initialiser: the stream of a parameter belongs to its name, on any layout."""
        return cls.of(seed, operation=f"init:{name}")


def philox(keys: npt.ArrayLike, counters: npt.ArrayLike) -> Words:
    """Returns Philox 4x64-10 blocks, shape `(..., 4)` uint64.

    Args:
        keys: `(..., 2)` uint64.
        counters: `(...)` uint64, the lowest word of the counter; the three others are 0. Broadcast against the keys.

    >>> [hex(word) for word in philox([0, 0], 0).tolist()]
    ['0x16554d9eca36314c', '0xdb20fe9d672d0fdc', '0xd7e772cee186176b', '0x7e68b68aec7ba23b']
    """
    key = np.asarray(keys, dtype=np.uint64)
    count = np.asarray(counters, dtype=np.uint64)
    outer = np.broadcast_shapes(key.shape[:-1], count.shape)
    shape = outer or (1,)  # NumPy warns of overflow in scalars only
    k0, k1 = (np.broadcast_to(key[..., word], shape) for word in (0, 1))
    c0 = np.broadcast_to(count, shape)
    c1 = c2 = c3 = np.zeros(shape, dtype=np.uint64)
    for number in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        step0, step1 = (np.uint64(number * word & MASK) for word in WEYL)
        c0, c1, c2, c3 = high1 ^ c1 ^ (k0 + step0), low1, high0 ^ c3 ^ (k1 + step1), low0
    return np.stack([c0, c1, c2, c3], axis=-1).reshape(*outer, 4)


def _multiply(factor: int, words: Words) -> tuple[Words, Words]:
    """Returns the upper and lower 64 bits of a 128-bit product."""
    half, low_half = np.uint64(32), np.uint64(0xFFFFFFFF)
    f_high, f_low = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    w_high, w_low = words >> half, words & low_half
    low_low, middle = f_low * w_low, f_high * w_low
    carried = (low_low >> half) + (middle & low_half) + f_low * w_high
    return f_high * w_high + (middle >> half) + (carried >> half), np.uint64(factor) * words


def words(key: StreamKey, start: int, stop: int) -> Words:
    """Returns 64-bit words start..stop-1 of a stream, shape `(stop - start,)`: any part of it, at the price of that
    part.

    Equal to `np.random.Generator(generator(key))`'s raw words.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"words {start}..{stop} are no part of a stream")
    blocks = np.arange(start // 4, -(-stop // 4), dtype=np.uint64) + np.uint64(1)  # NumPy's first block has counter 1
    found = philox(key.words, blocks).reshape(-1)
    return found[start % 4 : start % 4 + stop - start]


def uniforms(key: StreamKey, start: int, stop: int) -> npt.NDArray[np.float64]:
    """Returns numbers start..stop-1 of a stream in [0, 1): the upper 53 bits, as `Generator.random` makes them."""
    return (words(key, start, stop) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(seed: int, *, epoch: int = 0, sample: int = 0, operation: str = "") -> np.random.Generator:
    """Returns NumPy's own generator at the beginning of a stream, for a sample's augmentation.

    Ask for it inside `__getitem__`, with the sample's id and what it is for; two operations on one sample need two
    names.
    """
    key = StreamKey.of(seed, epoch=epoch, sample=sample, operation=operation)
    return np.random.Generator(np.random.Philox(key=np.array(key.words, dtype=np.uint64)))


def keep_threshold(rate: float) -> int:
    """Returns the 32-bit threshold of dropout: an element is kept where its 32-bit word is at least that.

    Raises:
        ValueError: unless 0 <= rate < 1.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate is at least 0 and below 1, not {rate}")
    return round(rate * (1 << 32))


def halves(blocks: Words) -> npt.NDArray[np.uint32]:
    """Returns each 64-bit word as two of 32 bits, the lower one first, shape `(..., 2 * n)`."""
    low, high = blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32)
    return np.stack([low, high], axis=-1).reshape(*blocks.shape[:-1], -1).astype(np.uint32)

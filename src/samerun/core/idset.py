"""The set digest of sample ids: 32 hexadecimal digits for any number of ids, whoever holds them and in any order.

Definition (version 1). An integer id is its value modulo 2**64; a text id is the first 8 bytes of blake2b over its
UTF-8, big-endian, plus 1. Each id gives two words, `mix64(id XOR key)` for two fixed keys (texts: two others), and a
digest is the sum of each over the ids, modulo 2**64. So the digests of ranks, passes and updates add up to that of the
whole, and the digest of a run's ids so far minus that of a prefix is that of the rest. An id that occurs twice counts
twice.

A run that keeps only this can be checked against an order without having stored an id (`samerun audit --order`). It
guards against accidents, not against an adversary: for sets that differ, digests agree with probability 2**-128.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from samerun.core.mix import MASK, fold_key, mix64

VERSION = 1
_NUMBER = (fold_key(VERSION, 1), fold_key(VERSION, 2))
_TEXT = (fold_key(VERSION, 3), fold_key(VERSION, 4))


def ids_digest(ids: Iterable[int | str]) -> str:
    """Returns the set digest of `ids`.

    >>> ids_digest([])
    '00000000000000000000000000000000'
    >>> ids_digest([1, 2]) == ids_digest([2, 1]) == add_ids_digests([ids_digest([1]), ids_digest([2])])
    True
    """
    first = second = 0
    for item in ids:
        if isinstance(item, str):
            word, keys = (
                int.from_bytes(blake2b(item.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") + 1,
                _TEXT,
            )
        else:
            word, keys = item, _NUMBER
        word &= MASK
        first += mix64(word ^ keys[0])
        second += mix64(word ^ keys[1])
    return f"{first & MASK:016x}{second & MASK:016x}"


def add_ids_digests(parts: Iterable[str]) -> str:
    """Returns the digest of all ids from the digests of parts.

    Raises:
        ValueError: for text that is no digest.
    """
    first = second = 0
    for part in parts:
        if len(part) != 32:
            raise ValueError(f"a set digest has 32 hexadecimal digits, not {part!r}")
        first += int(part[:16], 16)
        second += int(part[16:], 16)
    return f"{first & MASK:016x}{second & MASK:016x}"

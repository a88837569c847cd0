"""Mixing of 64-bit words in plain Python: keys for permutations, streams and digests of ids."""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio, odd: its multiples spread evenly over 64 bits."""
M1, M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The multipliers of splitmix64 (Steele, Lea, Flood, OOPSLA 2014; Stafford's variant 13)."""


def mix64(value: int) -> int:
    """Returns splitmix64's finaliser of a 64-bit word: every input bit moves about half of the output bits.

    >>> hex(mix64(1))
    '0x5692161d100b05e5'
    """
    value &= MASK
    value = ((value ^ (value >> 30)) * M1) & MASK
    value = ((value ^ (value >> 27)) * M2) & MASK
    return value ^ (value >> 31)


def fold_key(*words: int) -> int:
    """Returns one 64-bit key out of any number of whole numbers; their order matters.

    Numbers of more than 64 bits, and negative ones, count modulo 2**64.
    """
    state = 0
    for word in words:
        state = mix64(state + GOLDEN + mix64(word + GOLDEN))
    return state

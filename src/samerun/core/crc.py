"""CRC-32 of values that were written in parts: the checksum of a concatenation from the checksums of its parts.

The arithmetic is that of zlib's `crc32_combine`: appending n bytes multiplies the running checksum, a polynomial over
GF(2), by x**(8 n) modulo the CRC's polynomial.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # reflected, as in zip archives


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC-32 of two byte strings, one after the other, from their own and the length of the second.

    >>> import zlib
    >>> combine_crc32(zlib.crc32(b"same"), zlib.crc32(b"run"), 3) == zlib.crc32(b"samerun")
    True
    """
    return _multiply(_shift(second_bytes), first) ^ second


@lru_cache(maxsize=4096)
def _shift(num_bytes: int) -> int:
    """Returns x**(8 * num_bytes) modulo the polynomial."""
    result, power, left = 1 << 31, 1 << 23, num_bytes  # 1, and x**8
    while left:
        if left & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        left >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product

"""CRC-32 of values that were written in parts: the checksum of a concatenation from the checksums of its parts.

The arithmetic is that of zlib's `crc32_combine` (Mark Adler), which Python's `zlib` does not offer: appending n bytes
multiplies the running checksum, a polynomial over GF(2), by x**(8 n) modulo the CRC's polynomial.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # reflected, as in zip archives: the highest bit is the coefficient of x**0
_ZEROS = bytes(1 << 16)


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC-32 of two byte strings, one after the other, from their own and the length of the second.

    >>> combine_crc32(zlib.crc32(b"same"), zlib.crc32(b"run"), 3) == zlib.crc32(b"samerun")
    True
    """
    return _multiply(_shift(second_bytes), first) ^ second


def crc32_of_zeros(size: int) -> int:
    """Returns the CRC-32 of `size` zero bytes.

    >>> crc32_of_zeros(1 << 40)
    227968344
    """
    if size <= len(_ZEROS):
        return zlib.crc32(_ZEROS[:size])
    half = crc32_of_zeros(size // 2)
    joined = combine_crc32(half, half, size // 2)
    return zlib.crc32(b"\0", joined) if size % 2 else joined


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

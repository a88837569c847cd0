"""CRC32 of bytes whose parts were summed one by one: the checksum of a concatenation from those of its parts.

The polynomial arithmetic is that of zlib's `crc32_combine` (zlib 1.2.12 and later, Mark Adler), which Python's `zlib`
does not offer: a checksum is a polynomial modulo P over GF(2), and appending n bytes multiplies it by x^(8n).
"""

from __future__ import annotations

import zlib
from functools import cache, lru_cache

_POLYNOMIAL = 0xEDB8_8320  # reflected: the highest bit is the coefficient of x^0
_ONE = 1 << 31
_ZEROS = bytes(1 << 16)


def join_crc32(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC32 of two parts together; the second has `second_bytes` bytes.

    >>> join_crc32(zlib.crc32(b"samer"), zlib.crc32(b"un"), 2) == zlib.crc32(b"samerun")
    True
    """
    return _multiply(_shift(second_bytes), first) ^ second


def crc32_of_zeros(size: int) -> int:
    """Returns the CRC32 of `size` zero bytes."""
    if size <= len(_ZEROS):
        return zlib.crc32(_ZEROS[:size])
    half = crc32_of_zeros(size // 2)
    joined = join_crc32(half, half, size // 2)
    return zlib.crc32(b"\0", joined) if size % 2 else joined


def _multiply(a: int, b: int) -> int:
    product, bit = 0, _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@cache
def _power(k: int) -> int:
    """Returns x^(2^k) modulo P."""
    return _ONE >> 1 if k == 0 else _multiply(_power(k - 1), _power(k - 1))


@lru_cache(maxsize=4096)
def _shift(num_bytes: int) -> int:
    """Returns x^(8 num_bytes) modulo P."""
    product, k, bits = _ONE, 0, num_bytes * 8
    while bits:
        if bits & 1:
            product = _multiply(_power(k), product)
        bits >>= 1
        k += 1
    return product

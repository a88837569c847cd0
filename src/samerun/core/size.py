"""Amounts of memory as people write them: `80GiB`, `512MB`."""

from __future__ import annotations

import re

_BINARY = {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_DECIMAL = {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)}
_UNITS = {"B": 1, **_BINARY, **_DECIMAL}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z", re.ASCII)


def parse_size(text: str) -> int:
    """Returns the number of bytes that `text` means; binary (GiB) and decimal (GB) units, case does not matter.

    >>> parse_size("80GiB"), parse_size("1.5 kB"), parse_size("4096")
    (85899345920, 1500, 4096)

    Raises:
        ValueError: if it is no amount, or is zero.
    """
    match = _AMOUNT.match(text)
    factor = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"an amount of memory looks like 80GiB or 512MB, not {text!r}")
    if (size := round(float(match[1]) * factor)) < 1:
        raise ValueError(f"an amount of memory is at least one byte, not {text!r}")
    return size


def format_size(size_bytes: int) -> str:
    """Returns `size_bytes` in the binary unit that keeps it readable.

    >>> format_size(33500000000), format_size(512)
    ('31.20 GiB', '512 B')
    """
    for power, prefix in reversed(list(enumerate("KMGTP", start=1))):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:.2f} {prefix}iB"
    return f"{size_bytes} B"

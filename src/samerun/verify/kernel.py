"""The digest's inner loop, compiled. Import it only where bytes are about to be read: numba takes a moment to load."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from samerun.core import digest

_STRIDE = np.uint64(digest.STRIDE)
_MULTIPLIER_1 = np.uint64(digest.MULTIPLIER_1)
_MULTIPLIER_2 = np.uint64(digest.MULTIPLIER_2)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def _sum_terms(bits: npt.NDArray[Any], starts: npt.NDArray[np.uint64], length: int, seed: np.uint64) -> np.uint64:
    """Sums the terms of runs of `length` elements that follow each other in `bits`; see `samerun.core.digest`.

    The row is a slice and the index key is multiplied afresh, not carried along, because only then does the compiler
    use vector instructions: three times as fast.
    """
    total = np.uint64(0)
    for run in range(starts.size):
        first_key = seed + starts[run] * _STRIDE
        row = bits[run * length : (run + 1) * length]
        for element in range(row.size):
            z = (first_key + np.uint64(element) * _STRIDE) ^ np.uint64(row[element])
            z = (z ^ (z >> _30)) * _MULTIPLIER_1
            z = (z ^ (z >> _27)) * _MULTIPLIER_2
            total += z ^ (z >> _31)
    return total


def _compile() -> Any:
    """Compiles for one element width at a time, at first use (a fraction of a second), and keeps the result on disk.

    Without the GIL, so that a few threads can digest a few tensors at once.
    """
    try:
        return numba.njit(cache=True, nogil=True)(_sum_terms)
    except RuntimeError:  # numba finds no directory that it may write its cache to
        return numba.njit(nogil=True)(_sum_terms)


sum_terms: Any = _compile()

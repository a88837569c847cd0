"""Half-open boxes in N dimensions, as columns, and whether a set of them tiles a tensor exactly.

A box is a row of `offsets` and of `sizes`, both (boxes, ndim) int64, in elements. Coverage is counted in values: names
that are present and files that are whole both pass on checkpoints in which part of a tensor was never written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samerun.core.state import Tiling

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# How many boxes one irregular region may be cut into slabs for before counting gives up; regular tilings never get here.
_SLAB_BUDGET = 4_000_000


@dataclass(frozen=True, slots=True)
class Box:
    """One box: first element and extent along every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        """Returns slices, as Python writes them.

        >>> str(Box((0, 3), (4, 2)))
        '[0:4, 3:5]'
        """
        spans = (f"{first}:{first + size}" for first, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"


@dataclass(frozen=True, slots=True)
class Coverage:
    """How a tiling covers its tensor.

    `missing_elements` counts values in no box and `shared_elements` values in several boxes that are not replicas;
    both are None when a set of boxes is too irregular to be counted, in which case it is not exact. `outside` and
    `overlapping` name boxes by row, the latter the first few pairs. `replicas` counts boxes that repeat another one.
    """

    missing_elements: int | None
    shared_elements: int | None
    first_gap: Box | None = None
    outside: tuple[int, ...] = ()
    overlapping: tuple[tuple[int, int], ...] = ()
    replicas: int = 0

    @property
    def exact(self) -> bool:
        """Whether every value lies in exactly one box, replicas apart, and no box reaches outside."""
        return self.missing_elements == 0 and self.shared_elements == 0 and not self.outside


def find_outside(shape: tuple[int, ...], tiling: Tiling) -> tuple[int, ...]:
    """Returns the rows of boxes that are not inside a tensor of this shape (negative sizes included)."""
    whole = np.array(shape, np.int64)
    bad = (tiling.offsets < 0) | (tiling.sizes < 0) | (tiling.sizes > whole) | (tiling.offsets > whole - tiling.sizes)
    return tuple(np.flatnonzero(bad.any(axis=1)).tolist())

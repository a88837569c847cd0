"""How far two directions lie apart, from a few projections of each. Pure; `samerun.train.sketch` makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

NUM_PROJECTIONS = 8
"""Projections of a tensor in a trace."""


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the distance of two unit vectors as their projections show it: about 0 if equal, 2 if opposite.

    >>> apart((1.0, -0.5), (1.0, -0.5))
    0.0
    >>> round(apart((1.0, -1.0, 1.0, -1.0), (-1.0, 1.0, -1.0, 1.0)), 3)
    2.0
    """
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one))

"""Whether every tensor of a logical state is tiled exactly, counted in values."""

from __future__ import annotations

from samerun.core.box import check_tilings
from samerun.core.state import LogicalState
from samerun.errors import Problem
from samerun.formats.base import coverage_problems


def check_coverage(state: LogicalState) -> list[Problem]:
    """Returns the findings for every tensor with a gap, an overlap or a piece out of bounds."""
    entries = list(state.tensors.items())
    found = check_tilings([(entry.shape, entry.tiling) for _, entry in entries])
    return [
        problem
        for (key, _), coverage in zip(entries, found, strict=True)
        if not coverage.exact
        for problem in coverage_problems(key, coverage)
    ]

"""What a manifest claims of each part of the state, and what that makes of a difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from samerun.errors import Severity

EXPECTED_TO_CHANGE = "expected-to-change"


@dataclass(frozen=True, slots=True)
class Declared:
    """One entry of a manifest's `declare` table. `bound` is the largest permitted relative deviation, if bounded."""

    changes: bool = False
    bound: float | None = None

    @property
    def severity(self) -> Severity:
        """Severity of a difference that no bound can excuse: a note where a change is expected, else an error."""
        return Severity.NOTE if self.changes else Severity.ERROR

    def grade(self, expected: Any, found: Any) -> Severity:
        """Returns the severity of a difference between two values; numbers within the bound are only noted."""
        if self.bound is not None and _deviation(expected, found) <= self.bound:
            return Severity.NOTE
        return self.severity


def _deviation(expected: Any, found: Any) -> float:
    """Returns the relative deviation between two numbers, or the largest in two lists; infinite if not comparable."""
    if isinstance(expected, list) and isinstance(found, list):
        first, second = cast("list[Any]", expected), cast("list[Any]", found)
        if len(first) != len(second):
            return float("inf")
        return max((_deviation(a, b) for a, b in zip(first, second, strict=True)), default=0.0)
    if isinstance(expected, bool) or isinstance(found, bool):
        return 0.0 if expected == found else float("inf")
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return abs(found - expected) / abs(expected) if expected else (0.0 if found == expected else float("inf"))
    return 0.0 if expected == found else float("inf")


def read_declared(declare: Mapping[str, Any], part: str) -> Declared:
    """Returns what is claimed of `part` (`parameters`, `optimizer`, ...); what is not in the table is exact.

    Random-number state is the exception: it is expected to change unless the table says otherwise, because its streams
    belong to ranks.
    """
    value = declare.get(part, EXPECTED_TO_CHANGE if part == "rng" else "exact")
    if isinstance(value, Mapping):
        return Declared(bound=float(cast("Mapping[str, Any]", value)["bounded"]))
    bound = getattr(value, "bounded", None)
    return Declared(bound=float(bound)) if bound is not None else Declared(changes=value == EXPECTED_TO_CHANGE)

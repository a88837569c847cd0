"""What is neither tensor nor group travels by rule: equal on all ranks becomes one, different is kept for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from samerun.core.plain import plain, same_plain
from samerun.core.state import LogicalState
from samerun.errors import Problem, Severity

_RANK = re.compile(r"rank\d+$")
_SECTIONS = ("rng", "data", "objects")
_SHOWN = 8


def settle_objects(state: LogicalState) -> tuple[LogicalState, list[Problem]]:
    """Returns the state with equal values of several ranks made one, and what is kept for each rank as a finding.

    Readers hold a value of which every rank has its own as a mapping with the keys `rank0`, `rank1`, ...
    """
    kept: list[str] = []
    merged: dict[str, Any] = {
        section: {name: _settle(f"{section}.{name}", value, kept) for name, value in getattr(state, section).items()}
        for section in _SECTIONS
    }
    if not kept:
        return replace(state, **merged), []
    shown = ", ".join(kept[:_SHOWN]) + (f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else "")
    return replace(state, **merged), [
        Problem(
            "SR-CONVERT-RANKS",
            f"{len(kept)} values differ between ranks and are kept for each of them: {shown}",
            severity=Severity.WARNING,
            where={"key": kept[0]},
            hint="whoever resumes at another world size decides which rank gets which; none was chosen for all",
        )
    ]


def _settle(name: str, value: Any, kept: list[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    if not _is_per_rank(value):
        return {key: _settle(f"{name}.{key}", item, kept) for key, item in value.items()}
    if len(value) < 2:
        return value
    first, *others = (plain(item, name) for item in value.values())
    if all(same_plain(first, other) for other in others):
        return next(iter(value.values()))
    kept.append(name)
    return value


def _is_per_rank(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(key, str) and _RANK.match(key) for key in value)

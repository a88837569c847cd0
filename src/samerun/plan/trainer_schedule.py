"""The Trainer's schedule, read from the arguments that its checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from samerun.core.schedule import Schedule, trainer_schedule
from samerun.core.state import LogicalState

_RTOL = 1e-6
"""The saved rate and the formula differ by rounding only, where the formula is the run's."""


def read_trainer_schedule(state: LogicalState) -> Schedule | None:
    """Returns the schedule that the Trainer built from its arguments, or None where this is not how the run has it.

    `LambdaLR` is what any script may use, and the arguments have a default. So the formula counts only if it gives the
    rates that the scheduler had when it was saved.
    """
    saved = state.scheduler
    if not isinstance(saved, Mapping) or "lr_lambdas" not in saved:
        return None
    arguments = {name: _value(state.objects.get(f"training_args.{name}")) for name in _NAMES}
    total, position = state.objects.get("trainer_state.max_steps"), saved.get("last_epoch")
    rates, base = saved.get("_last_lr"), saved.get("base_lrs")
    if not isinstance(total, int) or not isinstance(position, int) or not rates or not base:
        return None
    try:
        schedule = trainer_schedule(
            str(arguments["lr_scheduler_type"]),
            tuple(map(float, base)),
            position,
            {
                "warm_up": _warm_up(arguments, total),
                "total": total,
                "rate": float(arguments["learning_rate"] or max(base)),
                **(cast("Mapping[str, Any]", arguments["lr_scheduler_kwargs"]) or {}),
            },
        )
        expected = schedule.rates(position)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None
    same = len(expected) == len(rates) and all(
        math.isclose(one, float(two), rel_tol=_RTOL, abs_tol=1e-15) for one, two in zip(expected, rates, strict=True)
    )
    return schedule if same else None


_NAMES = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "learning_rate")


def _value(argument: Any) -> Any:
    """A plain argument as it is, an enumeration's member as its value."""
    parts: Any = getattr(argument, "args", None)
    return parts[0] if isinstance(parts, tuple) and parts else argument


def _warm_up(arguments: Mapping[str, Any], total: int) -> int:
    """Steps; a part of 1 is one of all steps, as `warmup_ratio` is in releases before 5."""
    steps = arguments["warmup_steps"] or 0
    if 0 < steps < 1 or (not steps and arguments["warmup_ratio"]):
        return math.ceil(total * (steps or arguments["warmup_ratio"]))
    return int(steps)

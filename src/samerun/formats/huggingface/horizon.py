"""Whether the rate that Trainer's scheduler reached is that of the horizon recorded beside it.

Trainer's schedules are `LambdaLR` over functions that no file holds; kind, warm-up and horizon lie in
`training_args.bin` and `trainer_state.json`, and give the rate by formula (`transformers/optimization.py`, 4.20 to
5.24).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from samerun.errors import Problem, Severity
from samerun.formats.torchfile.values import Inert

_RTOL = 1e-6  # the formula is the one that gave the rate: only the last bits of a float64 may differ
_ATOL = 1e-12


def check_horizon(state: Mapping[str, Any], arguments: Mapping[str, Any], scheduler: Any) -> list[Problem]:
    """Compares the scheduler's last rates with the formula at its position. Silent where anything is not known.

    Args:
        state: `trainer_state.json`. arguments: the fields of `training_args.bin`. scheduler: `scheduler.pt`.
    """
    if not isinstance(scheduler, Mapping) or not _is_trainers(scheduler):
        return []
    position = scheduler.get("last_epoch")
    last, base = _rates(scheduler.get("_last_lr")), _rates(scheduler.get("base_lrs"))
    total = _positive(state.get("max_steps")) or _positive(arguments.get("max_steps"))
    if not isinstance(position, int) or total is None or not last or len(last) != len(base):
        return []
    factor = _factor(_name(arguments.get("lr_scheduler_type")), arguments, position, total)
    if factor is None or all(
        math.isclose(rate * factor, found, rel_tol=_RTOL, abs_tol=_ATOL) for rate, found in zip(base, last, strict=True)
    ):
        return []
    return [_differs(position, total, [rate * factor for rate in base], last)]


def _is_trainers(scheduler: Mapping[Any, Any]) -> bool:
    """Whether this is a schedule that transformers made: partials, which save nothing. A script's own may be any."""
    shapes = scheduler.get("lr_lambdas")
    return isinstance(shapes, list) and bool(shapes) and all(shape == {} for shape in shapes)


def _factor(kind: str, arguments: Mapping[str, Any], at: int, total: int) -> float | None:
    """Returns what multiplies base rates after `at` steps of `total`, None for a schedule whose formula is not here."""
    warm = _warmup(arguments, total)
    if warm is None or arguments.get("lr_scheduler_kwargs"):
        return None
    if kind == "constant":
        return 1.0
    if kind in ("constant_with_warmup", "linear", "cosine") and at < warm:
        return at / max(1, warm)
    share = (at - warm) / max(1, total - warm)
    formulas = {
        "constant_with_warmup": 1.0,
        "linear": max(0.0, (total - at) / max(1, total - warm)),
        "cosine": max(0.0, 0.5 * (1.0 + math.cos(math.pi * share))),
    }
    return formulas.get(kind)


def _warmup(arguments: Mapping[str, Any], total: int) -> int | None:
    """Returns the steps of warm-up: a number, or below one a share of the horizon (`warmup_ratio` before 5)."""
    steps, ratio = arguments.get("warmup_steps"), arguments.get("warmup_ratio")
    if not isinstance(steps, int | float):
        return None
    if steps >= 1:
        return int(steps)
    share = steps or (ratio if isinstance(ratio, int | float) else 0)
    return math.ceil(total * share)


def _name(kind: Any) -> str:
    value = kind.args[0] if isinstance(kind, Inert) and kind.args else kind
    return value if isinstance(value, str) else ""


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _rates(value: Any) -> list[float]:
    return list(value) if isinstance(value, list) and all(type(rate) is float for rate in value) else []


def _differs(position: int, total: int, wanted: list[float], found: list[float]) -> Problem:
    return Problem(
        "SR-SCHED-HORIZON",
        f"after {position} steps the schedule has another rate than with the horizon recorded here, {total} updates",
        severity=Severity.WARNING,
        where={"key": "scheduler._last_lr"},
        expected=wanted,
        found=found,
        hint="the files are of runs with different horizons or arguments; a resumed run follows the recorded one and "
        "jumps to its rate at the next update; right if the script gave Trainer a scheduler of its own",
    )

"""The learning rates that the updates after the checkpoint will use, as far as the checkpoint says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from samerun.core.schedule import PLATEAU, Progress, check_rates, parse_schedule, stride_of
from samerun.core.state import LogicalState
from samerun.errors import Problem, UsageError
from samerun.plan.batch import LearningRatePlan
from samerun.plan.trainer_schedule import read_trainer_schedule

NEXT_UPDATES = 20
CONSTANT = "constant"
"""The kind of a schedule that was not saved: the rates stay, unless the script computes them from something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRates:
    """Rates by parameter group of consecutive updates from `first_update` on; `why_not` says why no more are known.

    Adjacent groups with equal rates are listed all the same: `rates[update][group]`.
    """

    first_update: int
    kind: str | None
    rates: tuple[tuple[float, ...], ...] = ()
    why_not: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields."""
        rates = [list(each) for each in self.rates]
        return {"first_update": self.first_update, "schedule": self.kind, "rates": rates, "why_not": self.why_not}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `to_json` back."""
        rates = tuple(tuple(each) for each in body["rates"])
        return cls(first_update=body["first_update"], kind=body["schedule"], rates=rates, why_not=body["why_not"])


def plan_rates(
    state: LogicalState,
    policy: LearningRatePlan,
    first_update: int,
    *,
    old_batch: int,
    new_batch: int,
    progress: Progress = "updates",
    count: int = NEXT_UPDATES,
) -> PlannedRates:
    """Returns the rates of the next `count` updates under a learning-rate policy.

    A run without a scheduler keeps its groups' rates, unless its script computes them: `CONSTANT` binds nobody. With
    `progress="samples"` the schedule advances by new / old batch per update. A policy that names a value sets the
    largest base rate to it and the others in proportion. A plateau's rates are those at hand until its patience can run
    out, stepped at most once per update (or as often as it was on average). A schedule that was stepped k times per
    update (Accelerate steps once per process) goes on like that; one that was stepped otherwise (once per epoch) is not
    known; Megatron's counts samples.
    """
    groups = [group.hyperparameters for group in state.groups]
    factor = 1.0 if policy.factor is None else policy.factor
    if policy.value is not None:
        largest = max((_rate(group) for group in groups), default=0.0)
        factor = policy.value / largest if largest else 1.0
    if state.scheduler is None:
        if not groups or any("lr" not in group for group in groups):
            return PlannedRates(first_update=first_update, kind=None, why_not="the checkpoint holds no learning rate")
        constant = tuple(float(group["lr"]) * factor for group in groups)
        return PlannedRates(first_update=first_update, kind=CONSTANT, rates=(constant,) * count)
    try:
        schedule = read_trainer_schedule(state) or parse_schedule(state.scheduler, groups)
        stride = stride_of(progress, old_batch, new_batch)
        if schedule.kind == PLATEAU:
            stride = max(1.0, math.ceil(schedule.position / max(first_update - 1, 1)))
        elif schedule.unit == "samples":
            stride *= old_batch
        else:
            stride *= _steps_per_update(schedule.position, first_update - 1)
        rates = schedule.next_rates(count, stride=stride, factor=factor)
    except (UsageError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        why = error.problems[0].message if isinstance(error, UsageError) else f"its state does not tell ({error})"
        return PlannedRates(first_update=first_update, kind=None, why_not=why)
    why = None if len(rates) == count else f"from update {first_update + len(rates)} on they follow the loss"
    return PlannedRates(first_update=first_update, kind=schedule.kind, rates=rates, why_not=why)


def _rate(group: Any) -> float:
    return float(group.get("initial_lr", group.get("lr", 0.0)))


def schedule_horizon(state: LogicalState, updates: int) -> int | None:
    """Returns after how many updates the saved schedule has run its course; None if it never does, or does not tell."""
    try:
        groups = [group.hyperparameters for group in state.groups]
        schedule = read_trainer_schedule(state)
        if schedule is None and state.scheduler is not None:
            schedule = parse_schedule(state.scheduler, groups)
        if schedule is None or schedule.unit == "samples" or schedule.horizon is None:
            return None
        return schedule.horizon // _steps_per_update(schedule.position, updates)
    except (UsageError, ValueError, TypeError, KeyError):
        return None


def _steps_per_update(position: int, updates: int) -> int:
    """Returns the whole number of steps that each update made."""
    if not updates and not position:
        return 1
    if not updates or not position or position % updates:
        raise ValueError(f"it was stepped {position} times in {updates} updates: when will it be again?")
    return position // updates


def check_planned_rates(
    planned: PlannedRates | None, found: Mapping[int, Sequence[float]], *, bound: float = 0.0
) -> list[Problem]:
    """Returns SR-SCHEDULE-RATE for the first update that used other rates than the plan printed.

    Args:
        planned: the plan's; None, rates that are not known, and those of a run without a scheduler say nothing.
        found: rates by group of each completed update, by index.
        bound: the largest relative difference, where one was declared.
    """
    if planned is None or planned.kind == CONSTANT:
        return []
    rtol = max(bound, 1e-6)
    for number, wanted in enumerate(planned.rates, planned.first_update):
        if number in found and (wrong := check_rates([wanted], [found[number]], first_update=number, rtol=rtol)):
            return wrong
    return []

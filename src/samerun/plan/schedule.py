"""The learning rates that the updates after the checkpoint will use, as far as the checkpoint says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samerun.core.schedule import Progress, parse_schedule, stride_of
from samerun.core.state import LogicalState
from samerun.errors import UsageError
from samerun.plan.batch import LearningRatePlan

NEXT_UPDATES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRates:
    """Rates by parameter group of consecutive updates from `first_update` on, or why they are not known.

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

    A run without a scheduler keeps its groups' rates. With `progress="samples"` the schedule advances by new / old
    batch per update. A policy that names a value sets the largest base rate to it and the others in proportion.
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
        return PlannedRates(first_update=first_update, kind="constant", rates=(constant,) * count)
    try:
        schedule = parse_schedule(state.scheduler, groups)
        rates = schedule.next_rates(count, stride=stride_of(progress, old_batch, new_batch), factor=factor)
    except (UsageError, ValueError, TypeError, ZeroDivisionError) as error:
        why = error.problems[0].message if isinstance(error, UsageError) else f"its state is unusable ({error})"
        return PlannedRates(first_update=first_update, kind=None, why_not=why)
    return PlannedRates(first_update=first_update, kind=schedule.kind, rates=rates)


def _rate(group: Any) -> float:
    return float(group.get("initial_lr", group.get("lr", 0.0)))

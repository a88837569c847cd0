"""What follows from a manifest's batch for a checkpoint: what each option costs, and the rates of the next updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samerun.core.batch import BatchOption, OptionCost, cost_of
from samerun.core.state import LogicalState
from samerun.errors import Problem, Severity
from samerun.manifest.models import Manifest
from samerun.plan.batch import LearningRatePlan
from samerun.plan.position import samples_left
from samerun.plan.schedule import NEXT_UPDATES, PlannedRates, plan_rates, schedule_horizon


def plan_costs(manifest: Manifest, state: LogicalState, options: Sequence[BatchOption]) -> Iterator[OptionCost]:
    """Yields what each option costs, as far as checkpoint and manifest tell: what is left of the epoch, the horizon."""
    left, horizon = samples_left(state), schedule_horizon(state, manifest.progress.update)
    for option in options:
        yield cost_of(
            option,
            manifest.batch.global_batch,
            samples_left=left,
            eval_every=manifest.window.eval_every,
            schedule_updates=horizon,
            updates_done=manifest.progress.update,
        )


def plan_window_rates(
    manifest: Manifest, state: LogicalState, rate: LearningRatePlan, chosen: BatchOption
) -> PlannedRates:
    """Returns the rates of the window's updates (20 at least) on the destination."""
    return plan_rates(
        state,
        rate,
        manifest.progress.update + 1,
        old_batch=manifest.batch.global_batch,
        new_batch=chosen.global_batch,
        progress=rate.schedule,
        count=max(NEXT_UPDATES, manifest.window.updates),
    )


def check_rates_known(rate: LearningRatePlan, rates: PlannedRates) -> Iterator[Problem]:
    """Yields SR-SCHEDULE-UNKNOWN where the schedule follows samples and its rates are not known.

    Such a candidate has no control to be compared with: only the plan knows its rates.
    """
    if rate.schedule == "samples" and not rates.rates:
        yield Problem(
            "SR-SCHEDULE-UNKNOWN",
            f"the schedule is to follow samples, and its rates cannot be computed: {rates.why_not}",
            Severity.WARNING,
            where={"key": "batch.changed.learning_rate.schedule"},
            hint="nothing will be compared with the rates that the job uses; keep the schedule by updates to compare",
        )

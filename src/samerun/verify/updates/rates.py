"""What rounding cannot touch in an update: its learning rates, the loss scale, and whether a scaler skipped it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from samerun.core.tolerance import deviation
from samerun.errors import Problem
from samerun.plan.schedule import check_planned_rates
from samerun.verify.evidence.observed import Observed, ObservedUpdate
from samerun.verify.evidence.window import WindowPlan


def check_planned(candidate: Observed, plan: WindowPlan) -> list[Problem]:
    """Rates that the control has are compared with it bit for bit; these are known without one."""
    found = {item.update: item.lr for item in candidate.updates if item.update in plan.indices}
    return check_planned_rates(plan.planned_rates, found, bound=plan.rate_bound)


def check_rates(pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan) -> list[Problem]:
    if plan.rate_factor is None:
        return []
    for control, candidate in pairs:
        expected = tuple(rate * plan.rate_factor for rate in control.lr)
        if not _rates_agree(expected, candidate.lr, plan):
            return [
                Problem(
                    "SR-UPD-LR",
                    "the learning rate of an update differs from the control's",
                    where=candidate.where(stage=plan.stage),
                    expected=list(expected),
                    found=list(candidate.lr),
                    hint=_rate_hint(expected, candidate, pairs),
                )
            ]
    return []


def _rates_agree(expected: Sequence[float], found: Sequence[float], plan: WindowPlan) -> bool:
    """Whether every group has its rate.

    Groups may be cut otherwise at another layout: Megatron's experts are one of their own where they are spread over
    ranks. Which parameter is in which, and at which rate, is compared after loading; here, that no rate is new or gone.
    """
    if len(expected) != len(found):
        expected, found = sorted(set(expected)), sorted(set(found))
    return len(expected) == len(found) and all(map(partial(_rate_agrees, plan=plan), expected, found))


def _rate_agrees(expected: float, found: float, plan: WindowPlan) -> bool:
    if plan.rate_factor == 1.0 and plan.rate_bound == 0.0:
        return expected == found
    return deviation(expected, found) <= max(plan.rate_bound, 1e-12)  # a policy's product may round in another order


def _rate_hint(
    expected: Sequence[float], candidate: ObservedUpdate, pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]]
) -> str:
    """Returns the likely reason: the control uses these rates at another update, or by a constant factor."""
    for control, _ in pairs:
        if control.lr == candidate.lr and control.update != candidate.update:
            ahead = control.update - candidate.update
            return f"the control uses these rates at update {control.update}: the schedule is {ahead:+d} steps off"
    ratios = {round(b / a, 9) for a, b in zip(expected, candidate.lr, strict=False) if a}
    if len(ratios) == 1:
        return f"every rate is {ratios.pop():g} times the control's: the base rate was changed or scaled"
    return "the schedule is rebuilt with another horizon, or bound to groups that the optimizer no longer uses"


def check_scaler(pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]]) -> Iterator[Problem]:
    for control, candidate in pairs:
        if control.loss_scale != candidate.loss_scale:
            yield Problem(
                "SR-UPD-SCALE",
                "the loss scale differs from the control's",
                where=candidate.where(),
                expected=control.loss_scale,
                found=candidate.loss_scale,
                hint="save and restore the gradient scaler; a dummy step while loading changes it",
            )
            return
        if control.skipped != candidate.skipped:
            yield Problem(
                "SR-UPD-SKIPPED",
                "the scaler skipped another number of attempts than in the control",
                where=candidate.where(),
                expected=control.skipped,
                found=candidate.skipped,
                hint="the loss scale or the gradients differ; the schedule must not advance on a skipped attempt",
            )
            return

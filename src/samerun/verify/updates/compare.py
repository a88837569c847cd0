"""Updates against the control: the first one, and a window, number by number and in causal order.

Exact things are compared exactly: the update's index, the samples it consumed, the tokens they hold, the learning rate
of every group, the loss scale, whether a scaler skipped it. Numbers that rounding may move are compared with their
sealed band. Behind a difference in samples the numbers of a continuation are not compared: they differ for a reason
that is already named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from samerun.core.tolerance import deviation
from samerun.errors import Problem
from samerun.verify.evidence.observed import Observed, ObservedUpdate
from samerun.verify.evidence.window import WindowPlan
from samerun.verify.order.audit import Audit, audit_prefix, audit_window, check_audit, window_ids
from samerun.verify.updates.directions import check_directions
from samerun.verify.updates.movement import check_movement
from samerun.verify.updates.numbers import NUMBERS, check_numbers, check_tensors
from samerun.verify.updates.rates import check_planned, check_rates, check_scaler


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """What the comparison found. `series` has one row per update, for the record and its picture.

    `compared` is how many updates had their numbers compared: none behind the first difference in samples.
    """

    problems: tuple[Problem, ...]
    audit: Audit | None
    series: tuple[Mapping[str, Any], ...]
    worst: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    compared: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the stage's `measured` part."""
        return {
            "audit": self.audit.to_json() if self.audit else None,
            "compared": self.compared,
            "worst": {metric: dict(row) for metric, row in self.worst.items()},
            "series": [dict(row) for row in self.series],
        }


def compare_window(control: Observed, candidate: Observed, plan: WindowPlan) -> WindowReport:
    """Compares the candidate's window with the control's, under the sealed plan."""
    wanted, found = control.by_update(), candidate.by_update()
    pairs = [(wanted[index], found[index]) for index in plan.indices if index in wanted and index in found]
    audit = _audit(control, candidate, plan)
    comparable = _comparable(pairs, audit, plan)
    stated = (
        plan if plan.samples == "exact" else replace(plan, bands=tuple(b for b in plan.bands if b.origin == "user"))
    )
    worst: dict[str, dict[str, Any]] = {}
    problems = [
        *_check_indices(candidate, plan),
        *_check_finite(candidate),
        *_check_recorded(pairs, plan),
        *_check_samples(audit, pairs, plan),
        *(check_rates(pairs, plan) or check_planned(candidate, plan)),
        *check_scaler(pairs),
        *check_numbers(comparable, stated, worst),
        *check_tensors(comparable, stated, worst),
        *check_directions(comparable, stated, worst),
        *check_movement(pairs, plan),
        *_check_boundaries(candidate, plan),
    ]
    return WindowReport(
        problems=tuple(problems), audit=audit, series=tuple(_series(pairs, plan)), worst=worst, compared=len(comparable)
    )


def _comparable(
    pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], audit: Audit | None, plan: WindowPlan
) -> list[tuple[ObservedUpdate, ObservedUpdate]]:
    """Returns the updates whose numbers are compared: those up to the first difference in samples."""
    if plan.samples != "exact":  # the batch or the order is another one: only what was stated for that is compared
        return list(pairs)
    if audit is None:
        return []
    first = audit.first_difference
    return [pair for pair in pairs if first is None or pair[0].update < first]


def _check_indices(candidate: Observed, plan: WindowPlan) -> Iterator[Problem]:
    found = [item.update for item in candidate.updates]
    if found and found[0] != plan.first_update:
        yield Problem(
            "SR-UPD-INDEX",
            "the first update after the resume has the wrong index",
            where={"stage": plan.stage, "update": found[0]},
            expected=plan.first_update,
            found=found[0],
            hint="update U is the U-th completed step: a checkpoint at update 12 is followed by update 13",
        )
    elif len(missing := sorted(set(plan.indices) - set(found))) > 0:
        yield Problem(
            "SR-UPD-MISSING",
            f"{len(missing)} of {plan.num_updates} updates were not recorded",
            where={"stage": plan.stage, "update": missing[0]},
            expected=f"updates {plan.indices[0]}..{plan.indices[-1]}",
            found=f"updates {found[0]}..{found[-1]}" if found else "none",
            hint="call recorder.record after every completed update and go on until recorder.finished",
        )


def _check_finite(candidate: Observed) -> Iterator[Problem]:
    for item in candidate.updates:
        bad = [name for name in NUMBERS if (value := getattr(item, name)) is not None and not math.isfinite(value)]
        if (bad or not item.finite) and not item.skipped:
            yield Problem(
                "SR-UPD-NONFINITE",
                f"update {item.update} is not finite: {', '.join(bad) or 'a gradient or a parameter'}",
                where=item.where(key=bad[0] if bad else "gradient"),
                expected="finite numbers",
                found={name: str(getattr(item, name)) for name in NUMBERS},
                hint="the first quantity that is not finite is where to look: loss, then gradient, then update",
            )
            return  # everything after it is not finite either


def _check_recorded(pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan) -> Iterator[Problem]:
    for control, candidate in pairs:
        missing = [n for n in NUMBERS if getattr(control, n) is not None and getattr(candidate, n) is None]
        if control.ids is not None and candidate.ids is None:
            missing.append("sample_ids")
        if control.update == plan.first_update:
            missing += [n for n in ("moved", "gradients") if getattr(control, n) and not getattr(candidate, n)]
            directions = ("moved_direction", "gradients_direction")
            missing += [n for n in directions if getattr(control, n) and getattr(candidate, n) is None]
        if missing and not candidate.skipped:
            yield Problem(
                "SR-UPD-UNRECORDED",
                f"the candidate did not record {', '.join(missing)}, which the control did",
                where=candidate.where(stage=plan.stage, key=missing[0]),
                hint="give recorder.record the same arguments on every layout",
            )
            return


def _audit(control: Observed, candidate: Observed, plan: WindowPlan) -> Audit | None:
    """Audits against the control's whole window, so that samples which came too early are known as such."""
    controls = [item for item in control.updates if item.update in plan.window]
    candidates = [item for item in candidate.updates if item.update in plan.window]
    if plan.samples == "free" or not controls or not candidates:
        return None
    if any(item.ids is None for item in (*controls, *candidates)):
        return None
    if plan.samples == "exact":
        return audit_window(window_ids(controls), window_ids(candidates))
    return audit_prefix(window_ids(controls), window_ids(candidates))


def _check_samples(
    audit: Audit | None, pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan
) -> Iterator[Problem]:
    if audit is not None:
        yield from check_audit(audit, replay_bound=plan.replay_bound, omission_bound=plan.omission_bound)
    for control, candidate in pairs:
        expected = control.samples if plan.samples == "exact" else plan.global_batch
        if candidate.samples != expected:
            yield Problem(
                "SR-UPD-SAMPLES",
                "an update consumed another number of samples than planned",
                where=candidate.where(stage=plan.stage),
                expected=expected,
                found=candidate.samples,
                hint="the global batch must not follow from microbatch x ranks",
            )
            return
    for control, candidate in _comparable(pairs, audit, plan) if plan.samples == "exact" else ():
        if None not in (control.tokens, candidate.tokens) and control.tokens != candidate.tokens:
            yield Problem(
                "SR-UPD-TOKENS",
                "the same samples, but another number of valid tokens",
                where=candidate.where(stage=plan.stage),
                expected=control.tokens,
                found=candidate.tokens,
                hint="padding, masking or truncation depends on the microbatch or the layout",
            )
            return


def _check_boundaries(candidate: Observed, plan: WindowPlan) -> Iterator[Problem]:
    for what, every in plan.boundaries:
        expected = [index for index in plan.indices if index % every == 0]
        found = sorted(update for name, update in candidate.boundaries if name == what)
        missing = [index for index in expected if index not in found]
        if missing:
            yield Problem(
                "SR-UPD-BOUNDARY",
                f"the window did not cross the {what} boundary at update {missing[0]}",
                where={"stage": plan.stage, "update": missing[0], "key": what},
                expected=expected,
                found=found,
                hint=f"call recorder.boundary({what!r}, update) where the trainer does it; its period follows from the "
                "update index, not from how often this process has been through the loop",
            )


def _series(pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan) -> Iterator[dict[str, Any]]:
    bands = {band.metric: band for band in plan.bands if band.metric in NUMBERS}
    for control, candidate in pairs:
        row: dict[str, Any] = {"update": candidate.update, "samples": candidate.samples, "tokens": candidate.tokens}
        row["lr"] = {"control": list(control.lr), "candidate": list(candidate.lr)}
        for name in NUMBERS:
            one: float | None = getattr(control, name)
            other: float | None = getattr(candidate, name)
            band = bands.get(name)
            distance = None
            if one is not None and other is not None:
                distance = deviation(one, other, absolute=bool(band and band.absolute))
            row[name] = {
                "control": one,
                "candidate": other,
                "deviation": distance,
                "limit": band.limit(candidate.update) if band and band.covers(candidate.update) else None,
            }
        yield row

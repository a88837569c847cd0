"""Updates against the control: the first one, and a window, number by number and in causal order.

Exact things are compared exactly: the update's index, the samples it consumed, the tokens they hold, the learning rate
of every group, the loss scale, whether a scaler skipped it. Numbers that rounding may move are compared with their
sealed band. Behind a difference in samples the numbers of a continuation are not compared: they differ for a reason
that is already named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from samerun.core.tolerance import Band, deviation
from samerun.errors import Problem, Severity
from samerun.plan.schedule import PlannedRates, check_planned_rates
from samerun.verify.audit import Audit, audit_prefix, audit_window, check_audit, window_ids
from samerun.verify.locate import Place, worst_gradient
from samerun.verify.observed import Observed, ObservedUpdate

NUMBERS: Mapping[str, tuple[str, str]] = {
    "loss": ("SR-UPD-LOSS", "the loss"),
    "grad_norm": ("SR-UPD-GRADNORM", "the gradient norm before clipping"),
    "update_norm": ("SR-UPD-UPDATENORM", "the norm of the update"),
}
"""Global numbers of one update, in causal order, with their finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """What is compared, and how strictly.

    `bands` are the sealed ones. `rate_factor` multiplies the control's learning rates (a declared policy); None leaves
    them out, `rate_bound` allows a relative difference; `planned_rates` are those that the plan printed. `samples` says
    whether each update must consume the control's samples (`exact`), only the same order in other portions because the
    batch changes on purpose (`portions`), or whatever it likes (`free`). `window_updates` is how many updates the
    control has from the first one on. `boundaries` are (what, every) pairs the window must cross. `trainable` tells for
    each parameter whether it trains; None when the job did not say.
    """

    stage: str
    first_update: int
    num_updates: int
    bands: tuple[Band, ...]
    global_batch: int
    window_updates: int = 0
    rate_factor: float | None = 1.0
    rate_bound: float = 0.0
    planned_rates: PlannedRates | None = None
    samples: Literal["exact", "portions", "free"] = "exact"
    replay_bound: int = 0
    omission_bound: int = 0
    boundaries: tuple[tuple[str, int], ...] = ()
    trainable: Mapping[str, bool] | None = None

    @property
    def indices(self) -> range:
        """The updates that are compared."""
        return range(self.first_update, self.first_update + self.num_updates)

    @property
    def window(self) -> range:
        """The updates that the control has, of which those compared may be only the first."""
        return range(self.first_update, self.first_update + max(self.num_updates, self.window_updates))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """What the comparison found. `series` has one row per update, for the record and its picture."""

    problems: tuple[Problem, ...]
    audit: Audit | None
    series: tuple[Mapping[str, Any], ...]
    worst: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def to_json(self) -> dict[str, Any]:
        """Returns the stage's `measured` part."""
        return {
            "audit": self.audit.to_json() if self.audit else None,
            "worst": {metric: dict(row) for metric, row in self.worst.items()},
            "series": [dict(row) for row in self.series],
        }


def compare_window(control: Observed, candidate: Observed, plan: WindowPlan) -> WindowReport:
    """Compares the candidate's window with the control's, under the sealed plan."""
    wanted, found = control.by_update(), candidate.by_update()
    pairs = [(wanted[index], found[index]) for index in plan.indices if index in wanted and index in found]
    audit = _audit(control, candidate, plan)
    comparable = _comparable(pairs, audit, plan)
    worst: dict[str, dict[str, Any]] = {}
    problems = [
        *_check_indices(candidate, plan),
        *_check_finite(candidate),
        *_check_recorded(pairs, plan),
        *_check_samples(audit, pairs, plan),
        *(_check_rates(pairs, plan) or _check_planned(candidate, plan)),
        *_check_scaler(pairs),
        *_check_numbers(comparable, plan, worst),
        *_check_deltas(comparable, plan, worst),
        *_check_movement(pairs, plan),
        *_check_boundaries(candidate, plan),
    ]
    return WindowReport(problems=tuple(problems), audit=audit, series=tuple(_series(pairs, plan)), worst=worst)


def _comparable(
    pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], audit: Audit | None, plan: WindowPlan
) -> list[tuple[ObservedUpdate, ObservedUpdate]]:
    """Returns the updates before which, and in which, both consumed the same samples."""
    if plan.samples != "exact" or audit is None:
        return []
    first = audit.first_difference
    return [pair for pair in pairs if first is None or pair[0].update < first]


def _where(plan_or_update: ObservedUpdate, **more: Any) -> dict[str, Any]:
    return {"update": plan_or_update.update, **more}


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
                where=_where(item, key=bad[0] if bad else "gradient"),
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
        if control.update == plan.first_update and control.moved is not None and candidate.moved is None:
            missing.append("moved")
        if missing and not candidate.skipped:
            yield Problem(
                "SR-UPD-UNRECORDED",
                f"the candidate did not record {', '.join(missing)}, which the control did",
                where=_where(candidate, stage=plan.stage, key=missing[0]),
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
                where=_where(candidate, stage=plan.stage),
                expected=expected,
                found=candidate.samples,
                hint="the global batch must not follow from microbatch x ranks",
            )
            return
    for control, candidate in _comparable(pairs, audit, plan):
        if None not in (control.tokens, candidate.tokens) and control.tokens != candidate.tokens:
            yield Problem(
                "SR-UPD-TOKENS",
                "the same samples, but another number of valid tokens",
                where=_where(candidate, stage=plan.stage),
                expected=control.tokens,
                found=candidate.tokens,
                hint="padding, masking or truncation depends on the microbatch or the layout",
            )
            return


def _check_planned(candidate: Observed, plan: WindowPlan) -> list[Problem]:
    """Rates that the control has are compared with it bit for bit; these are known without one."""
    found = {item.update: item.lr for item in candidate.updates if item.update in plan.indices}
    return check_planned_rates(plan.planned_rates, found, bound=plan.rate_bound)


def _check_rates(pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan) -> list[Problem]:
    if plan.rate_factor is None:
        return []
    for control, candidate in pairs:
        expected = tuple(rate * plan.rate_factor for rate in control.lr)
        if len(expected) != len(candidate.lr) or any(
            not _rate_agrees(a, b, plan) for a, b in zip(expected, candidate.lr, strict=True)
        ):
            return [
                Problem(
                    "SR-UPD-LR",
                    "the learning rate of an update differs from the control's",
                    where=_where(candidate, stage=plan.stage),
                    expected=list(expected),
                    found=list(candidate.lr),
                    hint=_rate_hint(expected, candidate, pairs),
                )
            ]
    return []


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


def _check_scaler(pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]]) -> Iterator[Problem]:
    for control, candidate in pairs:
        if control.loss_scale != candidate.loss_scale:
            yield Problem(
                "SR-UPD-SCALE",
                "the loss scale differs from the control's",
                where=_where(candidate),
                expected=control.loss_scale,
                found=candidate.loss_scale,
                hint="save and restore the gradient scaler; a dummy step while loading changes it",
            )
            return
        if control.skipped != candidate.skipped:
            yield Problem(
                "SR-UPD-SKIPPED",
                "the scaler skipped another number of attempts than in the control",
                where=_where(candidate),
                expected=control.skipped,
                found=candidate.skipped,
                hint="the loss scale or the gradients differ; the schedule must not advance on a skipped attempt",
            )
            return


def _check_numbers(
    pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan, worst: dict[str, dict[str, Any]]
) -> Iterator[Problem]:
    bands = {band.metric: band for band in plan.bands if band.metric in NUMBERS}
    for name, band in bands.items():
        rows = [
            (candidate, getattr(control, name), getattr(candidate, name))
            for control, candidate in pairs
            if getattr(control, name) is not None and getattr(candidate, name) is not None
        ]
        outside = _outside(name, band, rows, worst)
        if outside is not None:
            candidate, expected, found = outside
            code, what = NUMBERS[name]
            place = _gradient_place(name, candidate, pairs)
            most = f"; most of it in the gradient of {place}" if place else ""
            yield Problem(
                code,
                f"{what} leaves its sealed band at update {candidate.update}{most}",
                where=_where(candidate, stage=plan.stage, key=name, **({"tensor": place.name} if place else {})),
                expected=f"{expected:.9g} within {band.limit(candidate.update):.3g}",
                found=f"{found:.9g}, a deviation of {deviation(expected, found, absolute=band.absolute):.3g}",
                hint=_number_hint(name, candidate.update == plan.first_update),
            )


def _gradient_place(
    name: str, candidate: ObservedUpdate, pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]]
) -> Place | None:
    """Returns the parameter whose gradient accounts for most of a difference in loss or gradient norm, if recorded."""
    if name == "update_norm":
        return None
    control = next(control for control, other in pairs if other is candidate)
    return worst_gradient(control.gradients, candidate.gradients)


def _outside(
    name: str, band: Band, rows: Sequence[tuple[ObservedUpdate, float, float]], worst: dict[str, dict[str, Any]]
) -> tuple[ObservedUpdate, float, float] | None:
    """Returns the first row outside the band; keeps the row that uses most of its band in `worst`."""
    first: tuple[ObservedUpdate, float, float] | None = None
    for candidate, expected, found in rows:
        if not band.covers(candidate.update):
            continue
        limit = band.limit(candidate.update)
        distance = deviation(expected, found, absolute=band.absolute)
        used = distance / limit if limit else (0.0 if distance == 0 else math.inf)
        if name not in worst or used > worst[name]["used"]:
            worst[name] = {"used": used, "update": candidate.update, "deviation": distance, "limit": limit}
        if first is None and distance > limit:
            first = (candidate, expected, found)
    return first


_FIRST_HINTS: Mapping[str, str] = {
    "loss": "samples and weights are the control's, so the forward pass or the loss normalisation differs",
    "grad_norm": "the loss agrees, so the gradient's reduction does not: scaled by replicas or passes, averaged twice, "
    "or a mean of means over unequal microbatches",
    "update_norm": "the gradient agrees, so the optimizer does not: moments, step counts, decay, clipping or a group's "
    "rate",
}


def _number_hint(name: str, first: bool) -> str:
    if first:
        return _FIRST_HINTS[name]
    return "the first update agrees and a later one does not: state that changes with every update was not restored"


def _check_deltas(
    pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan, worst: dict[str, dict[str, Any]]
) -> Iterator[Problem]:
    bands = {band.tensor: band for band in plan.bands if band.metric == "parameter_delta"}
    outside: list[tuple[ObservedUpdate, str, float, float, float]] = []
    for control, candidate in pairs:
        expected, found = _changes(control), _changes(candidate)
        for tensor in expected.keys() & found.keys() & bands.keys():
            band = bands[tensor]
            limit = band.limit(candidate.update)
            distance = deviation(expected[tensor], found[tensor], absolute=band.absolute)
            used = distance / limit if limit else (0.0 if distance == 0 else math.inf)
            if "parameter_delta" not in worst or used > worst["parameter_delta"]["used"]:
                row = {"used": used, "update": candidate.update, "deviation": distance, "limit": limit}
                worst["parameter_delta"] = {**row, "tensor": tensor}
            if distance > limit:
                outside.append((candidate, tensor, used, expected[tensor], found[tensor]))
        if outside:
            break
    if outside:
        outside.sort(key=lambda row: -row[2])
        candidate, tensor, _, expected_norm, found_norm = outside[0]
        others = ", ".join(row[1] for row in outside[1:6])
        yield Problem(
            "SR-UPD-DELTA",
            f"update {candidate.update} changed {len(outside)} tensors by another amount than the control's update did",
            where=_where(candidate, stage=plan.stage, tensor=tensor),
            expected=f"{expected_norm:.9g} within {bands[tensor].limit(candidate.update):.3g}",
            found=f"{found_norm:.9g}",
            hint=f"also {others}" if others else "only this tensor: look at its group, its moments and its gradient",
        )


def _changes(update: ObservedUpdate) -> dict[str, float]:
    return {**(update.moved or {}), **update.deltas}


def _check_movement(pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan) -> Iterator[Problem]:
    first = next((pair for pair in pairs if pair[1].update == plan.first_update), None)
    if first is None or first[1].moved is None or first[1].skipped:
        return
    control, candidate = first[0].moved or {}, first[1].moved
    trainable = plan.trainable or {}
    for tensor, norm in sorted(candidate.items()):
        moves_in_control = control.get(tensor, math.nan) > 0
        if norm == 0 and (moves_in_control or (trainable.get(tensor) and tensor not in control)):
            yield Problem(
                "SR-UPD-STILL",
                "a trainable tensor did not move in the first update",
                where=_where(first[1], stage=plan.stage, tensor=tensor),
                expected=f"a change of about {control.get(tensor, math.nan):.3g}",
                found=0.0,
                hint="it is in no parameter group of the optimizer, or its gradient never reaches it",
            )
        elif norm == 0 and trainable.get(tensor):
            yield Problem(
                "SR-UPD-STILL",
                "a trainable tensor moved neither here nor in the control",
                Severity.NOTE,
                where=_where(first[1], stage=plan.stage, tensor=tensor),
                hint="it has no gradient in this model; nothing about it changed with the move",
            )
        elif norm > 0 and (trainable.get(tensor) is False or control.get(tensor) == 0):
            yield Problem(
                "SR-UPD-FROZEN-MOVED",
                "a frozen tensor moved in the first update",
                where=_where(first[1], stage=plan.stage, tensor=tensor),
                expected=0.0,
                found=norm,
                hint="requires_grad is set before the optimizer is built and must be set again after the model is "
                "rebuilt; weight decay also moves a tensor without gradient",
            )


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


def check_end(control: Mapping[str, Any] | None, candidate: Mapping[str, Any] | None, stage: str) -> list[Problem]:
    """Compares the replicas of every tensor after the window; both arguments are the bodies of `end` state lines.

    A tensor whose replicas drift apart in the control as well does not distinguish the two runs: a warning.
    """
    if candidate is None:
        return [
            Problem(
                "SR-UPD-UNRECORDED",
                "the job did not report its state after the window",
                where={"stage": stage, "key": "end"},
                hint="call recorder.close() before the process group is destroyed",
            )
        ]
    drifting = {key for key, fact in (control or {}).get("tensors", {}).items() if fact.get("odd")}
    odd = {key: fact["odd"] for key, fact in candidate.get("tensors", {}).items() if fact.get("odd")}
    problems: list[Problem] = []
    for known in (False, True):
        names = sorted(key for key in odd if (key in drifting) is known)
        if names:
            ranks = sorted({int(replica["rank"]) for name in names for replica in odd[name]})
            problems.append(
                Problem(
                    "SR-UPD-REPLICA",
                    f"after the window the replicas of {len(names)} tensors differ"
                    + (", as they do in the control" if known else ""),
                    Severity.WARNING if known else Severity.ERROR,
                    where={"stage": stage, "tensor": names[0], "rank": ranks[0]},
                    expected="every replica the same",
                    found=f"another value on the replica of rank {', '.join(map(str, ranks))}",
                    hint="gradients are not reduced over every replica, or a replica started from other weights",
                )
            )
    masks = {
        key: fact["digest"] for key, fact in (control or {}).get("tensors", {}).items() if key.startswith("buffer:")
    }
    broken = sorted(
        key
        for key, fact in candidate.get("tensors", {}).items()
        if fact.get("nonfinite") and masks.get(key) != fact["digest"]  # a mask of infinities is the control's too
    )
    if broken:
        problems.append(
            Problem(
                "SR-UPD-NONFINITE",
                f"after the window {len(broken)} tensors hold values that are not finite",
                where={"stage": stage, "tensor": broken[0]},
                hint="the losses were finite until then: look at the last update, and at tensors that no loss sees",
            )
        )
    return problems


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

"""Numbers that rounding may move, each against its sealed band: of the whole update, and tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.tolerance import Band, deviation
from samerun.errors import Problem
from samerun.verify.evidence.locate import Place, common_factor, worst_gradient
from samerun.verify.evidence.observed import ObservedUpdate
from samerun.verify.evidence.window import WindowPlan

Pairs = Sequence[tuple[ObservedUpdate, ObservedUpdate]]
"""(control's, candidate's) updates."""

Worst = dict[str, dict[str, Any]]
"""By metric, the deviation that used most of its band."""

NUMBERS: Mapping[str, tuple[str, str]] = {
    "loss": ("SR-UPD-LOSS", "the loss"),
    "grad_norm": ("SR-UPD-GRADNORM", "the gradient norm before clipping"),
    "update_norm": ("SR-UPD-UPDATENORM", "the norm of the update"),
}
"""Global numbers of one update, in causal order, with their finding."""


def check_numbers(pairs: Pairs, plan: WindowPlan, worst: Worst) -> Iterator[Problem]:
    """Compares the global numbers of each update; one finding per number, where it first leaves its band."""
    bands = {band.metric: band for band in plan.bands if band.metric in NUMBERS}
    for name, band in bands.items():
        outside = _outside(name, band, _rows(pairs, name), worst)
        if outside is not None:
            yield _number_outside(name, band, outside, pairs, plan)
        if name == "grad_norm":
            agreeing = [pair for pair in pairs if outside is None or pair[1].update < outside[0].update]
            if clipped := _outside("step_norm", band, _rows(agreeing, "step_norm"), {}):
                yield _clipped_otherwise(band, clipped, plan)


def _rows(pairs: Pairs, name: str) -> list[tuple[ObservedUpdate, float, float]]:
    return [
        (candidate, getattr(control, name), getattr(candidate, name))
        for control, candidate in pairs
        if getattr(control, name) is not None and getattr(candidate, name) is not None
    ]


def _outside(
    name: str, band: Band, rows: Sequence[tuple[ObservedUpdate, float, float]], worst: Worst
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


def _number_outside(
    name: str, band: Band, outside: tuple[ObservedUpdate, float, float], pairs: Pairs, plan: WindowPlan
) -> Problem:
    candidate, expected, found = outside
    code, what = NUMBERS[name]
    place = _gradient_place(name, candidate, pairs)
    most = f"; most of it in the gradient of {place}" if place else ""
    return Problem(
        code,
        f"{what} leaves its sealed band at update {candidate.update}{most}",
        where=candidate.where(stage=plan.stage, key=name, **({"tensor": place.name} if place else {})),
        expected=f"{expected:.9g} within {band.limit(candidate.update):.3g}",
        found=f"{found:.9g}, a deviation of {deviation(expected, found, absolute=band.absolute):.3g}",
        hint=_number_hint(name, candidate.update == plan.first_update),
    )


def _clipped_otherwise(band: Band, outside: tuple[ObservedUpdate, float, float], plan: WindowPlan) -> Problem:
    candidate, expected, found = outside
    told = "" if candidate.grad_norm is None else f", of {candidate.grad_norm:.9g} before clipping"
    return Problem(
        "SR-UPD-CLIP",
        f"the gradient that the step of update {candidate.update} used has another norm than the control's, although "
        "they agree before clipping",
        where=candidate.where(stage=plan.stage, key="step_norm"),
        expected=f"{expected:.9g} within {band.limit(candidate.update):.3g}",
        found=f"{found:.9g}{told}",
        hint="it is clipped to another norm, or not at all, or scaled after it was measured",
    )


def _gradient_place(name: str, candidate: ObservedUpdate, pairs: Pairs) -> Place | None:
    """Returns the parameter whose gradient accounts for most of a difference in loss or gradient norm, if recorded."""
    if name == "update_norm":
        return None
    control = next(control for control, other in pairs if other is candidate)
    return worst_gradient(control.gradients, candidate.gradients)


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


@dataclass(frozen=True, slots=True)
class _Kind:
    """A norm that every tensor has: its metric, its finding, what is read of an update, and the words for it."""

    metric: str
    code: str
    read: Callable[[ObservedUpdate], Mapping[str, float]]
    what: str


_PER_TENSOR = (
    _Kind("parameter_gradient", "SR-UPD-GRADIENT", lambda item: item.gradients or {}, "the gradients of {} tensors"),
    _Kind("parameter_delta", "SR-UPD-DELTA", lambda item: item.changes(), "the changes of {} tensors"),
)
"""In causal order."""

READ: Mapping[str, Callable[[ObservedUpdate], Mapping[str, float]]] = {kind.metric: kind.read for kind in _PER_TENSOR}
"""How a metric that every tensor has is read of an update."""


@dataclass(frozen=True, slots=True)
class _Row:
    update: ObservedUpdate
    tensor: str
    used: float
    expected: float
    found: float


def check_tensors(pairs: Pairs, plan: WindowPlan, worst: Worst) -> Iterator[Problem]:
    """Compares gradients and changes tensor by tensor; one finding each, at the first update in which one leaves."""
    for kind in _PER_TENSOR:
        bands = {band.tensor: band for band in plan.bands if band.metric == kind.metric}
        for control, candidate in pairs if bands else ():
            outside = _tensors_outside(kind, bands, control, candidate, worst)
            if outside:
                factor = common_factor(kind.read(control), kind.read(candidate))
                yield _tensors_differ(kind, bands, sorted(outside, key=lambda row: -row.used), factor, plan)
                break


def _tensors_outside(
    kind: _Kind, bands: Mapping[str | None, Band], control: ObservedUpdate, candidate: ObservedUpdate, worst: Worst
) -> list[_Row]:
    outside: list[_Row] = []
    expected, found = kind.read(control), kind.read(candidate)
    for tensor in sorted(expected.keys() & found.keys()):
        band = bands.get(tensor)
        if band is None or not band.covers(candidate.update):
            continue
        limit = band.limit(candidate.update)
        distance = deviation(expected[tensor], found[tensor], absolute=band.absolute)
        used = distance / limit if limit else (0.0 if distance == 0 else math.inf)
        if kind.metric not in worst or used > worst[kind.metric]["used"]:
            row = {"used": used, "update": candidate.update, "deviation": distance, "limit": limit, "tensor": tensor}
            worst[kind.metric] = row
        if distance > limit:
            outside.append(_Row(candidate, tensor, used, expected[tensor], found[tensor]))
    return outside


def _tensors_differ(
    kind: _Kind, bands: Mapping[str | None, Band], rows: Sequence[_Row], factor: float | None, plan: WindowPlan
) -> Problem:
    first = rows[0]
    others = ", ".join(row.tensor for row in rows[1:6])
    what = kind.what.format(len(rows))
    hint = f"also {others}" if others else "only this tensor: look at its group, its moments and its gradient"
    if factor is not None:
        hint = f"every one is {factor:.6g} times the control's: scaled by replicas, passes or a loss that is normalised"
    return Problem(
        kind.code,
        f"{what} in update {first.update.update} leave their sealed bands, most of all that of {first.tensor}",
        where=first.update.where(stage=plan.stage, tensor=first.tensor),
        expected=f"{first.expected:.9g} within {bands[first.tensor].limit(first.update.update):.3g}",
        found=f"{first.found:.9g}",
        hint=hint,
    )

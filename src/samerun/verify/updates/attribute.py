"""Which kind of failure stands behind a number that left its band, as far as what lies beside it tells. Pure.

One number can leave its band for many reasons: a first loss differs when the inputs are others, when a module computes
something else, when dropout is on, and when the loss is normalised otherwise. What the jobs recorded beside it tells
these apart. It decides nothing: the sealed bands have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samerun.core.tolerance import deviation
from samerun.errors import Problem, Severity
from samerun.verify.evidence.locate import Place, first_module, other_dtype
from samerun.verify.evidence.observed import Observed
from samerun.verify.updates.controls import Controls
from samerun.verify.updates.evaluate import Evaluation

DATA, RANDOM, SETTINGS, LAYOUT, DTYPE = (
    "data",
    "random numbers",
    "settings that shapes do not show",
    "fused and strided layouts",
    "dtype and masters",
)

_OF_THE_FORWARD = ("SR-EVAL-LOGITS", "SR-EVAL-LOSS")
_OF_THE_UPDATE = ("SR-UPD-LOSS", "SR-UPD-GRADNORM", "SR-UPD-GRADIENT", "SR-UPD-UPDATENORM", "SR-UPD-DELTA")

SPARE = 10.0
"""How many times what two controls differ by a module's output must differ to count as computed otherwise."""

_LEAST = 1e-6
"""Smallest relative difference of a module's output that counts, where the controls repeat bit for bit."""

_DROPOUT = frozenset({"p", "dropout", "attention_dropout", "drop_prob", "dropout_p", "drop_path"})


@dataclass(frozen=True, slots=True)
class Cause:
    """What else differs, in words, and the kind of failure that it is."""

    words: str
    kind: str


def attribute(
    problems: Sequence[Problem], controls: Controls, candidate: Observed, evaluation: Evaluation | None
) -> list[Problem]:
    """Returns the findings, those about numbers with what else differs between the two jobs.

    Args:
        problems: what an evaluation or a window was found to be.
        controls: the controls.
        candidate: the job that they are about.
        evaluation: the candidate's evaluation of the fixed examples, from whichever of its jobs made one.
    """
    wanted = (*_OF_THE_FORWARD, *_OF_THE_UPDATE)
    if not any(problem.code in wanted and problem.severity is Severity.ERROR for problem in problems):
        return list(problems)
    inputs = _other_inputs(controls, candidate)
    within = _other_settings(controls, candidate) or _other_forward(controls, evaluation)
    return [_attributed(problem, inputs, within) for problem in problems]


def _attributed(problem: Problem, inputs: Cause | None, within: Cause | None) -> Problem:
    if problem.code in _OF_THE_FORWARD:
        cause = within
    elif problem.code in _OF_THE_UPDATE:
        cause = inputs or within
    else:
        return problem
    if cause is None:
        return problem
    return replace(problem, message=f"{problem.message}; {cause.words}", kind=cause.kind)


def _other_inputs(controls: Controls, candidate: Observed) -> Cause | None:
    """Tells when the model was given other values in the first update for the same samples."""
    found = next((item for item in candidate.updates if item.inputs is not None), None)
    if found is None or found.inputs is None:
        return None
    for control in controls.observed:
        item = control.by_update().get(found.update)
        if item is None or item.inputs is None or item.ids is None or found.ids is None:
            continue
        same_samples = sorted(map(str, item.all_ids())) == sorted(map(str, found.all_ids()))
        if same_samples and item.inputs[0] == found.inputs[0] and item.inputs[1] != found.inputs[1]:
            return Cause(f"for the same samples the model was given other inputs in update {found.update}", DATA)
        return None
    return None


def _other_settings(controls: Controls, candidate: Observed) -> Cause | None:
    """Tells when modules have other settings of their own than in the control."""
    differing = differing_settings(controls, candidate)
    if not differing:
        return None
    name, (before, now) = next(iter(differing.items()))
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    dropout = all(place.rpartition(".")[2] in _DROPOUT for place in differing)
    return Cause(f"{name} is {now}, in the control {before}{more}", RANDOM if dropout else SETTINGS)


def differing_settings(controls: Controls, candidate: Observed) -> dict[str, tuple[Any, Any]]:
    """Returns (the control's, the candidate's) value of every module's setting that differs, by its dotted place."""
    before = next((state for item in controls.observed if (state := item.state("loaded"))), None)
    now = candidate.state("loaded")
    if before is None or now is None:
        return {}
    one: Mapping[str, Mapping[str, Any]] = before.body.get("modules") or {}
    two: Mapping[str, Mapping[str, Any]] = now.body.get("modules") or {}
    return {
        f"{module}.{name}": (value, two[module][name])
        for module, settings in one.items()
        for name, value in settings.items()
        if module in two and name in two[module] and two[module][name] != value
    }


def _other_forward(controls: Controls, evaluation: Evaluation | None) -> Cause | None:
    """Tells when a module gives out something else on the fixed examples, beyond what the controls differ by."""
    evaluations = [item for item in controls.evaluations if item is not None]
    if evaluation is None or not evaluations:
        return None
    control = evaluations[0]
    if dtype := other_dtype(control.details, evaluation.details):
        name, before, now = dtype
        return Cause(f"{name} gives out {now}, in the control {before}", DTYPE)
    limits = _module_noise(evaluations)
    place = _first_beyond(control, evaluation, limits)
    if place is None:
        return None
    kind = LAYOUT if place.reordered else SETTINGS
    return Cause(f"the first module whose output on the fixed examples differs is {place}", kind)


def _module_noise(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Returns by module how much its output differs between the controls, relative to its norm."""
    noise: dict[str, float] = {}
    first = evaluations[0]
    for other in evaluations[1:]:
        norms = {name: norm for name, norm, _ in other.modules}
        for name, norm, _ in first.modules:
            apart = deviation(norm, norms.get(name, norm))
            if name in first.details and name in other.details and norm:
                apart = max(apart, abs(first.details[name][0] - other.details[name][0]) / norm)
            noise[name] = max(noise.get(name, 0.0), apart)
    return noise


def _first_beyond(control: Evaluation, evaluation: Evaluation, noise: Mapping[str, float]) -> Place | None:
    unit = _rounding_of(control)
    for row in control.modules:
        limit = max(SPARE * noise.get(row[0], 0.0), unit)
        details = (control.details, evaluation.details)
        if place := first_module([row], evaluation.modules, limit, details=details):
            return place
    return None


def _rounding_of(control: Evaluation) -> float:
    """Returns what rounding makes of a module's output, by the shortest type that any of them has."""
    short = {dtype for _, dtype in control.details.values()} & {"bfloat16", "float16"}
    return 2e-2 if "bfloat16" in short else 2e-3 if short else SPARE * _LEAST

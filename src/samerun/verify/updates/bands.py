"""From controls to bands: by how much a candidate may differ, for every metric, update and tensor.

The first control is the reference. The others differ from it only in how the same global batch is dealt into
microbatches, which changes the order in which rounded numbers are added and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from samerun.core.dtype import DTYPES, DType
from samerun.core.tolerance import (
    DIRECTIONS,
    METRICS,
    PER_TENSOR,
    Band,
    band_from_controls,
    band_from_user,
    check_band,
    deviation,
)
from samerun.errors import Problem, Severity
from samerun.manifest.tolerances import AnalysisTolerance, ControlTolerance, UserTolerance
from samerun.verify.updates.analysis import analysis_bands
from samerun.verify.updates.controls import Controls, Tolerance, evidence_for
from samerun.verify.updates.directions import direction_bands, split_directions
from samerun.verify.updates.evaluate import logit_deviation, loss_deviation
from samerun.verify.updates.numbers import NUMBERS, READ

Stated = ControlTolerance | UserTolerance

FIRST_ONLY = frozenset({"parameter_gradient"})
"""Metrics of the first update alone."""

NOISE_SHARE = 0.5
"""Of the tensors whose change is compared, the share that may be noise before the whole comparison is worth nothing.

A tensor whose exact gradient is zero (a bias that a softmax or a normalisation cancels) receives rounding errors, which
Adam scales up to full steps. Such a tensor is left out and listed; it does not make the judgement abstain."""


def plan_bands(
    controls: Controls,
    tolerances: Mapping[str, Tolerance],
    *,
    first_update: int,
    num_updates: int,
    precision: DType = DTYPES["float32"],
) -> tuple[Band, ...]:
    """Returns the band of every metric that was recorded, for the updates of the window.

    `parameter_gradient` (of the first update) and `parameter_delta` give one band per tensor, and so do the directions
    of the first update, with the factor of `parameter_delta`. Deviations are relative
    unless the manifest says absolute.
    """
    indices = range(first_update, first_update + num_updates)
    bands: list[Band] = []
    evidence = evidence_for(controls, tolerances, indices, precision)
    for metric in METRICS:
        tolerance = tolerances[metric]
        if isinstance(tolerance, AnalysisTolerance):
            bands += analysis_bands(metric, evidence, indices) if evidence is not None else ()
        elif metric in NUMBERS:
            bands.append(_number_band(metric, controls, tolerance, indices))
        elif metric in PER_TENSOR:
            bands += _tensor_bands(metric, controls, tolerance, indices[:1] if metric in FIRST_ONLY else indices)
        else:
            bands += _evaluation_band(metric, controls, tolerance, first_update - 1)
    return (*bands, *direction_bands(controls, tolerances["parameter_delta"], first_update, precision))


def _number_band(metric: str, controls: Controls, tolerance: Stated, indices: range) -> Band:
    if isinstance(tolerance, UserTolerance):
        return _user_band(metric, tolerance, indices)
    reference = controls.reference.by_update()
    observed: list[list[float]] = []
    for other in controls.observed[1:]:
        found = other.by_update()
        observed.append(
            [
                deviation(getattr(reference[i], metric), getattr(found[i], metric), absolute=tolerance.absolute)
                if not reference[i].skipped
                else 0.0
                for i in indices
            ]
        )
    return _control_band(metric, tolerance, indices, observed)


def _user_band(metric: str, tolerance: UserTolerance, indices: range) -> Band:
    return band_from_user(
        metric,
        indices[0],
        len(indices),
        limit=tolerance.limit,
        reason=tolerance.reason,
        absolute=tolerance.absolute,
    )


def _control_band(
    metric: str,
    tolerance: ControlTolerance,
    indices: range,
    observed: Sequence[Sequence[float]],
    tensor: str | None = None,
) -> Band:
    return band_from_controls(
        metric,
        indices[0],
        observed,
        factor=tolerance.factor,
        floor=tolerance.floor or 0.0,
        absolute=tolerance.absolute,
        tensor=tensor,
    )


def _tensor_bands(metric: str, controls: Controls, tolerance: Stated, indices: range) -> list[Band]:
    """Returns a band for every tensor that the reference recorded a norm of."""
    read = READ[metric]
    reference = controls.reference.by_update()
    norms = {i: read(reference[i]) for i in indices if i in reference}
    tensors = sorted({tensor for row in norms.values() for tensor in row})
    if isinstance(tolerance, UserTolerance):
        return [replace(_user_band(metric, tolerance, indices), tensor=tensor) for tensor in tensors]
    bands: list[Band] = []
    others = [{index: read(item) for index, item in other.by_update().items()} for other in controls.observed[1:]]
    for tensor in tensors:
        rows = [
            [
                deviation(norms[i][tensor], other[i][tensor], absolute=tolerance.absolute)
                if tensor in norms.get(i, {}) and tensor in other.get(i, {})
                else 0.0
                for i in indices
            ]
            for other in others
        ]
        bands.append(_control_band(metric, tolerance, indices, rows, tensor))
    return bands


def vanishing(controls: Controls, bands: Sequence[Band]) -> frozenset[str]:
    """Returns the tensors whose gradient is no larger than what rounding makes of an average tensor's.

    Such a gradient is nothing but rounding (that of a bias which a softmax or a normalisation cancels): relative to
    itself, another order of sums changes it altogether. Rounding is taken as a quarter of the floor.
    """
    named = [(band.tensor, band) for band in bands if band.metric == "parameter_gradient" and not band.absolute]
    reference = controls.reference.by_update()
    found: set[str] = set()
    for tensor, band in named:
        norms = reference[band.first_update].gradients if band.first_update in reference else None
        if tensor is None or not norms:
            continue
        average = math.hypot(*norms.values()) / math.sqrt(len(norms))
        if norms[tensor] <= band.floor / 4 * average:
            found.add(tensor)
    return frozenset(found)


def _evaluation_band(metric: str, controls: Controls, tolerance: Stated, update: int) -> list[Band]:
    reference, indices = controls.evaluation, range(update, update + 1)
    if reference is None or (metric == "eval_logits" and reference.logits is None):
        return []
    if isinstance(tolerance, UserTolerance):
        return [_user_band(metric, tolerance, indices)]
    measure = {"eval_loss": loss_deviation, "eval_logits": logit_deviation}[metric]
    others = [item for item in controls.evaluations if item is not None and item is not reference]
    observed = [[measure(reference, item, absolute=tolerance.absolute)] for item in others] or [[0.0]]
    return [_control_band(metric, tolerance, indices, observed)]


def _until_noisy(band: Band, noisy: Problem, at_least: int | None) -> Band | None:
    """Returns the band up to the update in which the controls become too noisy, if enough updates lie before it."""
    first = noisy.where.get("update")
    count = first - band.first_update if isinstance(first, int) else 0
    if at_least is None or count < at_least:
        return None
    return replace(band, limits=band.limits[:count], observed=band.observed[:count])


def _judged_partly(band: Band, noisy: Problem) -> Problem:
    last = band.first_update + len(band.limits) - 1
    return Problem(
        "SR-CONTROL-PARTLY",
        f"{band.metric} is judged up to update {last} only: then the controls differ too much in it",
        Severity.WARNING,
        where=dict(noisy.where),
        expected=noisy.expected,
        found=noisy.found,
        hint="window.at_least declares that this is enough; the other metrics are judged in the whole window",
    )


def split_bands(
    bands: Sequence[Band], vanish: frozenset[str] = frozenset(), *, at_least: int | None = None
) -> tuple[tuple[Band, ...], tuple[str, ...], list[Problem]]:
    """Returns (bands that judge, tensors left out as noise, findings about metrics that are too noisy).

    A tensor is left out where its own changes are noise. One whose gradient is noise, or vanishes (`vanish`), is judged
    by its change all the same, unless that is noise too; it is listed as `gradient of NAME`. A metric of the whole
    update that becomes too noisy only after `at_least` updates judges those before.
    """
    kept: list[Band] = []
    noise: list[str] = []
    directions, problems = split_directions([band for band in bands if band.metric in DIRECTIONS], vanish)
    for band in bands:
        if band.metric in DIRECTIONS:
            continue
        found = check_band(band)
        gradient = band.metric == "parameter_gradient"
        if not found and not (gradient and band.tensor in vanish):
            kept.append(band)
        elif band.tensor is not None:
            noise.append(f"gradient of {band.tensor}" if gradient else band.tensor)
        elif (shorter := _until_noisy(band, found[0], at_least)) is not None:
            kept.append(shorter)
            problems.append(_judged_partly(shorter, found[0]))
        else:
            problems += found
    for metric, words in (("parameter_gradient", "gradient"), ("parameter_delta", "change")):
        of_metric = [band.tensor for band in bands if band.metric == metric and band.tensor is not None]
        judged = {band.tensor for band in kept if band.metric == metric}
        left = [tensor for tensor in of_metric if tensor not in judged]
        if len(left) > NOISE_SHARE * len(of_metric):
            problems.append(
                Problem(
                    "SR-CONTROL-NOISY",
                    f"the controls disagree about the {words} of {len(left)} of {len(of_metric)} tensors",
                    where={"stage": "control", "key": metric, "tensor": left[0]},
                    hint=f"make the run more repeatable, or give tolerances.{metric} your own limit with its reason",
                )
            )
    return (*kept, *directions), tuple(noise), problems

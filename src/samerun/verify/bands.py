"""From controls to bands: whether the controls can judge anything, and by how much a candidate may differ.

The first control is the reference. The others differ from it only in how the same global batch is dealt into
microbatches, which changes the order in which rounded numbers are added and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from samerun.core.dtype import DTYPES, DType
from samerun.core.tolerance import METRICS, PER_TENSOR, Band, band_from_controls, band_from_user, check_band, deviation
from samerun.errors import Problem, Severity
from samerun.manifest.models import AnalysisTolerance, ControlTolerance, UserTolerance
from samerun.verify.analysis import Evidence, analysis_bands, no_evidence, read_evidence
from samerun.verify.evaluate import Evaluation, logit_deviation, loss_deviation
from samerun.verify.numbers import NUMBERS, READ
from samerun.verify.observed import Observed, ObservedUpdate
from samerun.verify.oracle import Oracle

Tolerance = ControlTolerance | AnalysisTolerance | UserTolerance

Stated = ControlTolerance | UserTolerance

FIRST_ONLY = frozenset({"parameter_gradient"})
"""Metrics of the first update alone."""

NOISE_SHARE = 0.5
"""Of the tensors whose change is compared, the share that may be noise before the whole comparison is worth nothing.

A tensor whose exact gradient is zero (a bias that a softmax or a normalisation cancels) receives rounding errors, which
Adam scales up to full steps. Such a tensor is left out and listed; it does not make the judgement abstain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The evidence that candidates are compared with. `observed[0]` is the reference, named by `names[0]`.

    `oracle` is the same update in fp64, where the manifest has one: the truth, and no control.
    """

    names: tuple[str, ...]
    observed: tuple[Observed, ...]
    evaluations: tuple[Evaluation | None, ...]
    oracle: Oracle | None = None

    @property
    def reference(self) -> Observed:
        """The control that a candidate's numbers are compared with."""
        return self.observed[0]

    @property
    def evaluation(self) -> Evaluation | None:
        """The fixed-example evaluation that a candidate's is compared with: the first one that was recorded."""
        return next((item for item in self.evaluations if item is not None), None)


def complete_reference(controls: Controls) -> Controls:
    """Returns the controls with what the reference did not record taken from the first control that did.

    The ledger of an uninterrupted run has no first-update record of every tensor at the update in question, while the
    control that resumed there has.
    """
    reference = controls.observed[0]
    filled = tuple(
        replace(
            item,
            moved=donor.moved if item.moved is None else item.moved,
            gradients=donor.gradients if item.gradients is None else item.gradients,
            deltas=item.deltas or donor.deltas,
        )
        if (donor := _donor(controls.observed[1:], item.update)) is not None
        else item
        for item in reference.updates
    )
    return replace(controls, observed=(replace(reference, updates=filled), *controls.observed[1:]))


def _donor(others: Sequence[Observed], update: int) -> ObservedUpdate | None:
    return next((found for other in others if (found := other.by_update().get(update)) is not None), None)


def check_controls(
    controls: Controls,
    *,
    first_update: int,
    num_updates: int,
    boundaries: Sequence[tuple[str, int]],
    tolerances: Mapping[str, Tolerance],
    precision: DType,
) -> list[Problem]:
    """Returns every reason why these controls cannot judge a candidate. Each makes the verdict abstain."""
    indices = range(first_update, first_update + num_updates)
    problems: list[Problem] = []
    for name, observed in zip(controls.names, controls.observed, strict=True):
        problems += _check_one(name, observed, indices)
    problems += _check_evaluations(controls)
    problems += _check_crossings(controls.reference, indices, boundaries)
    measured = [metric for metric, tolerance in tolerances.items() if isinstance(tolerance, ControlTolerance)]
    if len(controls.observed) < 2 and measured:
        problems.append(
            Problem(
                "SR-CONTROL-SINGLE",
                f"{', '.join(measured)} are to be measured on the controls, and there is only one control",
                where={"stage": "control"},
                expected="two controls or more",
                found="one",
                hint="set control.repeats to 2, give a second recorded trace, or state the limits with their reason",
            )
        )
    for name, observed in zip(controls.names[1:], controls.observed[1:], strict=True):
        problems += _check_pair(controls.names[0], controls.reference, name, observed, indices)
    if not problems and evidence_for(controls, tolerances, indices, precision) is None and _analysed(tolerances):
        problems.append(no_evidence())
    if not problems and measured and precision.num_bytes < 4:
        problems += _check_variation(controls, indices)
    return problems


def _check_variation(controls: Controls, indices: range) -> Iterator[Problem]:
    """Yields a warning when the controls agree bit for bit although the precision is low.

    In fp32 the floors cover what a whole window makes of rounding. In bf16 a window amplifies it far beyond any floor
    that still judges the first update, so it has to be measured.
    """
    reference = controls.reference.by_update()
    for other in controls.observed[1:]:
        found = other.by_update()
        if any(getattr(reference[i], name) != getattr(found[i], name) for i in indices for name in NUMBERS):
            return
    if len(controls.observed) > 1:
        yield Problem(
            "SR-CONTROL-EXACT",
            "the controls agree bit for bit, so what rounding does to this run in low precision was not measured",
            Severity.WARNING,
            where={"stage": "control"},
            hint="set control.vary_microbatch to another microbatch: an innocent candidate adds in another order too, "
            "and could leave a band that is only the floor",
        )


def _check_one(name: str, observed: Observed, indices: range) -> Iterator[Problem]:
    where = {"stage": "control", "control": name}
    for problem in observed.problems:
        yield Problem(
            "SR-CONTROL-TRACE",
            f"the control's own record is not sound: {problem.code} {problem.message}",
            where={**problem.where, **where},
            hint=problem.hint,
        )
    found = observed.by_update()
    if missing := [index for index in indices if index not in found]:
        first, last = (min(found), max(found)) if found else (None, None)
        yield Problem(
            "SR-CONTROL-SHORT",
            f"the control lacks {len(missing)} of the window's {len(indices)} updates",
            where={**where, "update": missing[0]},
            expected=f"updates {indices[0]}..{indices[-1]}",
            found="no update" if first is None else f"updates {first}..{last}",
            hint="record the uninterrupted run past the checkpoint, or shorten window.updates",
        )
    for item in (found[index] for index in indices if index in found):
        absent = [field for field in NUMBERS if getattr(item, field) is None]
        absent += ["sample_ids"] if item.ids is None else []
        if absent and not item.skipped:
            yield Problem(
                "SR-CONTROL-UNRECORDED",
                f"the control did not record {', '.join(absent)}, so a candidate could not be compared",
                where={**where, "update": item.update, "key": absent[0]},
                hint="give recorder.record the loss, the gradient norm before clipping and the consumed sample ids",
            )
            return
        if not item.skipped and not (item.finite and all(math.isfinite(getattr(item, f) or 0.0) for f in NUMBERS)):
            yield Problem(
                "SR-CONTROL-NONFINITE",
                "the control itself is not finite: the run diverges without being moved",
                where={**where, "update": item.update},
                found={field: str(getattr(item, field)) for field in NUMBERS},
                hint="choose an earlier checkpoint, or find out why the source run diverges",
            )
            return


def _check_evaluations(controls: Controls) -> Iterator[Problem]:
    evaluation = controls.evaluation
    if evaluation is None:
        yield Problem(
            "SR-CONTROL-UNRECORDED",
            "no control evaluated the fixed examples",
            where={"stage": "control", "key": "eval"},
            hint="call recorder.evaluate(function) after recorder.loaded; the function returns losses and logits",
        )
        return
    for name, item in zip(controls.names, controls.evaluations, strict=True):
        if item is not None and item.changed:
            yield Problem(
                "SR-CONTROL-EVAL",
                f"evaluating the fixed examples changed the control's own state: {', '.join(item.changed[:6])}",
                where={"stage": "control", "control": name},
                hint="the control's updates no longer follow from the checkpoint; use eval mode, no_grad, no sampler",
            )
        if item is not None and not all(math.isfinite(loss) for loss in item.losses):
            yield Problem(
                "SR-CONTROL-NONFINITE",
                "the control's loss on a fixed example is not finite",
                where={"stage": "control", "control": name, "key": "eval"},
                hint="the checkpoint holds a value that is not finite, or the examples do not suit the model",
            )


def _check_crossings(reference: Observed, indices: range, boundaries: Sequence[tuple[str, int]]) -> Iterator[Problem]:
    for what, every in boundaries:
        due = [index for index in indices if index % every == 0]
        seen = {update for name, update in reference.boundaries if name == what}
        if not due:
            yield Problem(
                "SR-CONTROL-BOUNDARY",
                f"the window {indices[0]}..{indices[-1]} crosses no {what} boundary (every {every} updates)",
                where={"stage": "control", "key": what},
                hint=f"raise window.updates to at least {every}: a boundary is where a trainer does something else",
            )
        elif missing := [index for index in due if index not in seen]:
            yield Problem(
                "SR-CONTROL-BOUNDARY",
                f"the control did not record the {what} boundary at update {missing[0]}",
                where={"stage": "control", "update": missing[0], "key": what},
                expected=due,
                found=sorted(seen),
                hint=f"call recorder.boundary({what!r}, update) there, or correct the window's period",
            )


def _check_pair(first: str, reference: Observed, name: str, other: Observed, indices: range) -> Iterator[Problem]:
    one, two = reference.by_update(), other.by_update()
    where = {"stage": "control", "control": name}
    for index in (index for index in indices if index in one and index in two):
        a, b = one[index], two[index]
        if a.ids is not None and b.ids is not None and Counter(a.all_ids()) != Counter(b.all_ids()):
            yield Problem(
                "SR-CONTROL-SAMPLES",
                f"the controls {first} and {name} consumed different samples in update {index}",
                where={**where, "update": index},
                hint="the order of samples must follow from seed, epoch and committed position alone",
            )
            return
        exact = {"learning rate": (a.lr, b.lr), "loss scale": (a.loss_scale, b.loss_scale)}
        for what, (left, right) in exact.items():
            if left != right:
                yield Problem(
                    "SR-CONTROL-RATE",
                    f"the controls {first} and {name} disagree about the {what} of update {index}",
                    where={**where, "update": index, "key": what},
                    expected=left,
                    found=right,
                    hint="the schedule must follow from the update index alone, not from the microbatch or the passes",
                )
                return


def _analysed(tolerances: Mapping[str, Tolerance]) -> list[AnalysisTolerance]:
    return [item for item in tolerances.values() if isinstance(item, AnalysisTolerance)]


def evidence_for(
    controls: Controls, tolerances: Mapping[str, Tolerance], indices: range, precision: DType
) -> Evidence | None:
    """Returns what bounds from analysis are made from, or None where none is wanted or too little was recorded."""
    if not (wanted := _analysed(tolerances)):
        return None
    return read_evidence(
        controls.observed,
        controls.evaluations,
        indices=indices,
        dtype=precision,
        risk=min(item.risk for item in wanted),
        oracle=controls.oracle,
    )


def plan_bands(
    controls: Controls,
    tolerances: Mapping[str, Tolerance],
    *,
    first_update: int,
    num_updates: int,
    precision: DType = DTYPES["float32"],
) -> tuple[Band, ...]:
    """Returns the band of every metric that was recorded, for the updates of the window.

    `parameter_gradient` (of the first update) and `parameter_delta` give one band per tensor. Deviations are relative
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
    return tuple(bands)


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
        floor=tolerance.floor,
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
    """Returns the tensors whose gradient is no larger than what rounding may make of the whole one.

    Such a gradient is nothing but rounding (that of a bias which a softmax or a normalisation cancels): relative to
    itself, another order of sums changes it altogether.
    """
    named = [(band.tensor, band) for band in bands if band.metric == "parameter_gradient" and not band.absolute]
    reference = controls.reference.by_update()
    found: set[str] = set()
    for tensor, band in named:
        norms = reference[band.first_update].gradients if band.first_update in reference else None
        if tensor is not None and norms and norms[tensor] <= band.floor * math.hypot(*norms.values()):
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


def split_bands(
    bands: Sequence[Band], vanish: frozenset[str] = frozenset()
) -> tuple[tuple[Band, ...], tuple[str, ...], list[Problem]]:
    """Returns (bands that judge, tensors left out as noise, findings about metrics that are too noisy).

    A tensor is left out where its own changes are noise. One whose gradient is noise, or vanishes (`vanish`), is judged
    by its change all the same, unless that is noise too; it is listed as `gradient of NAME`.
    """
    kept: list[Band] = []
    noise: list[str] = []
    problems: list[Problem] = []
    for band in bands:
        found = check_band(band)
        gradient = band.metric == "parameter_gradient"
        if not found and not (gradient and band.tensor in vanish):
            kept.append(band)
        elif band.tensor is not None:
            noise.append(f"gradient of {band.tensor}" if gradient else band.tensor)
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
    return tuple(kept), tuple(noise), problems

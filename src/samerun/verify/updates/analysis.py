"""Bands from numerical analysis: what is known of the run, put into the bounds of `samerun.core.rounding`. Pure.

What a bound is made from was recorded by the control: shapes of the parameters, tokens per update, the size of the
logits, and loss, gradient norm and update norm of each update. With an fp64 oracle the controls' own distance from the
truth is known too: two runs that are no farther from it than that differ by at most twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samerun.core.dtype import DType, parse_dtype
from samerun.core.rounding import ADAPTIVE, Basis, Drift
from samerun.core.tolerance import Band, band_from_analysis
from samerun.errors import Problem
from samerun.verify.evidence.observed import Observed, ObservedUpdate
from samerun.verify.updates.evaluate import Evaluation
from samerun.verify.updates.oracle import Distances, Oracle, distances


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What bounds are made from. `elements` counts each trainable parameter's elements by name.

    `apart` is how far the controls lie from the fp64 oracle; empty where there is none. `coarse` is set where
    parameters are kept in fewer bits than float32: they move in steps of their type, for which there is no bound.
    """

    basis: Basis
    elements: Mapping[str, int]
    updates: tuple[ObservedUpdate, ...]
    evaluation: Evaluation | None
    apart: Distances
    coarse: bool = False

    @property
    def drift(self) -> Drift:
        """How far two runs may come apart over the window."""
        return Drift(
            bound=self.basis.backward,
            loss=[item.loss or 0.0 for item in self.updates],  # of 0, as of none, no relative bound is known
            gradient=[item.grad_norm or 0.0 for item in self.updates],
            step=[item.update_norm or 0.0 for item in self.updates],
        )


def read_evidence(
    observed: Sequence[Observed],
    evaluations: Sequence[Evaluation | None],
    *,
    indices: range,
    dtype: DType,
    risk: float,
    oracle: Oracle | None = None,
) -> Evidence | None:
    """Returns what the controls recorded of all that bounds are made from, or None where they did not.

    Args:
        observed: the controls, the reference first; the first that captured a state tells the shapes.
        evaluations: their evaluations of the fixed examples, of which the first counts.
        indices: the updates of the window.
        dtype: the type in which the passes compute.
        risk: as in the manifest.
        oracle: the truth, if it was computed.
    """
    state = next((line for item in observed if (line := item.state("loaded")) is not None), None)
    found = observed[0].by_update()
    updates = tuple(found[index] for index in indices if index in found)
    if state is None or len(updates) != len(indices):
        return None
    shapes = _trainable(state.body.get("tensors") or {})
    matrices = [shape for shape in shapes.values() if len(shape) > 1]
    if not matrices:
        return None
    evaluation = next((item for item in evaluations if item is not None), None)
    logits = evaluation.logits if evaluation is not None else None
    basis = Basis(
        dtype=dtype,
        depth=len(matrices),
        longest=max(max(shape[0], math.prod(shape[1:])) for shape in matrices),
        tokens=max(updates[0].tokens or updates[0].samples, 1),
        compared=len(indices) * (3 + 2 * len(shapes)) + (0 if logits is None else logits.size),
        risk=risk,
        logit_size=_logit_size(evaluation),
    )
    return Evidence(
        basis=basis,
        elements={name: math.prod(shape) for name, shape in shapes.items()},
        updates=updates,
        evaluation=evaluation,
        apart=_apart(oracle, observed, evaluations, indices[0]),
        coarse=_coarse(state.body.get("tensors") or {}),
    )


def _trainable(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        key.partition(":")[2]: tuple(fact["shape"])
        for key, fact in tensors.items()
        if key.startswith("param:") and fact.get("trainable") is not False and 0 not in fact["shape"]
    }


def _coarse(tensors: Mapping[str, Any]) -> bool:
    kinds = {str(fact.get("dtype", "float32")) for key, fact in tensors.items() if key.startswith("param:")}
    return any(parse_dtype(kind).num_bytes < 4 for kind in kinds)


def _logit_size(evaluation: Evaluation | None) -> float:
    """Returns the root mean square of the fixed examples' logits; their largest loss where no logits were kept."""
    if evaluation is None:
        return 1.0
    if evaluation.logits is None or not evaluation.logits.size:
        return max((abs(loss) for loss in evaluation.losses), default=1.0)
    return float(np.sqrt(np.mean(evaluation.logits.astype(np.float64) ** 2)))


def _apart(
    oracle: Oracle | None, observed: Sequence[Observed], evaluations: Sequence[Evaluation | None], first_update: int
) -> Distances:
    largest: Distances = {}
    for item, evaluation in zip(observed, evaluations, strict=True) if oracle is not None else ():
        run = Oracle(update=item.by_update().get(first_update), evaluation=evaluation)
        for key, distance in distances(oracle, run).items() if oracle is not None else ():
            largest[key] = max(largest.get(key, 0.0), distance)
    return largest


def analysis_bands(metric: str, evidence: Evidence, indices: range) -> list[Band]:
    """Returns the bands of one metric over the updates of the window: one, or one per tensor."""
    if metric in ("eval_loss", "eval_logits"):
        if evidence.evaluation is None or (metric == "eval_logits" and evidence.evaluation.logits is None):
            return []
        return [
            _band(metric, indices[0] - 1, [_evaluation_limit(metric, evidence.basis, evidence.evaluation)], evidence)
        ]
    if metric in ("parameter_gradient", "parameter_delta"):
        return _tensor_bands(metric, evidence, indices)
    limits = [_number_limit(metric, evidence, place) for place in range(len(indices))]
    return [_band(metric, indices[0], limits, evidence)]


def _band(metric: str, first: int, limits: Sequence[float], evidence: Evidence, tensor: str | None = None) -> Band:
    reason, apart = evidence.basis.describe(), evidence.apart.get((metric, tensor))
    if apart is not None:
        limits = [max(limits[0], 2 * apart), *limits[1:]]
        reason = f"{reason}; the controls lie up to {apart:.3g} from the fp64 oracle"
    return band_from_analysis(metric, first, limits, reason=reason, tensor=tensor)


def _evaluation_limit(metric: str, basis: Basis, evaluation: Evaluation) -> float:
    if metric == "eval_logits" and evaluation.logits is not None:
        return basis.logits(float(np.abs(evaluation.logits).max(initial=0.0)))
    terms = math.prod(evaluation.shape[1:-1]) if len(evaluation.shape) > 2 else 1
    return max((basis.loss(loss, terms) for loss in evaluation.losses), default=math.inf)


def _number_limit(metric: str, evidence: Evidence, place: int) -> float:
    item, drift = evidence.updates[place], evidence.drift
    if metric == "loss":
        tokens = max(item.tokens or item.samples, 1)
        return evidence.basis.loss(item.loss or 0.0, tokens) + drift.of_loss(place)
    if metric == "update_norm" and evidence.coarse:
        return math.inf
    own = ADAPTIVE if metric == "update_norm" else 1.0
    return own * evidence.basis.backward + drift.of_gradient(place)


def _tensor_bands(metric: str, evidence: Evidence, indices: range) -> list[Band]:
    first, drift = evidence.updates[0], evidence.drift
    norms = first.gradients or {}
    whole, elements = math.hypot(*norms.values()), sum(evidence.elements.values())
    bands: list[Band] = []
    recorded = first.gradients if metric == "parameter_gradient" else first.changes()
    places = range(1) if metric == "parameter_gradient" else range(len(indices))
    own = ADAPTIVE if metric == "parameter_delta" else 1.0
    for tensor in sorted(recorded or {}):
        limit = math.inf if metric == "parameter_delta" and evidence.coarse else evidence.basis.backward
        if math.isfinite(limit) and tensor in norms and tensor in evidence.elements:
            limit = evidence.basis.tensor(norms[tensor], evidence.elements[tensor], whole, elements)
        limits = [own * limit + drift.of_gradient(place) for place in places]
        bands.append(_band(metric, indices[0], limits, evidence, tensor))
    return bands


def no_evidence() -> Problem:
    """Returns the finding for controls that recorded too little for a bound from analysis."""
    return Problem(
        "SR-CONTROL-UNRECORDED",
        "no control recorded the shapes of the parameters, from which a bound of analysis is made",
        where={"stage": "control", "key": "state"},
        hint="a control that samerun runs records them; a recorded trace needs its state line at the checkpoint",
    )

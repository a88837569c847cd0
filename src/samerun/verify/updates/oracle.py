"""The truth, as far as fp64 tells it: loss, gradients and fixed examples of one update, and the runs' distance from it.

Control and candidate round the same numbers in different orders; neither is right. One process in fp64 makes the same
update with 29 bits more, so its loss and gradients are the exact ones as far as either can tell. A candidate that is no
farther from it than the controls are is explained by rounding. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.tolerance import deviation
from samerun.errors import Problem
from samerun.verify.evidence.observed import Observed, ObservedUpdate
from samerun.verify.updates.evaluate import Evaluation, logit_deviation, loss_deviation

Distances = dict[tuple[str, str | None], float]
"""By (metric, tensor), in the metric's own measure; the tensor is None for metrics of the whole update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """One job's first update and its evaluation: the truth, or a run that is compared with it."""

    update: ObservedUpdate | None
    evaluation: Evaluation | None


def first_of(observed: Observed | None, evaluation: Evaluation | None, first_update: int) -> Oracle:
    """Returns a job in the form in which it is compared with the oracle."""
    update = observed.by_update().get(first_update) if observed is not None else None
    return Oracle(update=update, evaluation=evaluation)


def distances(oracle: Oracle, run: Oracle) -> Distances:
    """Returns how far a run lies from the truth."""
    found: Distances = {}
    if oracle.update is not None and run.update is not None:
        for metric in ("loss", "grad_norm"):
            one, other = getattr(oracle.update, metric), getattr(run.update, metric)
            if one is not None and other is not None:
                found[metric, None] = deviation(one, other)
        truth, gradients = oracle.update.gradients or {}, run.update.gradients or {}
        for tensor in truth.keys() & gradients.keys():
            found["parameter_gradient", tensor] = deviation(truth[tensor], gradients[tensor])
    if oracle.evaluation is not None and run.evaluation is not None:
        found["eval_loss", None] = loss_deviation(oracle.evaluation, run.evaluation)
        found["eval_logits", None] = logit_deviation(oracle.evaluation, run.evaluation)
    return found


def compare_with_oracle(oracle: Oracle, controls: Sequence[Oracle], candidate: Oracle) -> dict[str, dict[str, Any]]:
    """Returns by metric how far the controls and the candidate lie from the truth, and whether rounding explains it.

    Of gradients, the tensor counts whose candidate is furthest out, measured by the controls.
    """
    mine = distances(oracle, candidate)
    own = [distances(oracle, control) for control in controls]
    rows: dict[str, dict[str, Any]] = {}
    for (metric, tensor), distance in sorted(mine.items(), key=lambda item: str(item[0])):
        others = [row[metric, tensor] for row in own if (metric, tensor) in row]
        if not others:
            continue
        row = {"control": max(others), "candidate": distance, "explained": distance <= max(others)}
        row |= {"tensor": tensor} if tensor is not None else {}
        if metric not in rows or _ratio(row) > _ratio(rows[metric]):
            rows[metric] = row
    return rows


def _ratio(row: Mapping[str, Any]) -> float:
    return float(row["candidate"]) / float(row["control"]) if row["control"] else float(row["candidate"] > 0) * 1e300


def check_oracle(oracle: Observed | None, reference: Observed, first_update: int) -> list[Problem]:
    """Returns why a job is no oracle: it is not in fp64, or did not make the update on the same samples."""
    where = {"stage": "control", "control": "oracle"}
    if oracle is None or first_update not in oracle.by_update():
        return [
            Problem(
                "SR-CONTROL-ORACLE",
                f"the oracle did not make update {first_update}",
                where=where,
                hint="control.oracle resumes the checkpoint on one process and trains as the candidate does",
            )
        ]
    dtypes = sorted({str(name) for header in oracle.headers.values() for name in header.environment.get("dtype", ())})
    if dtypes != ["float64"]:
        return [
            Problem(
                "SR-CONTROL-ORACLE",
                "the oracle does not compute in float64, so it is no truth for anything",
                where=where,
                expected=["float64"],
                found=dtypes,
                hint="cast the model, and everything that enters it, to float64 in the command of control.oracle",
            )
        ]
    one, other = oracle.by_update()[first_update], reference.by_update().get(first_update)
    if other is None or one.ids is None or other.ids is None or _sorted(one) == _sorted(other):
        return []
    return [
        Problem(
            "SR-CONTROL-SAMPLES",
            f"the oracle consumed other samples in update {first_update} than the control",
            where={**where, "update": first_update},
            hint="the order of samples must follow from seed, epoch and committed position alone",
        )
    ]


def _sorted(update: ObservedUpdate) -> list[str]:
    return sorted(map(str, update.all_ids()))

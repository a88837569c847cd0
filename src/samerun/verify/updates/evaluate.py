"""Fixed examples: the same forward pass on the source's layout and on the destination's, and nothing changed by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.tolerance import Band, deviation
from samerun.errors import Problem
from samerun.trace import EvalLine
from samerun.verify.evidence.locate import Details, Modules, first_module

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """One evaluation on fixed examples.

    `losses` has one number per example; `logits` the recorded elements of the logits, the examples first; both in the
    examples' own order. `changed` names what the evaluation altered although it may alter nothing. `modules` has the
    norm of what every module gave out, `details` its projection and element type.
    """

    update: int
    losses: tuple[float, ...]
    logits: Array | None
    shape: tuple[int, ...]
    changed: tuple[str, ...]
    modules: Modules = ()
    details: Details = field(default_factory=dict[str, tuple[float, str]])


def evaluation_of(line: EvalLine, logits: Array | None) -> Evaluation:
    """Returns the evaluation that a trace line describes; `logits` is the array from the file that it names."""
    changed = list(line.changed)
    if not line.state_unchanged and not changed:
        changed.append("state")
    if not line.rng_unchanged:
        changed.append("random number generators")
    shape = tuple((line.logits or {}).get("shape") or ())
    return Evaluation(
        line.update, line.losses, logits, shape, tuple(dict.fromkeys(changed)), line.modules, line.details
    )


def loss_deviation(control: Evaluation, candidate: Evaluation, *, absolute: bool = False) -> float:
    """Returns the largest deviation of one example's loss; infinite when the examples are not the same number."""
    if len(control.losses) != len(candidate.losses) or not control.losses:
        return math.inf
    pairs = zip(control.losses, candidate.losses, strict=True)
    return max(deviation(a, b, absolute=absolute) for a, b in pairs)


def logit_deviation(control: Evaluation, candidate: Evaluation, *, absolute: bool = False) -> float:
    """Returns the largest difference of one logit, relative to the control's largest logit unless `absolute`.

    Relative to each logit itself, one that happens to lie near zero would decide.
    """
    if control.logits is None or candidate.logits is None or control.logits.shape != candidate.logits.shape:
        return math.inf
    a, b = control.logits.astype(np.float64), candidate.logits.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    distance = float(np.abs(a - b).max(initial=0.0))
    scale = float(np.abs(a).max(initial=0.0))
    return distance if absolute or scale == 0.0 else distance / scale


def check_evaluation(control: Evaluation, candidate: Evaluation, bands: Sequence[Band]) -> list[Problem]:
    """Compares losses and logits with the sealed bands, and requires that evaluating changed nothing."""
    where = {"stage": "eval", "update": candidate.update}
    problems = check_unchanged(candidate, where)
    if candidate.update != control.update:
        problems.append(
            Problem(
                "SR-EVAL-UPDATE",
                "the fixed examples were evaluated at another update than in the control",
                where=where,
                expected=control.update,
                found=candidate.update,
                hint="evaluate right after loading, before the first update",
            )
        )
    if len(control.losses) != len(candidate.losses) or control.shape != candidate.shape:
        problems.append(
            Problem(
                "SR-EVAL-EXAMPLES",
                "the control and the candidate did not evaluate the same examples",
                where=where,
                expected=f"{len(control.losses)} losses, logits {_shape(control)}",
                found=f"{len(candidate.losses)} losses, logits {_shape(candidate)}",
                hint="the examples must be fixed: the same for every layout, world size and batch",
            )
        )
        return problems
    if not all(math.isfinite(loss) for loss in candidate.losses):
        bad = next(index for index, loss in enumerate(candidate.losses) if not math.isfinite(loss))
        problems.append(
            Problem(
                "SR-EVAL-NONFINITE",
                f"the loss of fixed example {bad} is {candidate.losses[bad]}",
                where=where,
                expected="a finite loss",
                found=candidate.losses[bad],
                hint="look at the load stage: some weight or buffer is not what the checkpoint holds",
            )
        )
        return problems
    for band in bands:
        problems += _check_band(control, candidate, band, where)
    return problems


def check_unchanged(evaluation: Evaluation, where: dict[str, Any]) -> list[Problem]:
    """Returns a finding when an evaluation altered a tensor, a random number generator or the data cursor."""
    if not evaluation.changed:
        return []
    names = ", ".join(evaluation.changed[:6]) + (" ..." if len(evaluation.changed) > 6 else "")
    return [
        Problem(
            "SR-EVAL-CHANGED",
            f"evaluating the fixed examples changed the state of the run: {names}",
            where=where,
            expected="every tensor, generator and cursor as before",
            found=f"{len(evaluation.changed)} changed",
            hint="switch to model.eval() and torch.no_grad(), read the examples past the training sampler, and draw no "
            "random numbers",
        )
    ]


def _shape(evaluation: Evaluation) -> str:
    return "x".join(map(str, evaluation.shape)) or "not recorded"


def _check_band(control: Evaluation, candidate: Evaluation, band: Band, where: dict[str, Any]) -> list[Problem]:
    measure, code, what = {
        "eval_loss": (loss_deviation, "SR-EVAL-LOSS", "the losses"),
        "eval_logits": (logit_deviation, "SR-EVAL-LOGITS", "the logits"),
    }[band.metric]
    found, limit = measure(control, candidate, absolute=band.absolute), band.limits[0]
    if found <= limit:
        return []
    place = first_module(control.modules, candidate.modules, limit, details=(control.details, candidate.details))
    first = f"; the first module whose output differs is {place}" if place else ""
    return [
        Problem(
            code,
            f"{what} of the fixed examples differ from the control beyond the sealed tolerance{first}",
            where={**where, "module": place.name} if place else where,
            expected=f"a deviation of at most {limit:.3g}",
            found=f"{found:.3g}",
            hint="every tensor equals the checkpoint's, so the forward pass differs: architecture settings, a fused or "
            "padded layer cut in another place, precision, dropout, or another kernel",
        )
    ]


def worst_example(control: Evaluation, candidate: Evaluation) -> int | None:
    """Returns the example whose loss deviates most, or None when they cannot be compared."""
    if len(control.losses) != len(candidate.losses) or not control.losses:
        return None
    found = [deviation(a, b) for a, b in zip(control.losses, candidate.losses, strict=True)]
    return int(np.argmax(found))

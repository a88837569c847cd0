"""Whether the controls can judge anything: finite, complete, on the same samples, and as long as the window."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from samerun.core.dtype import DType
from samerun.errors import Problem, Severity
from samerun.manifest.tolerances import ControlTolerance
from samerun.verify.evidence.observed import Observed
from samerun.verify.updates.analysis import no_evidence
from samerun.verify.updates.controls import Controls, Tolerance, analysed, evidence_for
from samerun.verify.updates.numbers import NUMBERS


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
    if not problems and evidence_for(controls, tolerances, indices, precision) is None and analysed(tolerances):
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

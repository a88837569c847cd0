"""What each stage's evidence says: from traces to findings and measured numbers. Used by the run and by the judge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from samerun.core.batch import Dealing, deal
from samerun.core.mesh import Layout
from samerun.core.tolerance import Band
from samerun.errors import Problem, Severity, has_errors
from samerun.manifest.models import Bounded, Manifest
from samerun.plan.migration import MigrationPlan
from samerun.plan.schedule import check_planned_rates
from samerun.runner.evidence import judged_bands, throughput
from samerun.verify.evidence.job import JobPlan
from samerun.verify.evidence.observed import Observed
from samerun.verify.evidence.window import WindowPlan
from samerun.verify.updates.compare import compare_window
from samerun.verify.updates.controls import Controls
from samerun.verify.updates.ending import Span, check_beside, check_ending, check_motion
from samerun.verify.updates.evaluate import Evaluation, check_evaluation, logit_deviation, loss_deviation, worst_example
from samerun.verify.updates.movement import check_averages, check_end
from samerun.verify.updates.oracle import Oracle, compare_with_oracle, first_of

BOUNDARIES = ("log", "eval")


@dataclass(frozen=True, slots=True)
class Assessment:
    """Findings, and the numbers that they come from."""

    problems: tuple[Problem, ...]
    measured: Mapping[str, Any]


def source_job(manifest: Manifest, plan: MigrationPlan, max_microbatch: int) -> JobPlan:
    """Returns what a control job on the source layout is, with microbatches of at most `max_microbatch`."""
    dealing = deal(manifest.batch.global_batch, plan.source.batch_replicas, max_microbatch)
    return _job(plan.source.layout, dealing, "control", max_microbatch)


def oracle_job(manifest: Manifest, plan: MigrationPlan) -> JobPlan:
    """Returns what the fp64 oracle is: the same global batch on one process."""
    micro = manifest.source.microbatch or manifest.batch.max_microbatch
    return _job(Layout(), deal(manifest.batch.global_batch, 1, micro), "control", micro)


def destination_job(plan: MigrationPlan, stage: str) -> JobPlan:
    """Returns what a candidate job is at the recorder's stage `stage`."""
    return _job(plan.destination.layout, plan.batch.dealing, stage, plan.batch.max_microbatch)


def _job(layout: Any, dealing: Dealing, stage: str, max_microbatch: int) -> JobPlan:
    return JobPlan(
        world_size=layout.world_size,
        layout=layout,
        global_batch=dealing.global_batch,
        passes=dealing.passes,
        max_microbatch=max_microbatch,
        microbatches=dealing.microbatches,
        stage=stage,
    )


def control_microbatches(manifest: Manifest, count: int) -> list[int]:
    """Returns max_microbatch of each control job: the source's own first, then the one that varies the sums."""
    own = manifest.source.microbatch or manifest.batch.max_microbatch
    vary = manifest.control.vary_microbatch or own
    return [vary if number % 2 else own for number in range(count)]


def boundaries_of(manifest: Manifest) -> tuple[tuple[str, int], ...]:
    """Returns the boundaries that the window must cross, with their period in updates: those that the job has."""
    periods = (("log", manifest.window.log_every), ("eval", manifest.window.eval_every))
    return tuple((name, period) for name, period in periods if period is not None)


def window_plan(
    manifest: Manifest,
    plan: MigrationPlan,
    bands: Sequence[Band],
    stage: str,
    trainable: Mapping[str, bool] | None,
) -> WindowPlan:
    """Returns how the candidate's updates are compared at `stage` (`update`: only the first; `window`: all)."""
    schedule, whole = manifest.declare.schedule, stage == "window"
    free = schedule == "expected-to-change"
    return WindowPlan(
        stage=stage,
        first_update=plan.first_update,
        num_updates=plan.window_updates if whole else 1,
        window_updates=plan.window_updates,
        bands=tuple(band for band in judged_bands(manifest, bands) if not band.metric.startswith("eval_")),
        global_batch=plan.batch.global_batch,
        rate_factor=None if free or plan.learning_rate.schedule == "samples" else plan.learning_rate.factor,
        planned_rates=None if free else plan.next_rates,
        rate_bound=rate_bound(manifest),
        samples=_samples_mode(manifest, plan),
        replay_bound=manifest.transition.replay_bound or 0,
        omission_bound=manifest.transition.omission_bound or 0,
        boundaries=boundaries_of(manifest) if whole else (),
        trainable=trainable,
    )


def rate_bound(manifest: Manifest) -> float:
    """Returns by how much, relatively, a learning rate may differ."""
    schedule = manifest.declare.schedule
    return schedule.bounded if isinstance(schedule, Bounded) else 0.0


def check_control_rates(manifest: Manifest, plan: MigrationPlan, controls: Controls) -> list[Problem]:
    """Returns SR-SCHEDULE-RATE for the first control whose rates are not those that the checkpoint tells of.

    A control that was resumed with another schedule would let the candidate pass with the same one. Where the rates
    change on purpose, the plan's are not the control's.
    """
    if plan.learning_rate.policy is not None or manifest.declare.schedule == "expected-to-change":
        return []
    for name, observed in zip(controls.names, controls.observed, strict=True):
        found = {item.update: item.lr for item in observed.updates}
        if wrong := check_planned_rates(plan.next_rates, found, bound=rate_bound(manifest)):
            return [replace(item, where={**item.where, "stage": "control", "control": name}) for item in wrong]
    return []


def check_control_motion(plan: MigrationPlan, controls: Controls) -> list[Problem]:
    """Returns SR-CONTROL-STILL for every control whose updates moved nothing."""
    return [
        problem
        for name, observed in zip(controls.names, controls.observed, strict=True)
        for problem in check_motion(name, observed, plan.first_update, plan.window_updates)
    ]


def note_resumed_controls(manifest: Manifest) -> list[Problem]:
    """Returns a note where no record of the run itself is among the controls: what it cannot show."""
    if manifest.control.trace is not None:
        return []
    return [
        Problem(
            "SR-CONTROL-RESUMED",
            "the controls are resumes by the candidate's own script: what every resume of it does otherwise than the "
            "run that was saved, they do too",
            Severity.NOTE,
            where={"stage": "control"},
            hint="a ledger of the run past this checkpoint (control.kind: continuation) shows other data under the "
            "same ids, another loss, a counter or a position of the script's own that starts anew",
        )
    ]


def _samples_mode(manifest: Manifest, plan: MigrationPlan) -> Literal["exact", "portions", "free"]:
    if manifest.declare.order == "expected-to-change":
        return "free"
    return "exact" if plan.batch.exact else "portions"


def trainable_of(body: Mapping[str, Any] | None) -> dict[str, bool] | None:
    """Returns whether each parameter trains, from the body of a state line."""
    tensors: Mapping[str, Any] = (body or {}).get("tensors") or {}
    known = {
        key.partition(":")[2]: bool(fact["trainable"])
        for key, fact in tensors.items()
        if key.startswith("param:") and fact.get("trainable") is not None
    }
    return known or None


def check_resumed_at(observed: Observed, first_update: int, stage: str) -> list[Problem]:
    """Returns a finding when the job never reported its loaded state, or says that it stands at another update."""
    state = observed.state("loaded")
    if state is None:
        return [
            Problem(
                "SR-JOB-SILENT",
                "the job attached the recorder but never reported the state it loaded",
                where={"stage": stage},
                hint="call recorder.loaded(update=...) right after loading the checkpoint",
            )
        ]
    if state.update != first_update - 1:
        return [
            Problem(
                "SR-UPD-INDEX",
                "the job believes that it stands at another update than the checkpoint",
                where={"stage": stage, "update": state.update},
                expected=first_update - 1,
                found=state.update,
                hint="restore the update counter from the checkpoint; it counts completed optimizer steps",
            )
        ]
    return []


def assess_evaluation(
    manifest: Manifest, controls: Controls, evaluation: Evaluation | None, bands: Sequence[Band]
) -> Assessment:
    """Compares the fixed-example evaluation with the control's."""
    reference = controls.evaluation
    if evaluation is None or reference is None:
        return Assessment((_no_evaluation(),), {})
    wanted = [band for band in judged_bands(manifest, bands) if band.metric.startswith("eval_")]
    problems = check_evaluation(reference, evaluation, wanted)
    worst: dict[str, Any] = {}
    for band in wanted:
        measure = loss_deviation if band.metric == "eval_loss" else logit_deviation
        found, limit = measure(reference, evaluation, absolute=band.absolute), band.limits[0]
        used = found / limit if limit else (0.0 if found == 0 else math.inf)
        worst[band.metric] = {"used": used, "deviation": found, "limit": limit, "update": evaluation.update}
    measured = {
        "worst": worst,
        "worst_example": worst_example(reference, evaluation),
        "losses": {"control": list(reference.losses), "candidate": list(evaluation.losses)},
        "num_examples": len(evaluation.losses),
        **_beside_oracle(controls, Oracle(update=None, evaluation=evaluation), evaluation.update + 1),
    }
    return Assessment(tuple(problems), measured)


def _no_evaluation() -> Problem:
    return Problem(
        "SR-EVAL-MISSING",
        "the job did not evaluate the fixed examples",
        where={"stage": "eval"},
        hint="call recorder.evaluate(function) after recorder.loaded, on every layout",
    )


def assess_updates(controls: Controls, observed: Observed, plan: WindowPlan) -> Assessment:
    """Compares the candidate's updates with the control's, and its replicas after them."""
    report = compare_window(controls.reference, observed, plan)
    problems = list(report.problems)
    measured = report.to_json()
    measured["bound"] = max(plan.replay_bound, plan.omission_bound)
    measured |= _beside_oracle(controls, first_of(observed, None, plan.first_update), plan.first_update)
    if plan.stage == "window":
        loaded, ends = (
            [line.body if (line := item.state(when)) else None for item in (_ran_control(controls), observed)]
            for when in ("loaded", "end")
        )
        if ends[1] is not None or not has_errors(problems):  # without an end state the reason may be named already
            problems += check_end(ends[0], ends[1], plan.stage)
        problems += check_averages((loaded[0], ends[0]), (loaded[1], ends[1]), plan.stage)
        measured["throughput"] = {"control": throughput(controls.reference), "candidate": throughput(observed)}
        judged = any(band.metric == "update_norm" for band in plan.bands)  # not where the optimizer may change
        left = check_ending(Span.of(_ran_control(controls)), Span.of(observed), plan.stage, optimizer=judged)
        left += _beside(controls, ends[1], plan)
        # Seen at the end: what an earlier update shows comes first, and causes it.
        problems += [replace(item, where={**item.where, "update": plan.indices[-1]}) for item in left]
    return Assessment(tuple(problems), measured)


def _beside(controls: Controls, candidate: Mapping[str, Any] | None, plan: WindowPlan) -> list[Problem]:
    """Compares what follows the parameters, where a band of `parameter_delta` from the controls says how closely."""
    bands = [band for band in plan.bands if band.metric == "parameter_delta" and band.factor is not None]
    if not bands:
        return []
    ends = [line.body for item in controls.observed if (line := item.state("end")) is not None]
    floor, factor = max(band.floor for band in bands), max(band.factor or 0.0 for band in bands)
    return check_beside(ends, candidate, plan.stage, floor=floor, factor=factor)


def _beside_oracle(controls: Controls, candidate: Oracle, first_update: int) -> dict[str, Any]:
    """Returns how far controls and candidate lie from the fp64 oracle, where there is one."""
    if controls.oracle is None:
        return {}
    pairs = zip(controls.observed, controls.evaluations, strict=True)
    own = [first_of(observed, evaluation, first_update) for observed, evaluation in pairs]
    return {"oracle": compare_with_oracle(controls.oracle, own, candidate)}


def _ran_control(controls: Controls) -> Observed:
    return next((item for item in controls.observed if item.state("end") is not None), controls.reference)


def check_environment(control: Observed, candidate: Observed, stage: str) -> list[Problem]:
    """Returns one note that lists how the two jobs' environments differ: it explains deviations and decides nothing."""
    one, other = _environment(control), _environment(candidate)
    differing = {name: (one.get(name), other.get(name)) for name in sorted({*one, *other})}
    differing = {name: values for name, values in differing.items() if values[0] != values[1]}
    if not differing:
        return []
    return [
        Problem(
            "SR-JOB-ENVIRONMENT",
            f"control and candidate ran in different environments: {', '.join(differing)}",
            Severity.NOTE,
            where={"stage": stage},
            expected="; ".join(f"{name} {values[0]}" for name, values in differing.items()),
            found="; ".join(f"{name} {values[1]}" for name, values in differing.items()),
            hint="other kernels and libraries round differently; nothing is wrong unless a band is left",
        )
    ]


def _environment(observed: Observed) -> dict[str, Any]:
    header = next(iter(observed.headers.values()), None)
    if header is None:
        return {}
    nested = {name: value for name, value in header.environment.items() if isinstance(value, Mapping)}
    flat = {name: value for name, value in header.environment.items() if name not in nested}
    parts = {f"{name}.{key}": item for name, value in nested.items() for key, item in value.items()}
    return {**header.versions, **flat, **parts}


def check_autocast(control: Observed, candidate: Observed, stage: str) -> list[Problem]:
    """Returns a note when the forward passes of the first update were cast to different types."""
    one, other = (next((u for u in item.updates if u.inputs is not None), None) for item in (control, candidate))
    if one is None or other is None or one.autocast == other.autocast:
        return []
    return [
        Problem(
            "SR-JOB-ENVIRONMENT",
            "the forward pass ran under another autocast than the control's",
            Severity.NOTE,
            where={"stage": stage, "update": other.update},
            expected=one.autocast or "off",
            found=other.autocast or "off",
            hint="another type rounds differently; nothing is wrong unless a band is left",
        )
    ]

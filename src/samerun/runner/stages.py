"""The stages: what each launches, what it costs, and what its evidence says. Cheapest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samerun.core.dtype import parse_dtype
from samerun.core.tolerance import Band
from samerun.errors import FormatError, Problem, SamerunError, Severity, UsageError, has_errors
from samerun.manifest.models import Manifest
from samerun.plan.migration import MigrationPlan
from samerun.runner.assess import (
    assess_evaluation,
    assess_updates,
    boundaries_of,
    check_autocast,
    check_control_motion,
    check_control_rates,
    check_environment,
    check_resumed_at,
    control_microbatches,
    destination_job,
    note_resumed_controls,
    oracle_job,
    source_job,
    trainable_of,
    window_plan,
)
from samerun.runner.evidence import (
    ORACLE,
    control_traces,
    keep_recorded,
    num_control_jobs,
    read_controls,
    read_evaluation,
    read_observed,
    resolve_bands,
    run_folders,
)
from samerun.runner.guarded import check_source, read_fingerprint, write_fingerprint
from samerun.runner.jobs import check_scripts, cost, expected_seconds, launch
from samerun.runner.rehearsal import check_rehearsal
from samerun.runner.work import (
    FINGERPRINT,
    RECORDER_STAGE,
    Clock,
    Work,
    check_state,
    coverage,
    kept_fingerprint,
    write_digests,
)
from samerun.stores.local import fingerprint_tree
from samerun.verify.evidence.job import JobPlan, check_job
from samerun.verify.evidence.observed import Observed
from samerun.verify.evidence.stage import CONTROL, CONVERT, EVAL, INSPECT, LOAD, UPDATE, WINDOW, StageResult
from samerun.verify.load.streams import check_kept_streams
from samerun.verify.updates.attribute import attribute
from samerun.verify.updates.controls import Controls
from samerun.verify.updates.evaluate import Evaluation
from samerun.verify.updates.oracle import check_oracle
from samerun.verify.updates.soundness import check_controls


def run_inspect(work: Work) -> StageResult:
    """Reads the whole checkpoint on this machine: complete, undamaged, resumable? Starts no process."""
    from samerun.verify.inspection.structure import inspect_checkpoint

    tree = fingerprint_tree(work.checkpoint)
    size = sum(item.size_bytes for item in tree.files.values())
    work.progress.stage_begins(
        INSPECT,
        f"read {work.checkpoint}",
        f"{len(tree.files)} files, {size / 2**20:,.1f} MiB, on this machine; no process is started",
    )
    clock = Clock()
    folder = work.directory.begin_stage(INSPECT)
    write_fingerprint(folder / FINGERPRINT, tree)
    try:
        checkpoint = work.open()
    except FormatError as error:
        return clock.result(INSPECT, error.problems, {"fingerprint": tree.digest})
    try:
        # A checkpoint that is converted need not load on the destination as it is.
        direct = work.manifest.convert is None
        destination = work.manifest.destination.layout.to_layout() if direct else None
        report = inspect_checkpoint(checkpoint, deep=True, destination=destination)
        rehearsed = check_rehearsal(work.manifest, work.base, checkpoint.state)
    finally:
        checkpoint.close()
    body = report.to_json()
    problems = [*report.problems, *check_resumable(work.manifest, body), *rehearsed]
    measured = {
        "fingerprint": tree.digest,
        **{name: body.get(name) for name in ("format", "complete", "intact", "resumable", "counts", "progress")},
    }
    return clock.result(INSPECT, problems, measured)


def check_resumable(manifest: Manifest, report: Mapping[str, Any]) -> list[Problem]:
    """Returns a finding when an inspection says that the checkpoint cannot resume, and the manifest wants that."""
    resumable = report.get("resumable") or {}
    if resumable.get("verdict") != "no" or manifest.transition.label == "warm-start":
        return []
    return [
        Problem(
            "SR-RUN-UNRESUMABLE",
            f"the checkpoint cannot resume a run: it lacks {', '.join(resumable.get('lack', ())) or 'what is needed'}",
            where={"stage": "inspect"},
            hint="only a warm-start may begin from it; transition.label says so",
        )
    ]


def run_control(work: Work, plan: MigrationPlan) -> StageResult:
    """Runs the reference on the source layout, as often as the manifest says, or reads the recorded one."""
    manifest, count = work.manifest, num_control_jobs(work.manifest)
    work.progress.stage_begins(CONTROL, _describe_control(manifest, plan, count), cost(manifest, count, None))
    clock = Clock()
    stage = work.directory.begin_stage(CONTROL)
    jobs: list[Mapping[str, Any]] = []
    problems = [*check_source(work.checkpoint, kept_fingerprint(work), "control"), *note_resumed_controls(manifest)]
    if manifest.control.trace:
        keep_recorded(
            work.base / manifest.control.trace,
            stage,
            first_update=plan.first_update,
            num_updates=plan.window_updates,
        )
    microbatches = control_microbatches(manifest, count)
    for (name, folder), micro in zip(run_folders(stage, count).items(), microbatches, strict=True):
        if has_errors(problems):
            break
        ran = launch(
            work,
            folder,
            CONTROL,
            source_job(manifest, plan, micro),
            template=manifest.launch.source_command or manifest.launch.command,
            updates=manifest.window.updates,
            title=f"control {name}: {source_job(manifest, plan, micro).describe()}",
        )
        jobs.append(ran.entry)
        problems += [about_control(problem, name) for problem in ran.problems]
        if ran.observed is not None and not has_errors(problems):
            problems += [
                about_control(problem, name) for problem in check_resumed_at(ran.observed, plan.first_update, "control")
            ]
            problems += [at_control(problem, name) for problem in check_state(work, CONTROL, ran.observed)]
    if manifest.control.oracle and not has_errors(problems):
        jobs_of, found = _run_oracle(work, plan, stage, manifest.control.oracle)
        jobs.append(jobs_of)
        problems += found
    measured: dict[str, Any] = {}
    if not has_errors(problems):
        found, measured = _assess_controls(work, plan, stage)
        problems += found
        write_digests(work, stage)
    return clock.result(CONTROL, problems, measured, jobs)


def _run_oracle(work: Work, plan: MigrationPlan, stage: Path, command: str) -> tuple[Mapping[str, Any], list[Problem]]:
    """Makes the first update on one process in fp64; returns the job's entry and what is wrong with it as an oracle."""
    job = oracle_job(work.manifest, plan)
    title = f"oracle, float64: {job.describe()}"
    ran = launch(work, stage / ORACLE, CONTROL, job, template=command, updates=1, title=title)
    problems = [about_control(problem, ORACLE) for problem in ran.problems]
    if ran.observed is not None and not has_errors(problems):
        problems += [
            about_control(item, ORACLE) for item in check_resumed_at(ran.observed, plan.first_update, "control")
        ]
        state = check_state(work, CONTROL, ran.observed, declare={"dtype": "expected-to-change"})
        problems += [about_control(item, ORACLE) for item in state]
    return ran.entry, problems


def _describe_control(manifest: Manifest, plan: MigrationPlan, count: int) -> str:
    recorded = f"read {manifest.control.trace}" if manifest.control.trace else ""
    ran = f"{manifest.window.updates} updates on {plan.source.world_size} processes ({plan.source.layout})"
    times = f"{count} times " if count > 1 else ""
    return " and ".join(part for part in (recorded, f"{times}{ran}" if count else "") if part)


def about_control(problem: Problem, name: str) -> Problem:
    """A job that is wrong as a control judges nobody; it says nothing about a candidate. Writing files is worse."""
    if problem.severity is not Severity.ERROR or problem.code == "SR-JOB-WROTE":
        return replace(problem, where={**problem.where, "control": name})
    return Problem(
        "SR-CONTROL-JOB",
        f"the control did not run as planned: {problem.code} {problem.message}",
        where={**problem.where, "stage": "control", "control": name},
        expected=problem.expected,
        found=problem.found,
        hint=problem.hint,
    )


def at_control(problem: Problem, name: str) -> Problem:
    """A wrong load on the source's own layout rejects: the same command does not resume this checkpoint anywhere."""
    return replace(
        problem,
        message=f"{problem.message} (on the source's own layout)",
        where={**problem.where, "stage": "control", "control": name},
    )


def _assess_controls(work: Work, plan: MigrationPlan, stage: Path) -> tuple[list[Problem], dict[str, Any]]:
    manifest = work.manifest
    folders = control_traces(manifest, stage)
    try:
        controls = read_controls(folders)
    except UsageError as error:
        return list(error.problems), {}
    problems = check_controls(
        controls,
        first_update=plan.first_update,
        num_updates=plan.window_updates,
        boundaries=boundaries_of(manifest),
        tolerances=manifest.settled_tolerances(),
        precision=parse_dtype(manifest.run.precision),
    )
    problems += check_control_rates(manifest, plan, controls)
    if manifest.control.oracle:
        truth = read_observed(folders[ORACLE])
        problems += check_oracle(truth, controls.reference, plan.first_update)
    problems += check_control_motion(plan, controls)
    measured: dict[str, Any] = {
        "controls": list(controls.names),
        "traces": {name: str(path.relative_to(stage)) for name, path in folders.items()},
        "noise": [],
    }
    if not has_errors(problems):
        _, noise, noisy = resolve_bands(manifest, controls)
        problems += noisy
        measured["noise"] = list(noise)
    measured |= coverage(work, next((item for item in controls.observed if item.state("loaded")), None))
    return problems, measured


def run_convert(work: Work, plan: MigrationPlan) -> StageResult:
    """Writes the checkpoint in the format that the destination loads, reads it back, and proves it equal."""
    from samerun.convert.convert import carry_out
    from samerun.convert.prepare import load_writer, prepare

    wanted = work.manifest.convert
    if wanted is None:
        raise ValueError("this migration converts nothing")
    place = work.resumed_from(LOAD)
    read = "the source is only read; the result lies in the run directory"
    layout, stage = plan.destination.layout, work.manifest.destination.stage
    work.progress.stage_begins(CONVERT, f"convert to {wanted.to} for {layout} and prove it equal", read)
    clock = Clock()
    folder = work.directory.begin_stage(CONVERT)
    if damage := check_source(work.checkpoint, kept_fingerprint(work), "convert"):
        return clock.result(CONVERT, damage, {})
    try:
        opened = work.open()
        try:
            view = opened if wanted.map is None else work.open_for(CONVERT)
            dtypes = {role: parse_dtype(name) for role, name in wanted.dtype.items()}
            prepared = prepare(
                view,
                place,
                to=wanted.to,
                layout=layout,
                allow=wanted.allow,
                dtype=dtypes,
                original=opened,
                masters=wanted.masters,
                writer=load_writer("zero", stage=stage) if wanted.to == "zero" and stage else None,
            )
            done = carry_out(prepared)
        finally:
            opened.close()
    except SamerunError as error:
        found = [replace(item, where={"stage": "convert", **item.where}) for item in error.problems]
        return clock.result(CONVERT, found, {})
    write_fingerprint(folder / FINGERPRINT, fingerprint_tree(place))
    body = done.to_json()
    measured = {name: body[name] for name in ("bytes_read", "bytes_written", "seconds", "state")}
    places = {"checkpoint": place.name, "proof": Path(done.proof).name, "format": wanted.to}
    return clock.result(CONVERT, done.problems, measured | places)


def run_candidate(work: Work, plan: MigrationPlan, bands: Sequence[Band], stage: str) -> StageResult:
    """Starts one disposable job on the destination's layout and compares what it recorded."""
    manifest, results = work.manifest, work.directory.read_results()
    job = destination_job(plan, RECORDER_STAGE[stage])
    updates = {UPDATE: 1, WINDOW: plan.window_updates}.get(stage, 0)
    work.progress.stage_begins(
        stage, _describe(stage, job, updates), cost(manifest, 1, expected_seconds(results, updates))
    )
    clock = Clock()
    folder = work.directory.begin_stage(stage)
    damage = check_source(work.checkpoint, kept_fingerprint(work), job.stage)
    if manifest.convert is not None and not damage:
        kept = read_fingerprint(work.directory.stage(CONVERT) / FINGERPRINT)
        damage = check_source(work.resumed_from(stage), kept, job.stage)
    if damage:
        return clock.result(stage, damage, {})
    title = f"{job.stage}: {job.describe()}"
    ran = launch(work, folder, stage, job, template=manifest.launch.command, updates=updates, title=title)
    problems = [*ran.problems, *check_scripts(results.get(CONTROL), ran.entry, job.stage)]
    measured: dict[str, Any] = {}
    if ran.observed is not None and not has_errors(check_job(ran.observed, job)):
        found, measured = assess_candidate(work, plan, bands, stage, ran.observed, check_values=True)
        problems += found if not has_errors(ran.problems) else _only_named(found)
    return clock.result(stage, problems, measured, [ran.entry])


def _only_named(problems: Sequence[Problem]) -> list[Problem]:
    """Of a job that crashed, keeps what explains it and leaves out what it merely did not get to."""
    unreached = ("SR-UPD-MISSING", "SR-UPD-UNRECORDED", "SR-UPD-BOUNDARY", "SR-EVAL-MISSING", "SR-JOB-SILENT")
    return [problem for problem in problems if problem.code not in unreached]


def assess_candidate(
    work: Work,
    plan: MigrationPlan,
    bands: Sequence[Band],
    stage: str,
    observed: Observed,
    *,
    check_values: bool,
) -> tuple[list[Problem], dict[str, Any]]:
    """Returns findings and measured numbers from a candidate's trace.

    Args:
        work: the run.
        plan: the sealed plan.
        bands: the sealed bands.
        stage: one of the stages that start a candidate.
        observed: the trace.
        check_values: whether to compare the loaded state with the checkpoint, which must be there for it.
    """
    word, manifest = RECORDER_STAGE[stage], work.manifest
    controls = read_controls(control_traces(manifest, work.directory.stage(CONTROL)))
    problems = check_resumed_at(observed, plan.first_update, word)
    measured: dict[str, Any] = {}
    if check_values and not problems:
        problems += _check_state_once(work, stage, observed)
    if stage == LOAD:
        measured |= coverage(work, observed) if check_values else {}
        problems += check_environment(controls.reference, observed, word)
        problems += _check_streams(controls, observed)
    if has_errors(problems):
        return [replace(item, where={"stage": word, **item.where}) for item in problems], measured
    if stage == EVAL:
        evaluation = read_evaluation(work.directory.stage(stage) / "trace", observed)
        found = assess_evaluation(manifest, controls, evaluation, bands)
        named = attribute(found.problems, controls, observed, evaluation)
        problems, measured = [*problems, *named], {**measured, **found.measured}
    elif stage in (UPDATE, WINDOW):
        state = observed.state("loaded")
        trainable = trainable_of(state.body if state else None)
        found = assess_updates(controls, observed, window_plan(manifest, plan, bands, word, trainable))
        named = attribute(found.problems, controls, observed, _evaluated(work))
        problems += check_autocast(controls.reference, observed, word)
        problems, measured = [*problems, *named], {**measured, **found.measured}
    return [replace(item, where={"stage": word, **item.where}) for item in problems], measured


def _evaluated(work: Work) -> Evaluation | None:
    """Returns the evaluation that this candidate made in its own stage."""
    folder = work.directory.stage(EVAL) / "trace"
    observed = read_observed(folder) if folder.is_dir() else None
    return read_evaluation(folder, observed) if observed is not None else None


def _check_streams(controls: Controls, observed: Observed) -> list[Problem]:
    before = next((state for item in controls.observed if (state := item.state("loaded"))), None)
    now = observed.state("loaded")
    return check_kept_streams(before.body, now.body) if before is not None and now is not None else []


def _check_state_once(work: Work, stage: str, observed: Observed) -> list[Problem]:
    """Compares the state in full in the load stage; later, only if it is not what the load stage saw."""
    if stage != LOAD:
        seen = read_observed(work.directory.stage(LOAD) / "trace")
        before, now = (item.state("loaded") if item else None for item in (seen, observed))
        if before is not None and now is not None and _comparable(before.body) == _comparable(now.body):
            return []
    return check_state(work, stage, observed)


def _comparable(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("rng", "generators")}


def _describe(stage: str, job: JobPlan, updates: int) -> str:
    what = {
        LOAD: "load the checkpoint and compare every value",
        EVAL: "evaluate the fixed examples",
        UPDATE: "make one update",
        WINDOW: f"make {updates} updates",
    }[stage]
    return f"{what} on {job.describe()}"

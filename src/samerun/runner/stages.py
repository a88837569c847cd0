"""The stages: what each launches, what it costs, and what its evidence says. Cheapest first."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samerun.core.dtype import parse_dtype
from samerun.core.tolerance import Band
from samerun.errors import FormatError, Problem, Severity, UsageError, has_errors
from samerun.manifest.models import Manifest
from samerun.plan.migration import MigrationPlan
from samerun.runner.assess import (
    assess_evaluation,
    assess_updates,
    boundaries_of,
    check_environment,
    check_resumed_at,
    control_microbatches,
    destination_job,
    source_job,
    trainable_of,
    window_plan,
)
from samerun.runner.evidence import (
    control_traces,
    keep_recorded,
    num_control_jobs,
    read_controls,
    read_evaluation,
    read_observed,
    resolve_bands,
    run_folders,
)
from samerun.runner.guarded import (
    check_source,
    check_untouched,
    fingerprint_watched,
    read_fingerprint,
    write_fingerprint,
)
from samerun.runner.launch import Job, fill_command, job_environment, new_token, run_job
from samerun.runner.progress import Progress
from samerun.runner.rundir import RunDirectory
from samerun.stores.local import fingerprint_tree
from samerun.verify.bands import check_controls
from samerun.verify.job import JobPlan, Outcome, check_job, check_outcome, describe_status
from samerun.verify.observed import Observed
from samerun.verify.stage import STAGES, StageResult, Status

if TYPE_CHECKING:
    from samerun.formats.base import Checkpoint

INSPECT, CONTROL, LOAD, EVAL, UPDATE, WINDOW, JUDGE = STAGES

RECORDER_STAGE: Mapping[str, str] = {
    CONTROL: "control",
    LOAD: "load",
    EVAL: "eval",
    UPDATE: "update",
    WINDOW: "window",
}
"""What a job is told to be (`SAMERUN_STAGE`) in each stage that starts one."""

FINGERPRINT = "fingerprint.json"
DIGESTS = "digests.json"


@dataclass(slots=True)
class Work:
    """What the stages of one run share. `base` is the folder that the manifest's paths are relative to."""

    directory: RunDirectory
    manifest: Manifest
    base: Path
    progress: Progress
    digests: dict[tuple[str, str, str], str] = field(default_factory=dict[tuple[str, str, str], str])

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that is moved."""
        return (self.base / self.manifest.run.checkpoint).resolve()

    @property
    def watched(self) -> list[Path]:
        """Everything that a disposable job may not change."""
        return [self.checkpoint, *((self.base / path).resolve() for path in self.manifest.watch)]

    def open(self) -> Checkpoint:
        """Opens the checkpoint. Raises FormatError or UsageError as the readers do."""
        from samerun.formats.detect import open_checkpoint

        return open_checkpoint(self.checkpoint, self.manifest.run.format)


@dataclass(frozen=True, slots=True)
class Ran:
    """One job that has ended: what it recorded (None: nothing), the findings about it, and its entry in the result."""

    observed: Observed | None
    problems: tuple[Problem, ...]
    entry: Mapping[str, Any]
    outcome: Outcome


class Clock:
    """Measures one stage."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.started = datetime.now(UTC).isoformat(timespec="seconds")

    def result(
        self,
        stage: str,
        problems: Sequence[Problem],
        measured: Mapping[str, Any],
        jobs: Sequence[Mapping[str, Any]] = (),
    ) -> StageResult:
        """Returns the stage's result: failed if there is an error among the findings."""
        status: Status = "fail" if has_errors(problems) else "pass"
        return StageResult(
            stage=stage,
            status=status,
            problems=tuple(problems),
            measured=measured,
            jobs=tuple(jobs),
            seconds=round(time.monotonic() - self._started, 3),
            started=self.started,
        )


# --- 01-inspect ---------------------------------------------------------------------------------------------------


def run_inspect(work: Work) -> StageResult:
    """Reads the whole checkpoint on this machine: complete, undamaged, resumable? Starts no process."""
    from samerun.verify.structure import inspect_checkpoint

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
        report = inspect_checkpoint(checkpoint, deep=True, destination=work.manifest.destination.layout.to_layout())
    finally:
        checkpoint.close()
    body = report.to_json()
    problems = [*report.problems, *check_resumable(work.manifest, body)]
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


# --- jobs ---------------------------------------------------------------------------------------------------------


def launch(work: Work, folder: Path, stage: str, job: JobPlan, *, template: str, updates: int, title: str) -> Ran:
    """Starts one disposable job in `folder` and checks everything about it that does not need a control."""
    manifest = work.manifest
    folder.mkdir(parents=True, exist_ok=True)
    command = fill_command(template, placeholders(work, job))
    token = new_token()
    recorder = {
        "SAMERUN_STAGE": job.stage,
        "SAMERUN_TRACE_DIR": str((folder / "trace").resolve()),
        "SAMERUN_MAX_UPDATES": str(updates),
        "SAMERUN_MANIFEST": str(work.directory.manifest.resolve()),
    }
    started = Job(
        command=command,
        directory=(work.base / manifest.launch.directory).resolve(),
        environment=job_environment(os.environ, manifest.launch.environment, recorder, token),
        log=folder / "log.txt",
        timeout_seconds=manifest.launch.timeout_seconds,
        token=token,
    )
    before = fingerprint_watched(work.watched)
    work.directory.write_state(job={"stage": stage, "token": token})
    work.progress.job_begins(title, started.shell_line(), manifest.launch.timeout_seconds)
    outcome = run_job(started, work.progress)
    status = "timed out" if outcome.timed_out else describe_status(outcome.returncode)
    work.progress.job_ends(outcome.seconds, status)
    problems = check_untouched(before, fingerprint_watched(work.watched), job.stage)
    observed = read_observed(folder / "trace")
    problems += _check_recorded(observed, job, outcome, manifest)
    entry = {
        "title": title,
        "command": started.shell_line(),
        "directory": str(started.directory),
        "environment": {**manifest.launch.environment, **recorder},
        "returncode": outcome.returncode,
        "timed_out": outcome.timed_out,
        "seconds": round(outcome.seconds, 3),
        **_pace(observed, outcome),
        "scripts": hash_scripts(command, started.directory),
    }
    return Ran(observed, tuple(problems), entry, outcome)


def _pace(observed: Observed | None, outcome: Outcome) -> dict[str, float]:
    """Returns how long the job's updates took each, and everything else: what later stages are estimated from."""
    times = [item.seconds for item in observed.updates if item.seconds is not None] if observed else []
    if len(times) < 2:
        return {"seconds_to_start": round(outcome.seconds, 3), "seconds_per_update": 0.0}
    each = (times[-1] - times[0]) / (len(times) - 1)
    start = max(outcome.seconds - each * len(times), 0.0)
    return {"seconds_to_start": round(start, 3), "seconds_per_update": round(each, 4)}


def _check_recorded(observed: Observed | None, job: JobPlan, outcome: Outcome, manifest: Manifest) -> list[Problem]:
    """Orders findings by cause: a job in the wrong world may well crash for it, and is silent if it crashed early."""
    ended = check_outcome(outcome, job.stage, timeout_seconds=manifest.launch.timeout_seconds)
    if observed is None and has_errors(ended):
        return ended
    planned = check_job(observed, job)
    records = (
        [replace(item, where={"stage": job.stage, **item.where}) for item in observed.problems] if observed else []
    )
    return [*planned, *ended, *records]


def placeholders(work: Work, job: JobPlan) -> dict[str, object]:
    """Returns the value of every placeholder of a launch command, for one job."""
    axes = job.layout.to_dict()
    return {
        "python": sys.executable,
        "checkpoint": work.checkpoint,
        "world_size": job.world_size,
        "layout": job.layout,
        **{axis: axes[axis] for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")},
        "global_batch": job.global_batch,
        "max_microbatch": job.max_microbatch,
        "passes": job.passes,
        "replicas": job.layout.batch_replicas,
        "updates": work.manifest.window.updates,
    }


def hash_scripts(command: Sequence[str], directory: Path) -> dict[str, str]:
    """Returns the hash of every file that the command names by a relative or absolute path: the scripts it runs."""
    from samerun.runner.evidence import hash_file

    found = {word: directory / word for word in command[1:] if len(word) < 4096 and "\0" not in word}
    return {word: hash_file(path) for word, path in found.items() if path.is_file()}


def check_scripts(control: StageResult | None, candidate: Mapping[str, Any], stage: str) -> list[Problem]:
    """Returns a warning for every script that changed between the control and the candidate."""
    before = {name: value for job in (control.jobs if control else ()) for name, value in job["scripts"].items()}
    changed = [name for name, value in candidate["scripts"].items() if before.get(name, value) != value]
    return [
        Problem(
            "SR-RUN-SCRIPT",
            f"{name} is not the file that the control ran",
            Severity.WARNING,
            where={"stage": stage, "file": name},
            hint="a difference from the control may come from the edit and not from the move; to compare like with "
            "like, begin a new run directory",
        )
        for name in changed
    ]


def check_state(work: Work, observed: Observed) -> list[Problem]:
    """Compares what a job holds after loading with the checkpoint, tensor by tensor."""
    from samerun.verify.load import check_loaded

    state = observed.state("loaded")
    if state is None:
        return []
    checkpoint = work.open()
    try:
        problems = check_loaded(
            checkpoint,
            {**state.body, "update": state.update},
            declare=work.manifest.declare.model_dump(mode="json"),
            optimizer=work.manifest.run.optimizer,
            digests=work.digests,
        )
    finally:
        checkpoint.close()
    return problems


def _coverage(work: Work, observed: Observed | None) -> dict[str, Any]:
    state = observed.state("loaded") if observed else None
    if state is None:
        return {}
    checkpoint = work.open()
    try:
        saved = len(checkpoint.state.tensors)
    finally:
        checkpoint.close()
    return {"tensors": len(state.body["tensors"]), "tensors_saved": saved, "state": state.body.get("state")}


# --- 02-control ---------------------------------------------------------------------------------------------------


def run_control(work: Work, plan: MigrationPlan) -> StageResult:
    """Runs the reference on the source layout, as often as the manifest says, or reads the recorded one."""
    manifest, count = work.manifest, num_control_jobs(work.manifest)
    work.progress.stage_begins(CONTROL, _describe_control(manifest, plan, count), _cost(manifest, count, None))
    clock = Clock()
    stage = work.directory.begin_stage(CONTROL)
    jobs: list[Mapping[str, Any]] = []
    problems = check_source(work.checkpoint, kept_fingerprint(work), "control")
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
            problems += [at_control(problem, name) for problem in check_state(work, ran.observed)]
    measured: dict[str, Any] = {}
    if not has_errors(problems):
        found, measured = _assess_controls(work, plan, stage)
        problems += found
        write_digests(work, stage)
    return clock.result(CONTROL, problems, measured, jobs)


def _describe_control(manifest: Manifest, plan: MigrationPlan, count: int) -> str:
    recorded = f"read {manifest.control.trace}" if manifest.control.trace else ""
    ran = f"{manifest.window.updates} updates on {plan.source.world_size} processes ({plan.source.layout})"
    times = f"{count} times " if count > 1 else ""
    return " and ".join(part for part in (recorded, f"{times}{ran}" if count else "") if part)


def _cost(manifest: Manifest, count: int, seconds: float | None) -> str:
    if not count:
        return "no process is started"
    jobs = "1 job" if count == 1 else f"{count} jobs"
    about = f", about {seconds:.0f} s judging by the control" if seconds is not None else ""
    return f"{jobs}{about}, at most {manifest.launch.timeout_seconds:g} s each"


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
        tolerances=manifest.tolerances.by_metric(),
        precision=parse_dtype(manifest.run.precision),
    )
    measured: dict[str, Any] = {
        "controls": list(controls.names),
        "traces": {name: str(path.relative_to(stage)) for name, path in folders.items()},
        "noise": [],
    }
    if not has_errors(problems):
        _, noise, noisy = resolve_bands(manifest, controls)
        problems += noisy
        measured["noise"] = list(noise)
    measured |= _coverage(work, next((item for item in controls.observed if item.state("loaded")), None))
    return problems, measured


def write_digests(work: Work, stage: Path) -> None:
    """Keeps the checkpoint's digests, so that reading it once is enough."""
    work.directory.write_json(stage / DIGESTS, {"digests": [[*key, value] for key, value in work.digests.items()]})


def read_digests(work: Work) -> None:
    """Takes up the digests that the control stage kept; they hold while the checkpoint's fingerprint does."""
    path = work.directory.stage(CONTROL) / DIGESTS
    if path.is_file():
        rows = json.loads(path.read_text(encoding="utf-8"))["digests"]
        work.digests.update({(saved, key, dtype): value for saved, key, dtype, value in rows})


def kept_fingerprint(work: Work) -> Any:
    """Returns the fingerprint that the inspection kept."""
    return read_fingerprint(work.directory.stage(INSPECT) / FINGERPRINT)


# --- 03-load to 06-window -----------------------------------------------------------------------------------------


def run_candidate(work: Work, plan: MigrationPlan, bands: Sequence[Band], stage: str) -> StageResult:
    """Starts one disposable job on the destination's layout and compares what it recorded."""
    manifest, results = work.manifest, work.directory.read_results()
    job = destination_job(plan, RECORDER_STAGE[stage])
    updates = {UPDATE: 1, WINDOW: plan.window_updates}.get(stage, 0)
    work.progress.stage_begins(stage, _describe(stage, job, updates), _cost(manifest, 1, _expected(results, updates)))
    clock = Clock()
    folder = work.directory.begin_stage(stage)
    if damage := check_source(work.checkpoint, kept_fingerprint(work), job.stage):
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
        measured |= _coverage(work, observed) if check_values else {}
        problems += check_environment(controls.reference, observed, word)
    if has_errors(problems):
        return [replace(item, where={"stage": word, **item.where}) for item in problems], measured
    if stage == EVAL:
        evaluation = read_evaluation(work.directory.stage(stage) / "trace", observed)
        found = assess_evaluation(manifest, controls, evaluation, bands)
        problems, measured = [*problems, *found.problems], {**measured, **found.measured}
    elif stage in (UPDATE, WINDOW):
        state = observed.state("loaded")
        trainable = trainable_of(state.body if state else None)
        found = assess_updates(controls, observed, window_plan(manifest, plan, bands, word, trainable))
        problems, measured = [*problems, *found.problems], {**measured, **found.measured}
    return [replace(item, where={"stage": word, **item.where}) for item in problems], measured


def _check_state_once(work: Work, stage: str, observed: Observed) -> list[Problem]:
    """Compares the state in full in the load stage; later, only if it is not what the load stage saw."""
    if stage != LOAD:
        seen = read_observed(work.directory.stage(LOAD) / "trace")
        before, now = (item.state("loaded") if item else None for item in (seen, observed))
        if before is not None and now is not None and _comparable(before.body) == _comparable(now.body):
            return []
    return check_state(work, observed)


def _comparable(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "rng"}


def _describe(stage: str, job: JobPlan, updates: int) -> str:
    what = {
        LOAD: "load the checkpoint and compare every value",
        EVAL: "evaluate the fixed examples",
        UPDATE: "make one update",
        WINDOW: f"make {updates} updates",
    }[stage]
    return f"{what} on {job.describe()}"


def _expected(results: Mapping[str, StageResult], updates: int) -> float | None:
    """Returns how long a job may take, judging by the control: its start, and so many of its updates."""
    jobs = results[CONTROL].jobs if CONTROL in results else ()
    if not jobs:
        return None
    return float(jobs[0]["seconds_to_start"]) + updates * float(jobs[0]["seconds_per_update"])

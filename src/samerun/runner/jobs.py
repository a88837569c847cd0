"""One disposable job: started, ended, and checked against its plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samerun.errors import Problem, Severity, has_errors
from samerun.manifest.models import Manifest
from samerun.runner.evidence import hash_file, read_observed
from samerun.runner.guarded import check_untouched, fingerprint_watched
from samerun.runner.launch import Job, fill_command, job_environment, new_token, run_job
from samerun.runner.work import CONTROL, Work
from samerun.verify.evidence.job import JobPlan, Outcome, check_job, check_outcome, describe_status
from samerun.verify.evidence.observed import Observed
from samerun.verify.evidence.stage import StageResult


@dataclass(frozen=True, slots=True)
class Ran:
    """One job that has ended: what it recorded (None: nothing), the findings about it, and its entry in the result."""

    observed: Observed | None
    problems: tuple[Problem, ...]
    entry: Mapping[str, Any]
    outcome: Outcome


def launch(work: Work, folder: Path, stage: str, job: JobPlan, *, template: str, updates: int, title: str) -> Ran:
    """Starts one disposable job in `folder` and checks everything about it that does not need a control."""
    manifest = work.manifest
    folder.mkdir(parents=True, exist_ok=True)
    command = fill_command(template, placeholders(work, stage, job))
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
    watched = work.watched(stage)
    before = fingerprint_watched(watched)
    work.directory.write_state(job={"stage": stage, "token": token})
    work.progress.job_begins(title, started.shell_line(), manifest.launch.timeout_seconds)
    outcome = run_job(started, work.progress)
    status = "timed out" if outcome.timed_out else describe_status(outcome.returncode)
    work.progress.job_ends(outcome.seconds, status)
    problems = check_untouched(before, fingerprint_watched(watched), job.stage)
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
    finished = observed is not None and observed.finished
    ended = check_outcome(outcome, job.stage, timeout_seconds=manifest.launch.timeout_seconds, finished=finished)
    if observed is None and has_errors(ended):
        return ended
    planned = check_job(observed, job)
    records = (
        [replace(item, where={"stage": job.stage, **item.where}) for item in observed.problems] if observed else []
    )
    return [*planned, *ended, *records]


def placeholders(work: Work, stage: str, job: JobPlan) -> dict[str, object]:
    """Returns the value of every placeholder of a launch command, for one job."""
    axes = job.layout.to_dict()
    return {
        "python": sys.executable,
        "checkpoint": work.resumed_from(stage),
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


def cost(manifest: Manifest, count: int, seconds: float | None) -> str:
    """Returns what starting `count` jobs costs, in words; `seconds` is how long one is expected to take."""
    if not count:
        return "no process is started"
    jobs = "1 job" if count == 1 else f"{count} jobs"
    about = f", about {seconds:.0f} s judging by the control" if seconds is not None else ""
    return f"{jobs}{about}, at most {manifest.launch.timeout_seconds:g} s each"


def expected_seconds(results: Mapping[str, StageResult], updates: int) -> float | None:
    """Returns how long a job may take, judging by the control: its start, and so many of its updates."""
    jobs = results[CONTROL].jobs if CONTROL in results else ()
    if not jobs:
        return None
    return float(jobs[0]["seconds_to_start"]) + updates * float(jobs[0]["seconds_per_update"])

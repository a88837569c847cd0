"""The demonstration from the first update to the verdict, as the commands that a person would type."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samerun.demo.answers import decide, fill_in
from samerun.demo.faults import damage_launcher
from samerun.demo.workspace import DemoSettings, Workspace
from samerun.errors import ExecutionError, Problem
from samerun.runner.launch import Job, Watcher, job_environment, new_token, run_job

Verb = Callable[[Sequence[str]], int]
"""Runs a verb of the command line and returns its exit code."""

Say = Callable[[str], None]

# What a move shares with another move of the same run to the same layout: everything up to the sealed control.
_SHARED = ("manifest.yaml", "sealed.json", "state.json", "stages/01-inspect", "stages/02-control")


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What came out: `verdict` is the judge document, `named` the injected fault's findings among its reasons."""

    exit_code: int
    verdict: dict[str, Any]
    named: tuple[str, ...]
    report: Path | None


def train_source(space: Workspace, watcher: Watcher) -> None:
    """Trains the run that is going to be moved, unless this workspace holds it already.

    Raises:
        ExecutionError: SR-DEMO-TRAINING if the job fails; its last lines are in the message.
    """
    settings = space.settings
    if space.source_checkpoint.joinpath(".metadata").exists():
        return
    shutil.rmtree(space.run / "checkpoints", ignore_errors=True)
    shutil.rmtree(space.run / "trace", ignore_errors=True)
    space.run.mkdir(parents=True, exist_ok=True)
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(settings.source.world_size), str(space.example.resolve() / "train.py")),
        *("--layout", str(settings.source), "--updates", str(settings.save_at_update)),
        *("--global-batch", str(settings.global_batch), "--max-microbatch", str(settings.max_microbatch)),
        *("--save-dir", "checkpoints", "--save-at", str(settings.save_at_update // 2), "--trace-dir", "trace"),
        *settings.training_arguments,
    )
    token = new_token()
    log = space.run / "training.log"
    job = Job(
        command=command,
        directory=space.run,
        environment=job_environment(os.environ, {"OMP_NUM_THREADS": "1"}, {}, token),
        log=log,
        timeout_seconds=900,
        token=token,
    )
    outcome = run_job(job, watcher)
    if outcome.returncode or not space.source_checkpoint.exists():
        raise ExecutionError(
            Problem(
                "SR-DEMO-TRAINING",
                "the demonstration's training job failed",
                where={"file": str(log)},
                hint="its last lines: " + " | ".join(outcome.tail[-3:]),
            )
        )


def make_manifest(space: Workspace, verb: Verb, say: Say) -> int:
    """Drafts the manifest and answers its questions; returns the exit code of `plan`."""
    settings = space.settings
    code = verb(["draft", str(space.checkpoint), "--to", str(settings.destination), "-o", str(space.manifest)])
    if code:
        return code
    answers = decide(settings, space.example)
    say("the demonstration answers for you:")
    for key in ("batch.invariant", "batch.option", "transition.label", "control.kind"):
        say(f"    {key}: {answers[key]}")
    fill_in(space.manifest, answers)
    return verb(["plan", str(space.manifest)])


def run_demo(settings: DemoSettings, verb: Verb, watcher: Watcher, say: Say) -> DemoOutcome:
    """Trains, moves, breaks what is to be broken, and judges.

    A move with a fault in the job goes through the same sealed control as the clean one to the same layout, when that
    was made in this workspace before; else its control is run first. The fault comes after the seal. Files are damaged
    after the plan, as when a shard is lost on the way to the new machines.
    """
    space, fault = Workspace(settings), settings.fault
    space.check_directory()
    space.copy_example()
    train_source(space, watcher)
    space.prepare()
    verb(["inspect", str(space.checkpoint)])
    if code := make_manifest(space, verb, say):
        return DemoOutcome(code, {}, (), None)
    run = ["run", str(space.manifest), "--dir", str(space.rundir)]
    if fault is not None and fault.damage is not None:
        say(f"fault {fault.name}: {fault.story} ({fault.damage(space.checkpoint)})")
    elif fault is not None:
        if not share_control(space):
            verb([*run, "--until", "control"])
        say(f"fault {fault.name}: {fault.story} ({damage_launcher(fault, space.launcher)})")
    code = verb(run)
    verdict = read_verdict(space)
    report = space.move / "report.html"
    verb(["report", str(space.rundir), "-o", str(report)])
    return DemoOutcome(code, verdict, named_findings(settings, verdict), report if report.exists() else None)


def share_control(space: Workspace) -> bool:
    """Copies the sealed control of the clean move to the same layout; returns whether there was one to copy."""
    clean = Workspace(replace(space.settings, fault=None))
    if not (clean.rundir / "sealed.json").exists() or not (clean.rundir / "stages/02-control/result.json").exists():
        return False
    if clean.manifest.read_bytes() != space.manifest.read_bytes():
        return False
    for name in _SHARED:
        target = space.rundir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = clean.rundir / name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
    return True


def read_verdict(space: Workspace) -> dict[str, Any]:
    """Returns the judge document of this move; empty if there is none."""
    path = space.rundir / "verdict.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def named_findings(settings: DemoSettings, verdict: dict[str, Any]) -> tuple[str, ...]:
    """Returns the codes by which the verdict names the injected fault."""
    found = {reason["code"] for reason in verdict.get("reasons", ())}
    return tuple(code for code in (settings.fault.codes if settings.fault else ()) if code in found)

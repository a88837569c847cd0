"""The whole sequence: stage after stage, resumable after a kill at any point, and the verdict at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from samerun.core.tolerance import Band, bands_from_json, bands_to_json
from samerun.errors import Problem, Severity, StalePlan, UsageError
from samerun.manifest.read import Document, read_document, require_manifest
from samerun.manifest.seal import SealRecord, check_record, check_seal, reseal, seal
from samerun.plan.migration import MigrationPlan, plan_migration
from samerun.runner.evidence import (
    control_traces,
    hash_folder,
    read_controls,
    resolve_bands,
)
from samerun.runner.judging import judge_run
from samerun.runner.launch import interruptible, stop_processes
from samerun.runner.progress import Progress, Silent
from samerun.runner.rundir import RunDirectory
from samerun.runner.stages import run_candidate, run_control, run_convert, run_inspect
from samerun.runner.work import Work, read_digests
from samerun.verify.evidence.stage import CONTROL, CONVERT, INSPECT, JUDGE, STAGES, StageResult
from samerun.verify.judge import Verdict

KEEPS_CONTROLS = ("manifest.tolerances.", "manifest.transition.reason", "manifest.convert")
"""Changes under which the controls that were run still say what they said."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `stopped_at` is the stage that `until` named, when everything up to it passed."""

    directory: Path
    verdict: Verdict
    results: Mapping[str, StageResult]
    stopped_at: str | None = None

    @property
    def exit_code(self) -> int:
        """The verdict's, or 0 when the run was asked to stop earlier and everything until then passed."""
        return 0 if self.stopped_at is not None else self.verdict.exit_code


def default_directory(manifest: Path) -> Path:
    """Returns where a manifest's run goes when nothing else is said: `move.yaml` to `move.run` beside it."""
    return manifest.with_suffix(".run")


def parse_stage(name: str) -> str:
    """Returns the full name of a stage given as `03-load` or `load`.

    Raises:
        UsageError: if there is no such stage; the message lists them.
    """
    found = [stage for stage in STAGES if name in (stage, stage.partition("-")[2])]
    if not found:
        raise UsageError(
            Problem(
                "SR-RUN-STAGE",
                f"there is no stage {name!r}",
                expected=", ".join(stage.partition("-")[2] for stage in STAGES),
                found=name,
            )
        )
    return found[0]


def run_migration(
    manifest: Path,
    directory: Path | None = None,
    *,
    until: str | None = None,
    reseal_reason: str | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Runs every stage that is not done yet, up to the first failure, and judges.

    Args:
        manifest: the manifest file; everything in it must be decided.
        directory: the run directory, made if it is not there; beside the manifest by default.
        until: the last stage to run.
        reseal_reason: why something that was sealed has changed; recorded with a further seal.
        progress: who is told what happens.

    Raises:
        UsageError: the manifest, the run directory or the path of the checkpoint cannot be used.
        UndecidedError, PlanError: the manifest cannot be planned.
        StalePlan: something that was sealed has changed and no reason was given.
        KeyboardInterrupt: interrupted; the running job was stopped, and running again goes on.
    """
    document = read_document(manifest)
    decided = require_manifest(document)
    place = RunDirectory(directory or default_directory(manifest))
    work = Work(place, decided, manifest.resolve().parent, progress or Silent())
    if not work.checkpoint.exists() and not place.sealed.exists():
        raise UsageError(_no_checkpoint(work))
    last = parse_stage(until) if until else None
    place.create(checkpoint=work.checkpoint)
    with place.lock(), interruptible():
        _end_leftovers(work)
        record = _take_up(work, document, reseal_reason)
        stopped = _run_stages(work, record, last, reseal_reason)
        verdict = _judge(work) if stopped is None else judge_run(place)
        return RunResult(place.root, verdict, place.read_results(), stopped)


def _no_checkpoint(work: Work) -> Problem:
    return Problem(
        "SR-RUN-CHECKPOINT",
        "there is no checkpoint at the manifest's path",
        where={"key": "run.checkpoint", "file": str(work.checkpoint)},
        hint="the path is relative to the manifest's own folder",
    )


def _end_leftovers(work: Work) -> None:
    """Ends the job of a run that was killed before it could do so itself."""
    job = work.directory.read_state().get("job")
    if not job:
        return
    if ended := stop_processes(str(job["token"])):
        work.progress.note(
            [
                Problem(
                    "SR-RUN-LEFTOVER",
                    f"{ended} processes of an interrupted run were still there and have been ended",
                    Severity.NOTE,
                    where={"stage": str(job["stage"])},
                    hint="the stage is redone from an empty folder",
                )
            ]
        )
    work.directory.write_state(job=None)


def _take_up(work: Work, document: Document, reason: str | None) -> SealRecord | None:
    """Compares the manifest with what was sealed, drops what no longer holds, and keeps a copy of the manifest.

    Returns the seals that hold, or None when there is none or a further one is needed.
    """
    place, manifest = work.directory, work.manifest
    record = place.read_seals()
    if record is not None:
        broken = check_record(record)
        changed = [] if broken else check_seal(record.current, manifest)
        if broken or (changed and not (reason and reason.strip())):
            raise StalePlan([*broken, *changed])
        if changed:
            keys = [str(problem.where["key"]) for problem in changed]
            keeps = all(key.startswith(KEEPS_CONTROLS) for key in keys)
            place.drop_stages(STAGES[2:] if keeps else STAGES)
        elif reason:
            work.progress.note([_nothing_to_reseal()])
        record = None if changed else record
    elif place.read_state().get("manifest_sha256") not in (None, manifest.sha256()):
        place.drop_stages(STAGES)  # nothing was sealed, so no candidate has run: begin again
    place.write_text(place.manifest, document.text)
    place.write_state(manifest=str(Path(document.name).resolve()), manifest_sha256=manifest.sha256())
    return record


def _nothing_to_reseal() -> Problem:
    return Problem(
        "SR-SEAL-SAME",
        "nothing that was sealed has changed, so no further seal is made",
        Severity.NOTE,
        hint="--reseal records why a sealed declaration was changed; it does not run anything again",
    )


def _run_stages(work: Work, record: SealRecord | None, last: str | None, reason: str | None) -> str | None:
    """Runs what is not done. Returns `last` if it was reached and passed, else None."""
    plan: MigrationPlan | None = None
    bands: Sequence[Band] = ()
    for stage in work.stages[:-1]:
        if stage != INSPECT and plan is None:
            plan = _plan(work, record)
        result = work.directory.read_result(stage)
        if result is not None and result.passed:
            work.progress.stage_kept(result)
        else:
            result = _run_stage(work, plan, bands, stage)
        if not result.passed:
            return None
        if stage == CONTROL and plan is not None:
            bands = _ensure_sealed(work, plan, record, reason)
        if stage == last:
            return stage
    return None


def _run_stage(work: Work, plan: MigrationPlan | None, bands: Sequence[Band], stage: str) -> StageResult:
    work.directory.drop_stages(STAGES[STAGES.index(stage) :])
    if stage == INSPECT:
        result = run_inspect(work)
    elif plan is None:
        raise ValueError(f"stage {stage} needs a plan")
    elif stage == CONTROL:
        result = run_control(work, plan)
    elif stage == CONVERT:
        result = run_convert(work, plan)
    else:
        result = run_candidate(work, plan, bands, stage)
    work.directory.write_result(result)
    work.progress.stage_ends(result)
    return result


def _plan(work: Work, record: SealRecord | None) -> MigrationPlan:
    """Returns the sealed plan, or plans from the manifest and the checkpoint's metadata."""
    if record is not None:
        return MigrationPlan.from_json(record.current.plan)
    inspected = work.directory.read_result(INSPECT)
    fingerprint = inspected.measured.get("fingerprint") if inspected else None
    checkpoint = work.open()
    try:
        plan = plan_migration(work.manifest, checkpoint.state)
    finally:
        checkpoint.close()
    plan = replace(plan, checkpoint=replace(plan.checkpoint, fingerprint=fingerprint))
    work.directory.write_json(work.directory.plan, plan.to_json())
    return plan


def _ensure_sealed(work: Work, plan: MigrationPlan, record: SealRecord | None, reason: str | None) -> Sequence[Band]:
    """Seals everything that was declared, before any candidate runs; or checks that the seal still holds.

    The bands follow from the controls' traces alone, so computing them again must give what was sealed.

    Raises:
        StalePlan: naming everything that is not as it was sealed.
    """
    place = work.directory
    read_digests(work)
    folders = control_traces(work.manifest, place.stage(CONTROL))
    bands, noise, _ = resolve_bands(work.manifest, read_controls(folders))
    tolerances = bands_to_json(bands, noise)
    evidence = {name: {"trace": hash_folder(path)} for name, path in folders.items() if path.is_dir()}
    if record is not None:
        problems = check_seal(record.current, work.manifest, plan.to_json(), tolerances, evidence)
        if problems:
            raise StalePlan(problems)
        return bands_from_json(record.current.tolerances)
    earlier, now = place.read_seals(), datetime.now(UTC).isoformat(timespec="seconds")
    if earlier is None:
        made = SealRecord((seal(work.manifest, plan.to_json(), tolerances, evidence, sealed_at=now),))
    else:
        made = reseal(earlier, work.manifest, plan.to_json(), tolerances, evidence, reason=reason or "", sealed_at=now)
    place.write_json(place.sealed, made.to_json())
    work.progress.sealed(made.current.digest, made.current.tolerances)
    return bands


def _judge(work: Work) -> Verdict:
    work.progress.stage_begins(JUDGE, "weigh the evidence in the run directory", "no process is started")
    verdict = judge_run(work.directory)
    result = work.directory.read_result(JUDGE)
    if result is not None:
        work.progress.stage_ends(result)
    return verdict

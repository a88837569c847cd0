"""Judges a run directory from what lies in it: the seal, the results, and once more the traces themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samerun import __version__
from samerun.core.tolerance import bands_from_json
from samerun.errors import Problem, has_errors
from samerun.manifest.models import Manifest
from samerun.manifest.read import read_document, require_manifest
from samerun.manifest.seal import SealRecord, check_record, check_seal
from samerun.plan.migration import MigrationPlan
from samerun.runner.assess import destination_job
from samerun.runner.changes import EQUIVALENCE, list_changes, owed
from samerun.runner.evidence import control_traces, hash_folder, read_observed
from samerun.runner.progress import Silent
from samerun.runner.rundir import RunDirectory
from samerun.runner.stages import assess_candidate
from samerun.runner.work import RECORDER_STAGE, Clock, Work
from samerun.verify.evidence.job import check_job
from samerun.verify.evidence.observed import Observed
from samerun.verify.evidence.stage import CONTROL, CONVERT, EVAL, INSPECT, JUDGE, LOAD, UPDATE, WINDOW, StageResult
from samerun.verify.judge import Sealed, Verdict, judge

CANDIDATES = (LOAD, EVAL, UPDATE, WINDOW)


def judge_run(directory: RunDirectory) -> Verdict:
    """Judges, and writes `verdict.json` and the judge stage's result.

    The candidates' traces are assessed again under the sealed bands: what they show counts, whatever a result says.

    Raises:
        UsageError: if it is no run directory, or a file in it cannot be read.
    """
    directory.require()
    clock = Clock()
    record = directory.read_seals()
    manifest = _manifest(directory, record)
    results = directory.read_results()
    further = check_record(record) if record else []
    if record is not None and not further:
        work = Work(directory, manifest, _base(directory), Silent())
        further = _check_controls(work, record)
        results = {stage: _again(work, record, result) for stage, result in results.items()}
    verdict = judge(
        _sealed(manifest, record),
        results,
        converts=manifest.convert is not None,
        further=further,
        record=_record(directory, manifest, record, results),
    )
    directory.begin_stage(JUDGE)
    status = {"promote": "pass", "reject": "fail", "abstain": "fail"}[verdict.decision]
    own = clock.result(JUDGE, (), {"verdict": verdict.decision})
    directory.write_json(directory.verdict, verdict.to_json())
    directory.write_result(replace(own, status=status, problems=verdict.reasons))
    return verdict


def _manifest(directory: RunDirectory, record: SealRecord | None) -> Manifest:
    if record is not None:
        return Manifest.from_data(record.current.manifest)
    document = read_document(directory.manifest)
    return require_manifest(document)


def _base(directory: RunDirectory) -> Path:
    manifest = directory.read_state().get("manifest")
    return Path(manifest).parent if manifest else directory.root


def _check_controls(work: Work, record: SealRecord) -> list[Problem]:
    """Returns a finding for every control whose trace is not the one that was sealed."""
    folders = control_traces(work.manifest, work.directory.stage(CONTROL))
    evidence = {name: {"trace": hash_folder(path)} for name, path in folders.items() if path.is_dir()}
    return check_seal(record.current, work.manifest, controls=evidence)


def _again(work: Work, record: SealRecord, result: StageResult) -> StageResult:
    """Assesses a candidate's trace once more and adds whatever its result does not say."""
    if result.stage not in CANDIDATES or not result.passed:
        return result
    plan = MigrationPlan.from_json(record.current.plan)
    observed = read_observed(work.directory.stage(result.stage) / "trace")
    found = _assess(work, plan, record, result.stage, observed)
    known = {(problem.code, problem.where.get("update")) for problem in result.problems}
    new = [problem for problem in found if (problem.code, problem.where.get("update")) not in known]
    if not has_errors(new):
        return result
    return replace(result, status="fail", problems=(*result.problems, *new))


def _assess(
    work: Work, plan: MigrationPlan, record: SealRecord, stage: str, observed: Observed | None
) -> list[Problem]:
    if observed is None:
        return [
            Problem(
                "SR-JUDGE-EVIDENCE",
                "the trace that this stage's result speaks of is not there",
                where={"stage": stage, "file": str(work.directory.stage(stage) / "trace")},
                hint="`samerun run` makes it again once the stage's folder is removed",
            )
        ]
    planned = check_job(observed, destination_job(plan, RECORDER_STAGE[stage]))
    if has_errors(planned):
        return planned
    bands = bands_from_json(record.current.tolerances)
    found, _ = assess_candidate(work, plan, bands, stage, observed, check_values=False)
    return found


def _sealed(manifest: Manifest, record: SealRecord | None) -> Sealed:
    label = manifest.transition.label
    if record is None:
        return Sealed(digest=None, label=label, layout=None, batch=None)
    plan = MigrationPlan.from_json(record.current.plan)
    option = plan.batch
    return Sealed(
        digest=record.current.digest,
        label=label,
        layout=plan.destination.layout.to_dict(short=True),
        batch={
            "invariant": manifest.batch.invariant,
            "option": option.kind,
            "global_batch": option.global_batch,
            "replicas": option.replicas,
            "passes": option.passes,
            "microbatches": option.dealing.to_json(),
        },
        rehearsal=_rehearsal(manifest),
    )


def _rehearsal(manifest: Manifest) -> dict[str, Any] | None:
    """Returns what the run stands for, where it is not the real one."""
    return manifest.control.rehearsal.model_dump(mode="json") if manifest.control.rehearsal else None


def _record(
    directory: RunDirectory, manifest: Manifest, record: SealRecord | None, results: Mapping[str, StageResult]
) -> dict[str, Any]:
    """Returns what else a reader of the verdict wants to know. None of it decides anything."""
    state = directory.read_state()
    control, load, window = (results.get(stage) for stage in (CONTROL, LOAD, WINDOW))
    inspected = results.get(INSPECT)
    plan = MigrationPlan.from_json(record.current.plan) if record is not None else None
    return {
        "samerun": __version__,
        "equivalence": EQUIVALENCE[manifest.transition.label] if manifest.control.rehearsal is None else None,
        "owed": owed(manifest),
        "changes": list_changes(manifest, plan, results),
        "rehearsal": _rehearsal(manifest),
        "numbers_compared": window.measured.get("compared") if window else None,
        "manifest": state.get("manifest"),
        "checkpoint": {
            "fingerprint": inspected.measured.get("fingerprint") if inspected else None,
            "counts": inspected.measured.get("counts") if inspected else None,
        },
        "conversion": dict(results[CONVERT].measured) if CONVERT in results else None,
        "state": {
            "source": control.measured.get("state") if control else None,
            "destination": load.measured.get("state") if load else None,
        },
        "controls": list(control.measured.get("controls", ())) if control else [],
        "versions": _versions(directory),
        "seals": [
            {"number": item.number, "digest": item.digest, "reason": item.reason, "sealed_at": item.sealed_at}
            for item in (record.seals if record else ())
        ],
        "attempts": _attempts(state),
        "throughput": window.measured.get("throughput") if window else None,
        "seconds": {stage: result.seconds for stage, result in results.items()},
    }


def _attempts(state: Mapping[str, Any]) -> dict[str, int]:
    """Returns how often each stage was run to an end: a pass at the third attempt is not hidden."""
    counts: dict[str, int] = {}
    for attempt in state["attempts"]:
        if attempt["stage"] != JUDGE:
            counts[attempt["stage"]] = counts.get(attempt["stage"], 0) + 1
    return counts


def _versions(directory: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, stage in (("control", CONTROL), ("candidate", LOAD)):
        observed = read_observed(directory.stage(stage) / "trace")
        if observed is not None:
            header = next(iter(observed.headers.values()))
            found[name] = {**header.versions, **header.environment}
    return found

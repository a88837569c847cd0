"""What a migration changes on purpose, listed for the record: declared, and as the jobs showed it. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samerun.errors import Problem, Severity
from samerun.manifest.models import Bounded, Manifest
from samerun.plan.migration import MigrationPlan
from samerun.verify.evidence.stage import LOAD, UPDATE, WINDOW, StageResult

EQUIVALENCE: Mapping[str, str | None] = {
    "continuation": "the uninterrupted run",
    "approximate-continuation": "the uninterrupted run, up to the samples that are listed",
    "intentional-change": None,
    "warm-start": None,
}
"""What a promoted run may be called equivalent to, by label."""

OWED: Mapping[str, str] = {
    "intentional-change": "a run to the end of training, compared with one that was not changed: a window is too short",
    "warm-start": "a run to the end of training: a window shows that it starts as declared, not where it leads",
}
"""What a promotion under these labels does not show."""

OWED_BY_REHEARSAL = "the checks of the real move: what was run is a reduced copy of it, on CPU processes"

_PARTS: Mapping[str, str] = {
    "SR-LOAD-OPT": "optimizer",
    "SR-LOAD-GROUP": "optimizer",
    "SR-LOAD-CLASS": "optimizer",
    "SR-LOAD-STEP": "optimizer",
    "SR-LOAD-LR": "schedule",
    "SR-LOAD-SCHED": "schedule",
    "SR-LOAD-OBJECT": "objects",
    "SR-LOAD-DTYPE": "dtype",
    "SR-LOAD-PARAM": "parameters",
    "SR-LOAD-MISSING": "parameters",
    "SR-LOAD-UNEXPECTED": "parameters",
}
_SHOWN = 50


def owed(manifest: Manifest) -> str | None:
    """Returns what a promotion does not show and somebody still has to, or None for the real move of the same run."""
    parts = [OWED.get(manifest.transition.label), OWED_BY_REHEARSAL if manifest.control.rehearsal else None]
    return "; ".join(part for part in parts if part) or None


def list_changes(
    manifest: Manifest, plan: MigrationPlan | None, results: Mapping[str, StageResult]
) -> list[dict[str, Any]]:
    """Returns what differs from the run so far: one entry per declared change, and one per difference that was seen."""
    changes = [
        {"part": part, "declared": {"bounded": claim.bounded} if isinstance(claim, Bounded) else claim}
        for part in type(manifest.declare).model_fields
        if (claim := getattr(manifest.declare, part)) != "exact"
    ]
    if plan is not None and not plan.batch.exact:
        before, after = manifest.batch.global_batch, plan.batch.global_batch
        changes.append({"part": "batch", "before": before, "after": after})
        rate = plan.learning_rate
        if rate.policy is not None:
            changes.append({"part": "learning rate", "policy": rate.policy, "factor": rate.factor})
    loaded = results[LOAD].problems if LOAD in results else ()
    seen = [entry for problem in loaded if (entry := _seen(problem)) is not None]
    return [*changes, *seen[:_SHOWN], *_samples(manifest, results)]


def _seen(problem: Problem) -> dict[str, Any] | None:
    part = next((part for code, part in _PARTS.items() if problem.code.startswith(code)), None)
    if part is None or problem.severity is not Severity.NOTE or problem.expected is None:
        return None
    place = problem.where.get("tensor") or problem.where.get("key")
    return {"part": part, "where": place, "before": problem.expected, "after": problem.found, "code": problem.code}


def _samples(manifest: Manifest, results: Mapping[str, StageResult]) -> list[dict[str, Any]]:
    """Returns the samples that were seen again or passed over, within their declared bounds."""
    audits = (results[stage].measured.get("audit") for stage in (WINDOW, UPDATE) if stage in results)
    audit = next((item for item in audits if item), None)
    if audit is None or manifest.transition.label != "approximate-continuation":
        return []
    bounds = {"replayed": manifest.transition.replay_bound, "omitted": manifest.transition.omission_bound}
    return [
        {"part": "samples", "what": what, "bound": bound or 0, "ids": list(audit.get(what, ()))}
        for what, bound in bounds.items()
        if bound or audit.get(what)
    ]

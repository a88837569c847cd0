"""The verdict: promote, reject or abstain, from what was sealed and what the stages found. Pure.

* **reject**: some criterion failed. One is enough, whatever the others say.
* **abstain**: nothing failed, but something that had to be seen was not: a stage did not run, the control was too
  noisy, a number was not recorded. Never a pass.
* **promote**: every criterion was examined and holds. The record names the layout and batch for which it does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from samerun.errors import Problem, Severity
from samerun.verify.evidence.stage import (
    CONTROL,
    CONVERT,
    EVAL,
    INSPECT,
    LOAD,
    STAGES,
    UPDATE,
    WINDOW,
    StageResult,
    stages_of,
)
from samerun.verify.kinds import kind_of

SCHEMA = "samerun/judge/1"
Decision = Literal["promote", "reject", "abstain"]

EXIT_CODES: Mapping[Decision, int] = {"promote": 0, "reject": 1, "abstain": 4}

MISSING_EVIDENCE = (
    "SR-CONTROL-",
    "SR-JUDGE-",
    "SR-SEAL-",
    "SR-TRACE-LINE",
    "SR-TRACE-HEADER",
    "SR-JOB-SILENT",
    "SR-JOB-UNREPORTED",
    "SR-JOB-STAGE",
    "SR-JOB-RANKS",
    "SR-LOAD-UNSEEN",
    "SR-EVAL-MISSING",
    "SR-UPD-UNRECORDED",
    "SR-RUN-REHEARSAL",
)
"""Codes (or families) that say that something could not be seen, not that it is wrong."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One criterion: its name, the stages that examine it, the findings that fail it, and its question in words.

    Findings of the stages in `whole` all belong to it unless an earlier rule claims them.
    """

    name: str
    stages: tuple[str, ...]
    codes: tuple[str, ...]
    question: str
    whole: tuple[str, ...] = ()


_LOAD, _EVAL, _UPDATE, _WINDOW = LOAD, EVAL, UPDATE, WINDOW
_JOBS = (_LOAD, _EVAL, _UPDATE, _WINDOW)
_UPDATES = (_UPDATE, _WINDOW)

RULES: tuple[Rule, ...] = (
    Rule("control", (CONTROL,), ("SR-CONTROL-",), "can the controls judge anything?"),
    Rule("source-unchanged", _JOBS, ("SR-JOB-WROTE", "SR-FILE-CHANGED"), "is the checkpoint as it was?"),
    Rule("batch", _JOBS, ("SR-JOB-BATCH", "SR-UPD-SAMPLES", "SR-UPD-TOKENS"), "is the batch the planned one?"),
    Rule("finite", (_LOAD, _EVAL, *_UPDATES), ("SR-LOAD-NONFINITE", "SR-EVAL-NONFINITE", "SR-UPD-NONFINITE"),
         "is every value finite?"),
    Rule("replicas", (_LOAD, _WINDOW), ("SR-LOAD-REPLICA", "SR-UPD-REPLICA", "SR-TRACE-DISAGREE"),
         "do all replicas hold the same model?"),
    Rule("schedule", (_LOAD, *_UPDATES), ("SR-LOAD-SCHED", "SR-LOAD-LR", "SR-UPD-LR", "SR-SCHEDULE-"),
         "is the learning rate where it was, and goes where it would?"),
    Rule("progress", (_LOAD, *_UPDATES),
         ("SR-LOAD-STEP", "SR-UPD-INDEX", "SR-UPD-MISSING", "SR-TRACE-INDEX"),
         "do the counters go on where they stood?"),
    Rule("optimizer", (_LOAD, *_UPDATES),
         ("SR-LOAD-OPT", "SR-LOAD-GROUP", "SR-LOAD-CLASS", "SR-UPD-SCALE", "SR-UPD-SKIPPED",
          "SR-UPD-SETTING", "SR-UPD-COUNTER"),
         "is the optimizer the one that was saved?"),
    Rule("randomness", (_LOAD,), ("SR-RNG-",), "do ranks draw alike, and apart, as they did?"),
    Rule("state-coverage", (_LOAD,), ("SR-LOAD-MISSING", "SR-LOAD-UNEXPECTED", "SR-LOAD-SHAPE"),
         "is every tensor there, and none too many?"),
    Rule("state-values", (_LOAD,), (), "does every loaded value equal the checkpoint's?", whole=(_LOAD,)),
    Rule("forward", (_EVAL,), (), "do fixed examples give the same losses and logits?", whole=(_EVAL,)),
    Rule("samples", _UPDATES, ("SR-SAMPLE-", "SR-TRACE-SAMPLES"), "is every sample consumed once, in its own update?"),
    Rule("job", _JOBS, ("SR-JOB-", "SR-TRACE-"), "did the planned job run, on the planned layout?"),
    Rule("movement", (_UPDATE,), ("SR-UPD-STILL", "SR-UPD-FROZEN-MOVED"),
         "did every trainable tensor move, and no frozen one?"),
    Rule("averages", (_WINDOW,), ("SR-UPD-AVERAGE",), "do averages of the model still follow it?"),
    Rule("boundaries", (_WINDOW,), ("SR-UPD-BOUNDARY",), "were logging and evaluation crossed?"),
    Rule("numerics", _UPDATES, (), "do loss, gradient norm and updates stay in their bands?", whole=_UPDATES),
    Rule("conversion", (CONVERT,), (), "does the converted checkpoint hold what the source holds?", whole=(CONVERT,)),
    Rule("checkpoint", (INSPECT,), ("SR-FILE-", "SR-COV-", "SR-RES-"), "is the checkpoint whole and resumable?",
         whole=(INSPECT,)),
)  # fmt: skip

_CAUSAL = (
    "checkpoint", "source-unchanged", "conversion", "job", "batch", "state-coverage", "state-values", "replicas",
    "optimizer", "progress", "schedule", "randomness", "forward", "samples", "finite", "movement", "averages",
    "numerics", "boundaries", "control",
)  # fmt: skip
"""Criteria in causal order: what comes first can cause what comes later."""

_CAUSAL_CODES = ("SR-UPD-INDEX", "SR-SAMPLE-", "SR-UPD-SAMPLES", "SR-UPD-TOKENS", "SR-UPD-LR", "SR-UPD-SCALE",
                 "SR-UPD-LOSS", "SR-UPD-GRADNORM", "SR-UPD-GRADIENT", "SR-UPD-CLIP", "SR-UPD-UPDATENORM",
                 "SR-UPD-DELTA", "SR-UPD-DIRECTION")  # fmt: skip


_LEFT_BEHIND = frozenset({"SR-UPD-COUNTER", "SR-UPD-REPLICA", "SR-UPD-NONFINITE", "SR-UPD-AVERAGE", "SR-UPD-BUFFER"})
"""What a window leaves behind, without the update in which it came about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One criterion of a verdict. `passed` is None when it was never examined."""

    name: str
    passed: bool | None
    value: Any
    limit: Any
    evidence: str
    question: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the form that `verdict.json` lists."""
        return {
            "name": self.name,
            "pass": self.passed,
            "value": self.value,
            "limit": self.limit,
            "evidence": self.evidence,
            "question": self.question,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What the judge needs of the seal: its digest, the label, and what a promotion would validate.

    `rehearsal` says what the jobs stood for, where they were not the real ones.
    """

    digest: str | None
    label: str
    layout: Mapping[str, Any] | None
    batch: Mapping[str, Any] | None
    rehearsal: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision with everything that it rests on. `reasons` are the findings that led to it, causes first."""

    decision: Decision
    label: str
    criteria: tuple[Criterion, ...]
    reasons: tuple[Problem, ...]
    remarks: tuple[Problem, ...]
    first_divergence: Mapping[str, Any] | None
    validated: Mapping[str, Any]
    sealed: str | None
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def exit_code(self) -> int:
        """0 promote, 1 reject, 4 abstain."""
        return EXIT_CODES[self.decision]

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `verdict.json`."""
        return {
            "schema": SCHEMA,
            "verdict": self.decision,
            "label": self.label,
            "criteria": [item.to_json() for item in self.criteria],
            "first_divergence": dict(self.first_divergence) if self.first_divergence else None,
            "validated": dict(self.validated),
            "sealed": self.sealed,
            "reasons": [problem.to_json() for problem in self.reasons],
            "remarks": [problem.to_json() for problem in self.remarks],
            **self.record,
        }


def judge(
    sealed: Sealed,
    results: Mapping[str, StageResult],
    *,
    converts: bool = False,
    further: Sequence[Problem] = (),
    record: Mapping[str, Any] | None = None,
) -> Verdict:
    """Returns the verdict.

    Args:
        sealed: what was declared before any candidate ran.
        results: every stage that was run, by name; `07-judge` is not needed.
        converts: whether the migration has a conversion, which then must have passed.
        further: findings about the evidence itself, such as a broken seal.
        record: further fields for `verdict.json` (versions, digests, throughput), which decide nothing.
    """
    found = [(stage, problem) for stage in STAGES if stage in results for problem in results[stage].problems]
    found += [("", problem) for problem in further]
    failed = any(result.status == "fail" for result in results.values())
    missing = [] if failed else _unexamined(results, stages_of(converts=converts))
    found += [("", problem) for problem in missing]
    blocking = [(stage, problem) for stage, problem in found if problem.severity is Severity.ERROR]
    failing = [(stage, problem) for stage, problem in blocking if not is_missing_evidence(problem.code)]
    decision: Decision = "reject" if failing else "abstain" if blocking else "promote"
    dealt = {(stage, item.where.get("update")) for stage, item in failing if item.code == "SR-SAMPLE-OVERLAP"}
    ordered = sorted(failing or blocking, key=lambda item: _causal_rank(*item, dealt=dealt))
    rest = [problem for _, problem in found if problem not in [item for _, item in ordered]]
    promoted = decision == "promote"
    return Verdict(
        decision=decision,
        label=sealed.label,
        criteria=tuple(_criteria(results, blocking, converts=converts)),
        reasons=tuple(problem for _, problem in ordered),
        remarks=tuple(rest),
        first_divergence=_divergence(*ordered[0]) if failing else None,
        validated={
            "layout": sealed.layout if promoted else None,
            "batch": sealed.batch if promoted else None,
            **({"rehearsal": sealed.rehearsal} if promoted and sealed.rehearsal else {}),
        },
        sealed=sealed.digest,
        record=record or {},
    )


def is_missing_evidence(code: str) -> bool:
    """Returns whether a finding says that something could not be seen, so that it abstains instead of rejecting."""
    return code.startswith(MISSING_EVIDENCE)


def _unexamined(results: Mapping[str, StageResult], stages: Sequence[str]) -> list[Problem]:
    open_stages = [stage for stage in stages[:-1] if stage not in results or not results[stage].passed]
    if not open_stages:
        return []
    return [
        Problem(
            "SR-JUDGE-INCOMPLETE",
            f"{len(open_stages)} stages have not been run: {', '.join(open_stages)}",
            where={"stage": open_stages[0]},
            expected="every stage",
            found=f"{len(stages) - 1 - len(open_stages)} of {len(stages) - 1}",
            hint="`samerun run` goes on where it stopped",
        )
    ]


def rule_of(stage: str, code: str) -> str:
    """Returns the name of the criterion that a finding of a stage belongs to."""
    for rule in RULES:
        if rule.codes and code.startswith(rule.codes):
            return rule.name
    return next((rule.name for rule in RULES if stage in rule.whole), "job")


def _criteria(
    results: Mapping[str, StageResult], blocking: Sequence[tuple[str, Problem]], *, converts: bool
) -> list[Criterion]:
    by_rule: dict[str, list[tuple[str, Problem]]] = {}
    for stage, problem in blocking:
        by_rule.setdefault(rule_of(stage, problem.code), []).append((stage, problem))
    order = {name: place for place, name in enumerate(_CAUSAL)}
    criteria: list[Criterion] = []
    for rule in sorted(RULES, key=lambda rule: order[rule.name]):
        if rule.stages == (CONVERT,) and not converts:
            continue
        failures = by_rule.get(rule.name, [])
        examined = all(stage in results and results[stage].status != "skipped" for stage in rule.stages)
        stage = failures[0][0] if failures else _last_of(rule.stages, results)
        value, limit = _measure(rule.name, results, len(failures))
        criteria.append(
            Criterion(
                name=rule.name,
                passed=False if failures else True if examined else None,
                value=value,
                limit=limit,
                evidence=f"stages/{stage or rule.stages[0]}/result.json",
                question=rule.question,
            )
        )
    return criteria + _metric_criteria(results)


def _last_of(stages: Sequence[str], results: Mapping[str, StageResult]) -> str:
    return next((stage for stage in reversed(stages) if stage in results), stages[0])


def _measure(name: str, results: Mapping[str, StageResult], num_failures: int) -> tuple[Any, Any]:
    if name == "samples":
        audits = [audit for stage in _UPDATES if (audit := _measured(results, stage).get("audit"))]
        if audits:
            return max(audit["bound"] for audit in audits), _measured(results, _WINDOW).get("bound", 0)
    if name == "numerics":
        used = [row["used"] for stage in _UPDATES for row in (_measured(results, stage).get("worst") or {}).values()]
        if used:
            return max(float(item) for item in used), 1.0
    return num_failures, 0


def _measured(results: Mapping[str, StageResult], stage: str) -> Mapping[str, Any]:
    return results[stage].measured if stage in results else {}


def _metric_criteria(results: Mapping[str, StageResult]) -> list[Criterion]:
    """One further criterion per metric: the deviation that used most of its band, and the limit there."""
    worst: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for stage in (_EVAL, *_UPDATES):
        for metric, row in (_measured(results, stage).get("worst") or {}).items():
            if metric not in worst or float(row["used"]) > float(worst[metric][1]["used"]):
                worst[metric] = (stage, row)
    return [
        Criterion(
            name=f"numerics.{metric}",
            passed=float(row["used"]) <= 1.0,
            value=row["deviation"],
            limit=row["limit"],
            evidence=f"stages/{stage}/result.json",
            question=f"at update {row['update']}" + (f", {row['tensor']}" if row.get("tensor") else ""),
        )
        for metric, (stage, row) in worst.items()
    ]


def _causal_rank(
    stage: str, problem: Problem, *, dealt: Set[tuple[str, Any]] = frozenset()
) -> tuple[int, int, int, int]:
    """Returns what findings are ordered by. `dealt` are the (stage, update) that gave samples to two replicas at once.

    An update with another number of samples is the cause of other samples, unless it is because replicas share them.
    What the last state shows and no update does comes after the updates, unless it is a setting that somebody changed.
    """
    place = STAGES.index(stage) if stage in STAGES else len(STAGES)
    update = problem.where.get("update")
    rule = "samples" if problem.code == "SR-UPD-SAMPLES" and (stage, update) in dealt else rule_of(stage, problem.code)
    code = next((i for i, prefix in enumerate(_CAUSAL_CODES) if problem.code.startswith(prefix)), len(_CAUSAL_CODES))
    when = update if isinstance(update, int) else sys.maxsize if problem.code in _LEFT_BEHIND else 0
    return place, when, _CAUSAL.index(rule), code


def _divergence(stage: str, problem: Problem) -> dict[str, Any]:
    return {
        "stage": stage,
        "criterion": rule_of(stage, problem.code),
        "code": problem.code,
        "where": dict(problem.where),
        "message": problem.message,
        "expected": problem.expected,
        "found": problem.found,
        "kind": problem.kind or kind_of(problem.code),
        "likely": problem.hint,
    }

"""Findings as a reader meets them: those of one code together, with what the catalogue says of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.catalog import Entry, load_catalog
from samerun.errors import Problem, Severity
from samerun.report.model import ReportModel, Stage

MAX_SAME_FINDINGS = 10
"""Findings of one code that a stage's list spells out; the rest are counted and stay in the stage's result."""


Staged = tuple[Stage | None, Problem]
"""A finding with the stage that made it."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One finding of a group: the finding, and its place in words."""

    problem: Problem
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Findings of one code, severity and stage, with their explanation. `more` counts those not spelled out.

    `hint` is set where it is the same for all.
    """

    code: str
    severity: str
    stage: Stage | None
    entry: Entry | None
    instances: tuple[Instance, ...]
    more: int
    hint: str


def find_reasons(model: ReportModel) -> list[Staged]:
    """Returns what led to the verdict, in its order; without a verdict, what blocks."""
    if model.verdict is None:
        return [(stage, problem) for stage, problem in model.findings if problem.severity is Severity.ERROR]
    return [(_stage_of(model, problem), problem) for problem in model.verdict.reasons]


def _stage_of(model: ReportModel, problem: Problem) -> Stage | None:
    return next((stage for stage, other in model.findings if other == problem), None)


def further_findings(model: ReportModel, reasons: Sequence[Staged]) -> list[Staged]:
    """Returns everything that is not among the reasons, worst first."""
    told = [problem for _, problem in reasons]
    found: list[Staged] = [(stage, problem) for stage, problem in model.findings if problem not in told]
    known = [problem for _, problem in found]
    remarks = model.verdict.remarks if model.verdict else ()
    found += [(None, problem) for problem in remarks if problem not in known and problem not in told]
    return sorted(found, key=lambda item: list(Severity).index(item[1].severity))


def group_findings(items: Iterable[Staged]) -> Iterator[Finding]:
    """Yields findings of one code, severity and stage together, in the order of their first."""
    groups: dict[tuple[str, str, str], list[Staged]] = {}
    for stage, problem in items:
        groups.setdefault((problem.code, problem.severity.value, stage.name if stage else ""), []).append(
            (stage, problem)
        )
    catalog = load_catalog()
    for (code, severity, _), group in groups.items():
        hints = {problem.hint for _, problem in group}
        yield Finding(
            code=code,
            severity=severity,
            stage=group[0][0],
            entry=catalog.get(code),
            instances=tuple(
                Instance(problem, place_in_words(problem.where)) for _, problem in group[:MAX_SAME_FINDINGS]
            ),
            more=max(0, len(group) - MAX_SAME_FINDINGS),
            hint=hints.pop() if len(hints) == 1 else "",
        )


def place_in_words(where: Mapping[str, Any]) -> str:
    """Returns where a finding is in words, without the stage, which its group names."""
    return ", ".join(f"{name} {value}" for name, value in where.items() if name != "stage")

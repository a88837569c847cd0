"""Findings as the page shows them: grouped, explained by the catalogue, with what follows from each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from samerun.errors import Problem, Severity
from samerun.report.findings import Finding, group_findings
from samerun.report.provenance import plain_text


def explain(problems: Iterable[Problem], keys: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Returns findings of one code together, worst first. Those that follow from another one are counted under it.

    `keys` has the key of every tensor that can be shown, by key and by the name that the files have for it.
    """
    listed = list(problems)
    roots = [problem for problem in listed if not problem.follows_from]
    follow: dict[str, Counter[str]] = {}
    for problem in listed:
        if problem.follows_from:
            follow.setdefault(problem.follows_from, Counter())[problem.code] += 1
    roots.sort(key=lambda problem: list(Severity).index(problem.severity))
    groups = group_findings((None, problem) for problem in roots)
    return [_group_json(group, follow.pop(group.code, Counter()), keys or {}) for group in groups]


def _group_json(group: Finding, consequences: Counter[str], keys: Mapping[str, str]) -> dict[str, Any]:
    entry = group.entry
    return {
        "code": group.code,
        "severity": group.severity,
        "title": entry.title if entry else group.code,
        "meaning": entry.meaning if entry else "",
        "see": entry.see if entry else "",
        "do": entry.do if entry else "",
        "hint": group.hint,
        "more": group.more,
        "consequences": dict(consequences),
        "instances": [
            {
                "message": item.problem.message,
                "place": item.place,
                "tensor": keys.get(str(item.problem.where.get("tensor"))),
                "hint": "" if group.hint else item.problem.hint,
                "expected": _told(item.problem.expected, item.problem),
                "found": _told(item.problem.found, item.problem),
            }
            for item in group.instances
        ],
    }


def _told(value: Any, problem: Problem) -> str | None:
    return None if problem.expected is None and problem.found is None else plain_text(value)

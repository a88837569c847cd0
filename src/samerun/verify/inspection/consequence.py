"""Findings that another finding explains: what a missing or damaged file takes with it follows from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from samerun.errors import Problem, Severity

# Findings that say that a file, or what it holds, cannot be read.
_CAUSES = frozenset(
    f"SR-FILE-{name}"
    for name in ("MISSING", "TRUNCATED", "SPECIAL", "ESCAPE", "ITEM", "EMPTY", "TRANSFORM", "PACKED", "HEADER")
)
_CAUSE_FAMILIES = ("SR-PKL-", "SR-ZIP-")

# What such a file can have held, by the kind of file.
_TENSORS = frozenset({"SR-COV-GAP", "SR-RES-PARAMS", "SR-OPT-UNMATCHED", "SR-META-SHAPES", "SR-UNI-LOST"})
_OPTIMIZER = frozenset({"SR-OPT-MISSING", "SR-OPT-NOSTATE", "SR-OPT-SLOT", "SR-GROUP-NONE", "SR-GROUP-LOST"}) | {
    "SR-GROUP-EMPTY",
    "SR-OPT-ORPHAN",
}
_STREAMS = frozenset({"SR-RNG-MISSING", "SR-RNG-RANKS", "SR-RNG-SHARED", "SR-RNG-LOST", "SR-DATA-MISSING"})
_RUN = frozenset({"SR-SCHED-MISSING", "SR-CNT-MISSING", "SR-CNT-OPTIMIZER"})
_ANYTHING = _TENSORS | _OPTIMIZER | _STREAMS | _RUN

_KINDS: tuple[tuple[re.Pattern[str], frozenset[str]], ...] = (
    # what tensors there are stands in the metadata beside; objects are known by their values only
    (re.compile(r".*\.distcp"), _ANYTHING - {"SR-OPT-NOSTATE", "SR-OPT-SLOT", "SR-OPT-ORPHAN", "SR-RES-PARAMS"}),
    (re.compile(r"(?:random_states|rng_state).*"), _STREAMS),
    (re.compile(r"scheduler.*"), frozenset({"SR-SCHED-MISSING"})),
    (re.compile(r"(?:bf16_)?zero_pp_rank_.*optim_states\.pt|optimizer(?:_\d+)?\.(?:bin|pt)"), _TENSORS | _OPTIMIZER),
    (re.compile(r".*\.safetensors|pytorch_model.*\.bin|layer_.*\.pt|model(?:_\d+)?\.bin"), _TENSORS),
    (re.compile(r"(?:fp32|exp_avg|exp_avg_sq|step|momentum_buffer)\.pt"), _TENSORS | {"SR-OPT-SLOT", "SR-OPT-NOSTATE"}),
)


def explain_consequences(problems: Sequence[Problem]) -> list[Problem]:
    """Returns the findings, those that a missing or unreadable file explains marked as following from it.

    They become notes: the cause blocks already, and whether they would remain is known only once it is gone. Gaps keep
    their severity, since they count lost values.
    """
    causes = [problem for problem in problems if _is_cause(problem)]
    if not causes:
        return list(problems)
    return [problem if _is_cause(problem) else _explained(problem, causes) for problem in problems]


def _is_cause(problem: Problem) -> bool:
    if problem.severity is not Severity.ERROR:
        return False
    return problem.code in _CAUSES or problem.code.startswith(_CAUSE_FAMILIES)


def _explained(problem: Problem, causes: Sequence[Problem]) -> Problem:
    cause = next((cause for cause in causes if problem.code in _held_by(cause)), None)
    if cause is None:
        return problem
    severity = problem.severity if problem.code.startswith("SR-COV-") else Severity.NOTE
    return replace(problem, severity=severity, follows_from=cause.code)


def _held_by(cause: Problem) -> frozenset[str]:
    """Returns the codes of what may be missing because this file is."""
    name = str(cause.where.get("file", "")).rstrip("/").rpartition("/")[2]
    return next((codes for pattern, codes in _KINDS if pattern.fullmatch(name)), _ANYTHING)

"""Findings and exceptions: the one vocabulary in which samerun says that something is wrong.

Everything noticed is a `Problem`; every refusal is a `SamerunError` that carries problems.

    SamerunError
    ├── UsageError                 the caller asked for something that makes no sense          exit 2
    ├── FormatError                a checkpoint cannot be understood                           exit 2
    │   ├── CorruptCheckpoint      it is damaged or hostile
    │   └── UnsupportedVersion     it was written by something newer, older or unknown
    ├── PlanError                  a plan cannot be made                                       exit 1
    │   ├── UndecidedError         a decision is the user's and has not been made
    │   └── StalePlan              what was planned or sealed no longer matches what is there
    ├── ExecutionError             a step of work failed and can be resumed                    exit 3
    └── VerificationError          a check found a difference                                  exit 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How much a finding matters: an error blocks, a warning needs a look, a note informs."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: a stable code, where it is, the two values that disagree, and what to do.

    `where` names the place with the keys `tensor`, `file`, `rank`, `key`, `line`, `stage`, `update` as they apply.
    `expected` and `found` are the two values that disagree, when there are two. `follows_from` is the code of another
    finding that explains this one: what is lost with a missing file, for instance. `kind` is the kind of failure that
    the evidence points to, where it tells more than the code does (`samerun.verify.kinds`).
    """

    code: str
    message: str
    severity: Severity = Severity.ERROR
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hint: str = ""
    expected: Any = None
    found: Any = None
    follows_from: str | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if not self.code.startswith("SR-") or self.code != self.code.upper():
            raise ValueError(f"a finding's code looks like SR-FAMILY-NAME, not {self.code!r}")

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form that every `--json` document uses."""
        body: dict[str, Any] = {
            "code": self.code,
            "severity": self.severity.value,
            "where": dict(self.where),
            "message": self.message,
            "hint": self.hint,
        }
        if self.expected is not None or self.found is not None:
            body["expected"] = self.expected
            body["found"] = self.found
        if self.follows_from is not None:
            body["follows_from"] = self.follows_from
        if self.kind is not None:
            body["kind"] = self.kind
        return body

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value}" for name, value in self.where.items())
        text = f"{self.severity.value} {self.code}: {self.message}"
        if place:
            text += f" [{place}]"
        return f"{text}\n    {self.hint}" if self.hint else text


class SamerunError(Exception):
    """Base of everything samerun raises on purpose. `problems` holds every reason, not only the first."""

    exit_code = 1

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UsageError(SamerunError):
    """The request itself is wrong: a missing path, a misspelt layout, an impossible combination."""

    exit_code = 2


class FormatError(SamerunError):
    """A checkpoint cannot be understood."""

    exit_code = 2


class CorruptCheckpoint(FormatError):
    """A checkpoint is damaged, incomplete in a way that stops reading, or hostile."""


class UnsupportedVersion(FormatError):
    """A checkpoint uses an encoding that this version of samerun does not know."""


class PlanError(SamerunError):
    """A plan cannot be made from what was asked."""


class UndecidedError(PlanError):
    """A decision belongs to the user and has not been made; every open one is listed."""


class StalePlan(PlanError):
    """Something sealed or planned no longer matches what is there now."""


class ExecutionError(SamerunError):
    """A step of work failed or was interrupted; running it again resumes."""

    exit_code = 3


class VerificationError(SamerunError):
    """A check compared two things that had to be equal and they were not."""


def has_errors(problems: Iterable[Problem]) -> bool:
    """Returns whether any finding blocks."""
    return any(problem.severity is Severity.ERROR for problem in problems)

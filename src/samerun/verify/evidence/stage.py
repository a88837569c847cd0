"""The result of one stage, as it is kept in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from samerun.errors import Problem, Severity, has_errors

SCHEMA = "samerun/stage/1"

STAGES = ("01-inspect", "02-control", "02-convert", "03-load", "04-eval", "05-update", "06-window", "07-judge")
"""Every stage in order, cheapest first. The name is also the stage's folder. Few migrations have a `02-convert`."""

INSPECT, CONTROL, CONVERT, LOAD, EVAL, UPDATE, WINDOW, JUDGE = STAGES


def stages_of(*, converts: bool) -> tuple[str, ...]:
    """Returns the stages of a migration that converts its checkpoint, or does not."""
    return tuple(stage for stage in STAGES if converts or stage != CONVERT)


Status = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage found. `measured` is plain data; `jobs` has one entry per launched job: command, time, exit.

    A stage that was not reached because an earlier one failed is `skipped`.
    """

    stage: str
    status: Status
    problems: tuple[Problem, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])
    jobs: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0
    started: str = ""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"there is no stage {self.stage!r}; stages are {', '.join(STAGES)}")
        if self.status == "pass" and has_errors(self.problems):
            raise ValueError(f"stage {self.stage} cannot pass with errors among its findings")

    @property
    def passed(self) -> bool:
        """Whether the stage was run and found nothing that blocks."""
        return self.status == "pass"

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `result.json`."""
        return {
            "schema": SCHEMA,
            "stage": self.stage,
            "status": self.status,
            "problems": [problem.to_json() for problem in self.problems],
            "measured": dict(self.measured),
            "jobs": [dict(job) for job in self.jobs],
            "seconds": self.seconds,
            "started": self.started,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `result.json` back. Raises KeyError or ValueError if it is none."""
        return cls(
            stage=body["stage"],
            status=body["status"],
            problems=tuple(problem_from_json(item) for item in body["problems"]),
            measured=body["measured"],
            jobs=tuple(body.get("jobs", ())),
            seconds=float(body["seconds"]),
            started=str(body["started"]),
        )


def problem_from_json(body: Mapping[str, Any]) -> Problem:
    """Reads `Problem.to_json` back."""
    return Problem(
        body["code"],
        body["message"],
        Severity(body["severity"]),
        where=body["where"],
        hint=body["hint"],
        expected=body.get("expected"),
        found=body.get("found"),
        follows_from=body.get("follows_from"),
        kind=body.get("kind"),
    )

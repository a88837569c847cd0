"""What a person sees while a run goes on. The command line implements it; tests and programs may stay silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from samerun.errors import Problem
from samerun.verify.evidence.stage import StageResult


class Progress(Protocol):
    """Told about everything as it happens, always from the runner's own thread."""

    def stage_begins(self, stage: str, what: str, cost: str) -> None:
        """A stage is about to start: what it will do and what that costs, before it does it."""

    def stage_kept(self, result: StageResult) -> None:
        """A stage was finished earlier and is not run again."""

    def stage_ends(self, result: StageResult) -> None:
        """A stage has ended."""

    def job_begins(self, title: str, command: str, limit_seconds: float) -> None:
        """A job is started with this command line."""

    def job_line(self, line: str) -> None:
        """The running job printed a line."""

    def job_tick(self, elapsed_seconds: float) -> None:
        """The job still runs; called a few times a second."""

    def job_ends(self, seconds: float, status: str) -> None:
        """The job has ended."""

    def sealed(self, digest: str, tolerances: Mapping[str, Any]) -> None:
        """The tolerances are sealed; from here on nothing that was declared may change."""

    def note(self, problems: Sequence[Problem]) -> None:
        """Something to know that is no result of a stage."""


class Silent:
    """Shows nothing."""

    def stage_begins(self, stage: str, what: str, cost: str) -> None:
        """Nothing."""

    def stage_kept(self, result: StageResult) -> None:
        """Nothing."""

    def stage_ends(self, result: StageResult) -> None:
        """Nothing."""

    def job_begins(self, title: str, command: str, limit_seconds: float) -> None:
        """Nothing."""

    def job_line(self, line: str) -> None:
        """Nothing."""

    def job_tick(self, elapsed_seconds: float) -> None:
        """Nothing."""

    def job_ends(self, seconds: float, status: str) -> None:
        """Nothing."""

    def sealed(self, digest: str, tolerances: Mapping[str, Any]) -> None:
        """Nothing."""

    def note(self, problems: Sequence[Problem]) -> None:
        """Nothing."""

"""How samerun tells a job what it was started for: four environment variables, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samerun.errors import Problem, UsageError

STAGE, TRACE_DIR, MAX_UPDATES = "SAMERUN_STAGE", "SAMERUN_TRACE_DIR", "SAMERUN_MAX_UPDATES"
DEFAULT_UPDATES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a job was started for. `max_updates` is 0 where the job ends after loading (and evaluating)."""

    stage: str
    trace_dir: Path
    max_updates: int

    @property
    def evaluates(self) -> bool:
        """Whether this stage evaluates the fixed examples."""
        return self.stage in ("eval", "control")


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Returns what samerun started this job for, or None when it did not.

    Raises:
        UsageError: SR-REC-LAUNCH if the variables are incomplete or make no sense. A job that samerun started must not
            take itself for an ordinary one and save.
    """
    stage, directory = environment.get(STAGE), environment.get(TRACE_DIR)
    if not stage and not directory:
        return None
    counts = {"load": 0, "eval": 0, "update": 1, "window": DEFAULT_UPDATES, "control": DEFAULT_UPDATES}
    limit = environment.get(MAX_UPDATES) or str(counts.get(stage or "", 0))
    problems: list[Problem] = []
    if stage not in counts:
        problems.append(_bad(STAGE, f"one of {', '.join(counts)}", stage))
    if not directory:
        problems.append(_bad(TRACE_DIR, "the directory for the trace", directory))
    if not (limit.isascii() and limit.isdigit()):
        problems.append(_bad(MAX_UPDATES, "a whole number", limit))
    if problems or not stage or not directory:
        raise UsageError(problems)
    windowed = stage in ("window", "control")
    return Launch(stage=stage, trace_dir=Path(directory), max_updates=int(limit) if windowed else counts[stage])


def _bad(name: str, expected: str, found: str | None) -> Problem:
    return Problem(
        "SR-REC-LAUNCH",
        f"the environment variable {name} is not usable",
        where={"key": name},
        expected=expected,
        found=found,
        hint="samerun sets all of them; the launch command must hand them on to every rank, or set none",
    )

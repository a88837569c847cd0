"""The run directory: one folder that holds everything a run found, and from which it goes on after a crash.

    manifest.yaml   the manifest as it was read
    plan.json       the plan made from it
    sealed.json     what was declared before any candidate ran, with its hash
    state.json      which stage is done, every attempt, and the job that runs now
    stages/NN-name/ result.json, log.txt, trace/
    verdict.json    the verdict

Every file that says that something is done is written whole or not at all, and after everything that it speaks of. A
stage without `result.json` was not finished and is redone from an empty folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samerun.errors import Problem, UsageError
from samerun.manifest.seal import SealRecord
from samerun.stores.local import write_atomic
from samerun.trace import encode
from samerun.verify.evidence.stage import STAGES, StageResult

STATE_SCHEMA = "samerun/state/1"
_OURS = {"manifest.yaml", "plan.json", "sealed.json", "state.json", "stages", "verdict.json", "report.html", "lock"}


class RunDirectory:
    """One run's folder. Reading and writing only; it decides nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def manifest(self) -> Path:
        """The copy of the manifest."""
        return self.root / "manifest.yaml"

    @property
    def plan(self) -> Path:
        """The plan, as it was last made."""
        return self.root / "plan.json"

    @property
    def sealed(self) -> Path:
        """What was declared before any candidate ran."""
        return self.root / "sealed.json"

    @property
    def verdict(self) -> Path:
        """The verdict."""
        return self.root / "verdict.json"

    def stage(self, name: str) -> Path:
        """Returns a stage's folder."""
        return self.root / "stages" / name

    def create(self, *, checkpoint: Path) -> None:
        """Makes the directory.

        Raises:
            UsageError: if it is something else already, or lies inside the checkpoint, or around it.
        """
        problems = check_place(self.root, checkpoint)
        if problems:
            raise UsageError(problems)
        (self.root / "stages").mkdir(parents=True, exist_ok=True)

    def require(self) -> None:
        """Raises UsageError if this is no run directory."""
        if not self.manifest.is_file() or not (self.root / "stages").is_dir():
            raise UsageError(
                Problem(
                    "SR-RUN-DIRECTORY",
                    "this is not a run directory",
                    where={"file": str(self.root)},
                    expected="manifest.yaml and stages/",
                    found=", ".join(sorted(item.name for item in self.root.iterdir())[:8])
                    if self.root.is_dir()
                    else "nothing there",
                    hint="`samerun run m.yaml --dir RUNDIR` makes one",
                )
            )

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Holds the directory for one process at a time. Raises UsageError if another has it."""
        with (self.root / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    Problem(
                        "SR-RUN-BUSY",
                        "another samerun works in this run directory",
                        where={"file": str(self.root)},
                        hint="wait for it, or give this run another --dir",
                    )
                ) from error
            yield

    def read_state(self) -> dict[str, Any]:
        """Returns `state.json`, or an empty state."""
        path = self.root / "state.json"
        if not path.exists():
            return {"schema": STATE_SCHEMA, "manifest": None, "stages": {}, "attempts": [], "job": None}
        return _read(path)

    def write_state(self, **changes: Any) -> dict[str, Any]:
        """Updates fields of `state.json` and returns the whole."""
        state = {**self.read_state(), **changes}
        self.write_json(self.root / "state.json", state)
        return state

    def begin_stage(self, name: str) -> Path:
        """Returns the stage's folder, empty: whatever an unfinished or failed attempt left there is removed."""
        folder = self.stage(name)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def drop_stages(self, names: Sequence[str]) -> None:
        """Removes stages, the last one first so that a crash in between leaves an earlier state, and the verdict."""
        with contextlib.suppress(FileNotFoundError):
            self.verdict.unlink()
        for name in sorted(names, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                (self.stage(name) / "result.json").unlink()
            shutil.rmtree(self.stage(name), ignore_errors=True)

    def write_result(self, result: StageResult) -> None:
        """Finishes a stage: its result first, then the list of what is done."""
        self.write_json(self.stage(result.stage) / "result.json", result.to_json())
        state = self.read_state()
        attempt = {
            "stage": result.stage,
            "status": result.status,
            "started": result.started,
            "seconds": result.seconds,
            "codes": sorted({problem.code for problem in result.problems}),
        }
        stages = {**state["stages"], result.stage: result.status}
        self.write_state(stages=stages, attempts=[*state["attempts"], attempt], job=None)

    def read_result(self, name: str) -> StageResult | None:
        """Returns the stage's result, or None if it was never finished.

        Raises:
            UsageError: if the file is there and is no result.
        """
        path = self.stage(name) / "result.json"
        if not path.exists():
            return None
        body = _read(path)
        try:
            return StageResult.from_json(body)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(_garbled(path, f"{type(error).__name__}: {error}")) from error

    def read_results(self) -> dict[str, StageResult]:
        """Returns every finished stage but the last (judging), in order."""
        results = {name: self.read_result(name) for name in STAGES[:-1]}
        return {name: result for name, result in results.items() if result is not None}

    def read_seals(self) -> SealRecord | None:
        """Returns every seal of this run, or None before the first.

        Raises:
            UsageError: if the file is there and is no seal record.
        """
        if not self.sealed.exists():
            return None
        body = _read(self.sealed)
        try:
            return SealRecord.from_json(body)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(_garbled(self.sealed, f"{type(error).__name__}: {error}")) from error

    def write_text(self, path: Path, text: str) -> None:
        """Writes a text file whole or not at all."""
        write_atomic(path, text)

    def write_json(self, path: Path, body: Mapping[str, Any]) -> None:
        """Writes a document whole or not at all. Numbers that JSON does not have become text."""
        write_atomic(path, json.dumps(encode(body), indent=1, ensure_ascii=False, default=str) + "\n")


def check_place(root: Path, checkpoint: Path) -> list[Problem]:
    """Returns why a run directory may not be made at `root`."""
    here, there = root.resolve(), checkpoint.resolve()
    problems: list[Problem] = []
    if here == there or here.is_relative_to(there) or there.is_relative_to(here):
        problems.append(
            Problem(
                "SR-RUN-DIRECTORY",
                "the run directory may not lie inside the checkpoint, nor around it",
                where={"file": str(root)},
                found=str(checkpoint),
                hint="the checkpoint is never written to; choose another --dir",
            )
        )
    elif here.exists() and not here.is_dir():
        problems.append(
            Problem("SR-RUN-DIRECTORY", "the run directory is a file", where={"file": str(root)}, hint="choose another")
        )
    elif here.is_dir() and (strangers := sorted(set(os.listdir(here)) - _OURS - _temporary(here))):
        problems.append(
            Problem(
                "SR-RUN-DIRECTORY",
                "the run directory holds files that are not a run's",
                where={"file": str(root)},
                found=", ".join(strangers[:6]),
                hint="choose an empty or new --dir; deleting a run directory must never delete anything else",
            )
        )
    return problems


def _temporary(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if name.startswith(".") and name.endswith(".tmp")}


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(_garbled(path, str(error))) from error
    if not isinstance(body, dict):
        raise UsageError(_garbled(path, "not a JSON object"))
    return body


def _garbled(path: Path, why: str) -> Problem:
    return Problem(
        "SR-RUN-GARBLED",
        f"a file of the run directory cannot be read: {why}",
        where={"file": str(path)},
        hint="samerun writes these files whole; it was edited or damaged. Remove the stage's folder to redo it",
    )

"""What the stages of one run share: the manifest, the checkpoint, the run directory, and a clock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samerun.errors import Problem, has_errors
from samerun.manifest.models import Convert, Manifest
from samerun.runner.guarded import read_fingerprint
from samerun.runner.progress import Progress
from samerun.runner.rundir import RunDirectory
from samerun.stores.local import TreeFingerprint
from samerun.verify.evidence.observed import Observed
from samerun.verify.evidence.stage import (
    CONTROL,
    CONVERT,
    EVAL,
    INSPECT,
    LOAD,
    UPDATE,
    WINDOW,
    StageResult,
    Status,
    stages_of,
)

if TYPE_CHECKING:
    from samerun.formats.base import Checkpoint


RECORDER_STAGE: Mapping[str, str] = {
    CONTROL: "control",
    LOAD: "load",
    EVAL: "eval",
    UPDATE: "update",
    WINDOW: "window",
}
"""What a job is told to be (`SAMERUN_STAGE`) in each stage that starts one."""

FINGERPRINT = "fingerprint.json"
DIGESTS = "digests.json"


@dataclass(slots=True)
class Work:
    """What the stages of one run share. `base` is the folder that the manifest's paths are relative to."""

    directory: RunDirectory
    manifest: Manifest
    base: Path
    progress: Progress
    digests: dict[tuple[str, str, str], str] = field(default_factory=dict[tuple[str, str, str], str])

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that is moved."""
        return (self.base / self.manifest.run.checkpoint).resolve()

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of this migration, in order."""
        return stages_of(converts=self.manifest.convert is not None)

    def resumed_from(self, stage: str) -> Path:
        """Returns the checkpoint that a job of `stage` resumes from: candidates take the converted one, if any."""
        if self.manifest.convert is None or stage in (INSPECT, CONTROL, CONVERT):
            return self.checkpoint
        return self.directory.stage(CONVERT).resolve() / converted_name(self.manifest.convert)

    def watched(self, stage: str) -> list[Path]:
        """Returns everything that a disposable job of `stage` may not change."""
        further = ((self.base / path).resolve() for path in self.manifest.watch)
        return list(dict.fromkeys([self.checkpoint, self.resumed_from(stage), *further]))

    def open(self) -> Checkpoint:
        """Opens the checkpoint. Raises FormatError or UsageError as the readers do."""
        from samerun.formats.detect import open_checkpoint

        return open_checkpoint(self.checkpoint, self.manifest.run.format)

    def open_for(self, stage: str) -> Checkpoint:
        """Opens what a job of `stage` must hold: the checkpoint, under the names that the conversion gives it."""
        opened, convert = self.open(), self.manifest.convert
        if convert is None or stage in (INSPECT, CONTROL):
            return opened
        from samerun.convert.prepare import adapt_source

        if convert.map is not None:
            from samerun.formats.mapfile import read_name_map
            from samerun.formats.mapped import MappedCheckpoint

            opened = MappedCheckpoint(opened, read_name_map(self.map_of(convert.map), opened.state))
        return opened if stage == CONVERT else adapt_source(opened, convert.to)

    def map_of(self, text: str) -> str:
        """Returns a name map as the manifest has it, a file's path taken from the manifest's folder."""
        place, comma, numbers = text.partition(",")
        prefix = "inverse:" if place.startswith("inverse:") else ""
        file = self.base / place.removeprefix("inverse:")
        return f"{prefix}{file}{comma}{numbers}" if file.is_file() else text


def converted_name(convert: Convert) -> str:
    """Returns what the converted checkpoint is called in its stage's folder."""
    return "checkpoint.pt" if convert.to == "torch" else "checkpoint"


class Clock:
    """Measures one stage."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.started = datetime.now(UTC).isoformat(timespec="seconds")

    def result(
        self,
        stage: str,
        problems: Sequence[Problem],
        measured: Mapping[str, Any],
        jobs: Sequence[Mapping[str, Any]] = (),
    ) -> StageResult:
        """Returns the stage's result: failed if there is an error among the findings."""
        status: Status = "fail" if has_errors(problems) else "pass"
        return StageResult(
            stage=stage,
            status=status,
            problems=tuple(problems),
            measured=measured,
            jobs=tuple(jobs),
            seconds=round(time.monotonic() - self._started, 3),
            started=self.started,
        )


def check_state(
    work: Work, stage: str, observed: Observed, *, declare: Mapping[str, Any] | None = None
) -> list[Problem]:
    """Compares what a job holds after loading with the checkpoint, tensor by tensor.

    `declare` replaces entries of the manifest's table: an oracle holds the same values in another type.
    """
    from samerun.verify.load.check import check_loaded

    state = observed.state("loaded")
    if state is None:
        return []
    checkpoint = work.open_for(stage)
    try:
        problems = check_loaded(
            checkpoint,
            {**state.body, "update": state.update},
            declare=work.manifest.declare.model_dump(mode="json") | dict(declare or {}),
            optimizer=work.manifest.run.optimizer,
            digests=work.digests,
        )
    finally:
        checkpoint.close()
    return problems


def coverage(work: Work, observed: Observed | None) -> dict[str, Any]:
    """Returns how many tensors the job holds and the checkpoint has, and the digest of the job's whole state."""
    state = observed.state("loaded") if observed else None
    if state is None:
        return {}
    checkpoint = work.open()
    try:
        saved = len(checkpoint.state.tensors)
    finally:
        checkpoint.close()
    return {"tensors": len(state.body["tensors"]), "tensors_saved": saved, "state": state.body.get("state")}


def write_digests(work: Work, stage: Path) -> None:
    """Keeps the checkpoint's digests, so that reading it once is enough."""
    work.directory.write_json(stage / DIGESTS, {"digests": [[*key, value] for key, value in work.digests.items()]})


def read_digests(work: Work) -> None:
    """Takes up the digests that the control stage kept; they hold while the checkpoint's fingerprint does."""
    path = work.directory.stage(CONTROL) / DIGESTS
    if path.is_file():
        rows = json.loads(path.read_text(encoding="utf-8"))["digests"]
        work.digests.update({(saved, key, dtype): value for saved, key, dtype, value in rows})


def kept_fingerprint(work: Work) -> TreeFingerprint:
    """Returns the fingerprint that the inspection kept."""
    return read_fingerprint(work.directory.stage(INSPECT) / FINGERPRINT)

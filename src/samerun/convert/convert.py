"""Converts a checkpoint: what was prepared is carried out, and the proof is left."""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from samerun import __version__
from samerun.convert.prepare import Prepared, prepare
from samerun.convert.prove import Claim, Evidence, list_proved, prove_equal
from samerun.convert.sources import changes_since
from samerun.core.dtype import DType
from samerun.core.mesh import Layout
from samerun.errors import ExecutionError, Problem, Severity, StalePlan, UsageError, VerificationError, has_errors
from samerun.execute.check import PROOF_NAME
from samerun.execute.engine import ProgressCallback, Settings, execute_plan
from samerun.execute.meeting import SPOILED, LaunchFailed
from samerun.execute.partial import Partial, open_partial, proof_beside
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.stores.destination import StoredPlace
from samerun.stores.local import TreeFingerprint, fingerprint_tree
from samerun.stores.remote import original_name

PROOF_SCHEMA = "samerun/convert-proof/1"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A destination that is there and proved. `proof` is where the proof lies. Both are URLs in a store."""

    dest: Path | str
    bytes_read: int
    bytes_written: int
    seconds: float
    proof: Path | str
    state: str
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the body of `samerun convert --json`."""
        return {
            "dest": str(self.dest),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "seconds": self.seconds,
            "proof": str(self.proof),
            "state": self.state,
            "problems": [problem.to_json() for problem in self.problems],
        }


def convert(
    source: Checkpoint,
    dest: str | os.PathLike[str],
    *,
    to: str,
    layout: Layout | None = None,
    allow: Collection[str] = (),
    dtype: Mapping[str, DType] | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
    cancel: Event | None = None,
) -> Converted:
    """Writes an opened checkpoint as another format at `dest`; `prepare` and `carry_out` in one. See there."""
    settings = settings or Settings()
    prepared = prepare(source, dest, to=to, layout=layout, allow=allow, dtype=dtype, settings=settings)
    return carry_out(prepared, settings=settings, progress=progress, cancel=cancel)


def carry_out(
    prepared: Prepared,
    *,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
    cancel: Event | None = None,
) -> Converted:
    """Copies, reads back, proves and commits. The destination appears whole and proved, or not at all.

    Raises:
        UsageError: if the destination cannot be built there.
        ExecutionError: if it was interrupted, the disk is full, or reading or writing failed; running it again goes on.
        StalePlan: if the source changed meanwhile. Nothing stays behind.
        VerificationError: if what was read back is not what the source holds. Nothing stays behind.
    """
    started = time.monotonic()
    settings, cancel = settings or Settings(), cancel or Event()
    if isinstance(prepared.place, StoredPlace):
        from samerun.convert.stored import carry_out_stored

        return carry_out_stored(prepared, prepared.place, settings=settings, progress=progress, cancel=cancel)
    partial = open_place(prepared, settings)
    with building(prepared, partial):
        evidence = _build(prepared, partial, settings, progress, cancel)
        commit(prepared, partial, evidence)
    return converted(prepared, partial, evidence, started)


def open_place(prepared: Prepared, settings: Settings, boots: Collection[str] = ()) -> Partial:
    """Opens where the destination is built. Raises UsageError if it cannot be built there. See `open_partial`."""
    plan, place = prepared.plan, local_place(prepared)
    try:
        return open_partial(
            place,
            original_name(prepared.source.path.resolve()),
            plan.source_fingerprint,
            f"{plan.hash} {settings.tile_bytes}",
            files=[file.path for file in plan.destination.files],
            single_file=plan.destination.single_file,
            boots=boots,
        )
    except OSError as error:
        raise UsageError(_cannot_build(place, error)) from error


def local_place(prepared: Prepared) -> Path:
    """Returns where the destination lies, on a file system."""
    if isinstance(prepared.place, StoredPlace):
        raise TypeError(f"{prepared.place} is in a store")
    return prepared.place


@contextmanager
def building(prepared: Prepared, partial: Partial | None) -> Generator[None]:
    """Decides, when the block ends with an exception, whether what was built stays for another attempt."""
    try:
        yield
    except BaseException as error:
        if partial is not None:
            if isinstance(error, SPOILED) or (isinstance(error, LaunchFailed) and error.discard):
                partial.discard()
            partial.close()
        match error:
            case KeyboardInterrupt() | InterruptedError():
                raise ExecutionError(interrupted(local_place(prepared))) from error
            case OSError():
                raise ExecutionError(_failed(local_place(prepared), error)) from error
            case _:
                raise


def commit(prepared: Prepared, partial: Partial, evidence: Evidence) -> None:
    """Writes the proof and makes the destination visible.

    Raises:
        VerificationError: if the evidence is against it.
        StalePlan: if the source changed meanwhile.
    """
    require_proved(prepared, evidence)
    partial.write_proof(make_proof(prepared, evidence, fingerprint_tree(partial.payload)))
    partial.commit()


def require_proved(prepared: Prepared, evidence: Evidence) -> None:
    """Raises VerificationError if the evidence is against the destination, StalePlan if the source changed."""
    if has_errors(evidence.problems):
        raise VerificationError(evidence.problems)
    if changed := changes_since(prepared.trees, prepared.source.path, prepared.plan.sources):
        raise StalePlan(changed)


def converted(prepared: Prepared, partial: Partial, evidence: Evidence, started: float) -> Converted:
    """Returns what was done; it is committed."""
    plan, place = prepared.plan, local_place(prepared)
    single = plan.destination.single_file
    return Converted(
        dest=place,
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        seconds=time.monotonic() - started,
        proof=proof_beside(place) if single else place / PROOF_NAME,
        state=evidence.state,
        problems=(*partial.notes, *prepared.problems, *evidence.problems),
    )


def _build(
    prepared: Prepared, partial: Partial, settings: Settings, progress: ProgressCallback | None, cancel: Event
) -> Evidence:
    plan = prepared.plan
    execute_plan(
        plan,
        prepared.view,
        partial.payload,
        partial.journal,
        partial.done,
        settings,
        cancel=cancel,
        progress=progress,
    )
    partial.journal.stage("written")
    return read_back(prepared, partial.payload, settings, progress, cancel)


def read_back(
    prepared: Prepared,
    payload: Path | str,
    settings: Settings,
    progress: ProgressCallback | None,
    cancel: Event,
    share: tuple[int, int] = (0, 1),
) -> Evidence:
    """Compares what was built, through each reader that is to open it, with the source; with `share` a part of it.

    `payload` is the URL of what lies in a store.
    """
    destination = prepared.plan.destination
    evidence, *others = (
        _read_as(prepared, payload, format, settings, progress, cancel, share)
        for format in (destination.format, *destination.read_as)
    )
    for other in others:
        evidence.problems += [problem for problem in other.problems if problem.severity is Severity.ERROR]
    return evidence


def _read_as(
    prepared: Prepared,
    payload: Path | str,
    format: str,
    settings: Settings,
    progress: ProgressCallback | None,
    cancel: Event,
    share: tuple[int, int],
) -> Evidence:
    destination = open_checkpoint(payload, format, unfinished=True)
    try:
        return prove_equal(
            prepared.source,
            destination,
            _claim(prepared),
            threads=settings.threads,
            progress=progress,
            cancel=cancel,
            share=share,
        )
    finally:
        destination.close()


def _claim(prepared: Prepared) -> Claim:
    plan = prepared.plan
    written = {key: prepared.view.state.tensors[key].dtype for key in plan.embedded}
    written |= dict(zip(plan.keys, plan.dtypes, strict=True))
    return Claim(prepared.view.state, written, plan.destination.dropped)


def make_proof(prepared: Prepared, evidence: Evidence, written: TreeFingerprint) -> dict[str, Any]:
    """Returns the proof of a destination; `written` is its fingerprint without marker and proof."""
    plan, source = prepared.plan, prepared.source
    return {
        "schema": PROOF_SCHEMA,
        "source": {
            "path": original_name(source.path.resolve()),
            "format": source.state.format,
            "fingerprint": prepared.trees[0].digest,
            "written_by": dict(source.state.written_by),
        },
        "destination": {
            "name": prepared.place.name,
            "format": prepared.to,
            "layout": prepared.layout.to_dict(short=True) if prepared.layout else None,
            "fingerprint": written.digest,
            "files": len(plan.destination.files),
            "bytes": plan.bytes_written,
            "update": prepared.view.state.progress.update,
        },
        "plan": plan.hash,
        "tensors": list_proved(evidence.tensors),
        "state": evidence.state,
        "decisions": [problem.to_json() for problem in prepared.decisions],
        "dtypes": {key: dtype.name for key, dtype in prepared.dtypes.items()},
        "dropped": dict(plan.destination.dropped),
        "problems": [problem.to_json() for problem in (*prepared.problems, *evidence.problems)],
        "versions": {"samerun": __version__, "numpy": np.__version__, "python": platform.python_version()},
    }


def _cannot_build(place: Path, error: OSError) -> Problem:
    return Problem(
        "SR-CONVERT-DEST",
        f"the destination cannot be built here: {error.strerror or error}",
        where={"file": str(place.parent)},
        hint="it is built beside its final place, so that directory must be writable",
    )


def interrupted(place: Path | StoredPlace) -> Problem:
    return Problem(
        "SR-CONVERT-INTERRUPTED",
        "the conversion was interrupted; the source is untouched and no destination is visible",
        where={"file": str(place)},
        hint="the same command goes on where it was; any other command for this destination starts anew",
    )


def _failed(place: Path, error: OSError) -> Problem:
    full = error.errno in _FULL
    return Problem(
        "SR-CONVERT-SPACE" if full else "SR-CONVERT-IO",
        "the disk is full" if full else f"writing failed: {error.strerror or error}",
        where={"file": str(error.filename or place)},
        hint="no destination is visible. The same command goes on where it was; to give up, remove the directory "
        f".{place.name}.samerun-partial-* beside it",
    )

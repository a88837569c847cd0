"""Converts a checkpoint: what is refused, what is planned, what is carried out, and the proof that is left."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from samerun import __version__
from samerun.convert.dtypes import RecastCheckpoint, plan_dtypes
from samerun.convert.masters import settle_masters
from samerun.convert.objects import settle_objects
from samerun.convert.prove import Claim, Evidence, prove_equal
from samerun.core.dtype import DType
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState
from samerun.core.written import DestinationPlan
from samerun.errors import (
    ExecutionError,
    PlanError,
    Problem,
    Severity,
    StalePlan,
    UndecidedError,
    UsageError,
    VerificationError,
    has_errors,
)
from samerun.execute.check import PROOF_NAME, check_plan
from samerun.execute.engine import ProgressCallback, Settings, execute_plan
from samerun.execute.meeting import SPOILED, LaunchFailed
from samerun.execute.partial import Partial, open_partial, proof_beside, require_places
from samerun.execute.plan import ConversionPlan
from samerun.execute.planner import plan_conversion
from samerun.formats.base import Array, Checkpoint, Inspectable, WriteSource
from samerun.formats.detect import open_checkpoint
from samerun.stores.destination import StoredPlace
from samerun.stores.local import TreeFingerprint, compare_trees, fingerprint_tree
from samerun.stores.remote import is_url, original_name
from samerun.verify.structure import inspect_checkpoint

PROOF_SCHEMA = "samerun/convert-proof/1"
WRITERS = ("dcp", "torch", "safetensors", "universal", "zero", "megatron", "huggingface")
_SCALAR_BYTES = 64 << 10
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Writer = Callable[[WriteSource, Layout | None], DestinationPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversion that may be carried out: everything that blocked was decided. Nothing was written yet.

    `source` is the checkpoint as opened, `view` as it is written (objects settled, types changed). `trees` are the
    fingerprints of everything that is read. `decisions` are the blocking findings that were allowed, by code.
    """

    source: Checkpoint
    view: Checkpoint
    plan: ConversionPlan
    place: Path | StoredPlace
    to: str
    layout: Layout | None
    trees: tuple[TreeFingerprint, ...]
    problems: tuple[Problem, ...]
    decisions: tuple[Problem, ...]
    dtypes: Mapping[str, DType] = field(default_factory=dict[str, DType])


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


def prepare(
    source: Checkpoint,
    dest: str | os.PathLike[str],
    *,
    to: str,
    layout: Layout | None = None,
    allow: Collection[str] = (),
    dtype: Mapping[str, DType] | None = None,
    settings: Settings | None = None,
    given: Path | None = None,
    original: Checkpoint | None = None,
    writer: Writer | None = None,
    payloads: bool = True,
    masters: str | None = None,
) -> Prepared:
    """Plans a conversion and refuses whatever stands against it. Writes nothing.

    Args:
        source: the opened checkpoint, or anything that looks like one (under other names, say).
        dest: the path of the destination, or its URL in a store; nothing may be there.
        to: the format to write.
        layout: the layout to write for, where the format is written for one.
        allow: codes of blocking findings that the user accepts.
        dtype: element types by role, where they are to change.
        settings: memory and threads.
        given: the path that the user named, where the checkpoint lies below it.
        original: the checkpoint as its reader opened it, where `source` is a view of one: what is checked of a source.
        writer: lays out the destination; that of the format `to` by default.
        masters: where fp32 masters go that the format has no place for: see `samerun.convert.masters`.
        payloads: whether to compare stored bytes with the checksums recorded beside them; one of several processes
            does it for all.

    Raises:
        UsageError: for a destination or a format that cannot be.
        UndecidedError: if findings block that were not allowed; every one is listed.
        PlanError: if the plan is not right: a defect of the writer, or values that the source lacks.
    """
    place = _require_place(dest, given or source.path, source.path)
    lay_out = writer or load_writer(to)
    original, source = original or source, adapt_source(source, to)
    said: tuple[Problem, ...] = ()
    if masters is not None:
        source, said = settle_masters(source, masters, to)
        allow = {*allow, "SR-WRITE-MASTERS"}
    dtypes = plan_dtypes(source.state, dtype) if dtype else {}
    trees = fingerprint_source(source.path, ())
    found = list(inspect_checkpoint(original).problems)
    checked = original.check_payloads() if payloads and isinstance(original, Inspectable) else None
    found += checked.problems if checked is not None else ()
    # A process that leaves the check to another one plans as if it had passed; otherwise that one's findings block.
    trusted = isinstance(original, Inspectable) and (checked is None or checked.intact is not False)
    decisions = require_decided(found, allow)
    state, kept = settle_objects(source.state)
    view = RecastCheckpoint(_Settled(source, state), dtypes) if dtypes else _Settled(source, state)
    embedded: set[str] = set()
    destination = lay_out(WriteSource(view.state, _scalar_reader(view, embedded)), layout)
    decisions += require_decided(destination.problems, allow)
    settings = settings or Settings()
    plan = plan_conversion(
        destination,
        view,
        _combined(trees),
        embedded=embedded,
        budget_bytes=settings.budget_bytes,
        trust_checksums=trusted,
    )
    if wrong := check_plan(plan, view.state):
        raise PlanError(wrong)
    before, trees = trees, fingerprint_source(source.path, plan.sources)
    if changed := compare_trees(before[0], trees[0]):
        raise StalePlan(changed)
    plan = replace(plan, source_fingerprint=_combined(trees))
    if isinstance(place, StoredPlace):
        place.single_file = destination.single_file
    else:
        decisions += require_decided(_check_space(place, plan.bytes_written), allow)
    notes = [problem for problem in found if problem.severity is Severity.WARNING]
    notes = [problem for problem in (*said, *kept, *destination.problems, *notes) if problem not in decisions]
    return Prepared(
        source=source,
        view=view,
        plan=plan,
        place=place,
        to=to,
        layout=layout,
        trees=trees,
        problems=tuple(notes),
        decisions=tuple(decisions),
        dtypes=dtypes,
    )


def _require_place(dest: str | os.PathLike[str], *sources: Path) -> Path | StoredPlace:
    """Returns where the destination is to lie. Raises UsageError if it cannot be there."""
    if is_url(dest):
        from samerun.convert.stored import require_stored

        return require_stored(str(dest), original_name(sources[-1].resolve()))
    places = [require_places(source, Path(dest)) for source in sources]
    return places[0]


def load_writer(to: str) -> Writer:
    """Returns the function that lays out a format.

    Raises:
        UsageError: if there is no such format, or nothing writes it.
    """
    if to in WRITERS:
        try:
            return importlib.import_module(f"samerun.formats.{to}.write").lay_out
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("samerun.formats"):
                raise
    raise UsageError(
        Problem("SR-CONVERT-FORMAT", f"no format called {to!r} can be written", hint=f"formats: {', '.join(WRITERS)}")
    )


def adapt_source(source: Checkpoint, to: str) -> Checkpoint:
    """Returns a checkpoint under the names that a format gives it without being asked; mostly the checkpoint itself.

    Raises:
        UsageError: if its tensors do not fit together under those names.
    """
    adapt = getattr(importlib.import_module(f"samerun.formats.{to}.write"), "adapt", None) if to == "megatron" else None
    return adapt(source) if adapt is not None else source


def require_decided(problems: Iterable[Problem], allow: Collection[str]) -> list[Problem]:
    """Returns the blocking findings that were allowed.

    Raises:
        UndecidedError: if one was not; every one is listed.
    """
    blocking = [problem for problem in problems if problem.severity is Severity.ERROR]
    if undecided := [problem for problem in blocking if problem.code not in allow]:
        raise UndecidedError(undecided)
    return blocking


def fingerprint_source(path: Path, sources: Iterable[str]) -> tuple[TreeFingerprint, ...]:
    """Fingerprints the checkpoint, and files that are read although they lie elsewhere."""
    root = path.resolve()
    elsewhere = sorted(
        {file for file in sources if root != (real := Path(file).resolve()) and root not in real.parents}
    )
    return (fingerprint_tree(path), *(fingerprint_tree(file) for file in elsewhere))


def _combined(trees: Iterable[TreeFingerprint]) -> str:
    """Returns one digest over contents and modification times: for telling whether a source is still the same one."""
    body = hashlib.sha256()
    for tree in trees:
        body.update(f"{tree.root}\n{tree.digest}\n".encode("utf-8", "surrogateescape"))
        body.update(json.dumps([tree.files[name].modified_ns for name in sorted(tree.files)]).encode())
    return f"sha256:{body.hexdigest()}"


class _Settled:
    """A checkpoint whose objects were settled: the same tensors beside another state."""

    def __init__(self, inner: Checkpoint, state: LogicalState) -> None:
        self.path, self.state, self._inner = inner.path, state, inner
        self.locate, self.read, self.read_piece, self.close = (
            inner.locate,
            inner.read,
            inner.read_piece,
            inner.close,
        )


def _scalar_reader(view: Checkpoint, embedded: set[str]) -> Callable[[str], Array]:
    def scalar(key: str) -> Array:
        entry = view.state.tensors[key]
        if entry.num_bytes > _SCALAR_BYTES:
            raise ValueError(f"{key} has {entry.num_bytes} bytes: too many for a pickle")
        embedded.add(key)
        return view.read(key)

    return scalar


def _check_space(place: Path, num_bytes: int) -> list[Problem]:
    found = os.statvfs(place.parent)
    free = found.f_bavail * found.f_frsize
    if free >= num_bytes:
        return []
    return [
        Problem(
            "SR-CONVERT-SPACE",
            "the file system has less space than the destination needs",
            where={"file": str(place.parent)},
            expected=f"{num_bytes} bytes",
            found=f"{free} bytes",
            hint="choose another place; --allow SR-CONVERT-SPACE tries it all the same (what an earlier attempt wrote "
            "counts as used)",
        )
    ]


# --- carrying out -------------------------------------------------------------------------------------------------


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
    if changed := _changes(prepared):
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


def _changes(prepared: Prepared) -> list[Problem]:
    try:
        after = fingerprint_source(prepared.source.path, prepared.plan.sources)
    except OSError as error:
        return [
            Problem(
                "SR-FILE-CHANGED",
                f"the source cannot be read any more: {error.strerror}",
                where={"file": str(prepared.source.path)},
                hint="something removed or replaced it while it was converted",
            )
        ]
    return [problem for a, b in zip(prepared.trees, after, strict=False) for problem in compare_trees(a, b)]


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
        },
        "plan": plan.hash,
        "tensors": {tensor.key: tensor.to_json() for tensor in evidence.tensors},
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

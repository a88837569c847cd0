"""A conversion into an object store, by one process or the processes of a launch: uploaded, read back, then whole.

`docs/adr/0006` says in which order objects appear, and what a kill leaves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

from samerun.convert.convert import Converted, interrupted, make_proof, read_back, require_proved
from samerun.convert.prepare import Prepared
from samerun.convert.prove import Evidence
from samerun.convert.together import agree, evidence_to_json, join_evidence, told
from samerun.core.written import FilePlan
from samerun.errors import ExecutionError, Problem, Severity, UsageError
from samerun.execute.check import PROOF_NAME
from samerun.execute.engine import Progress, ProgressCallback, Settings
from samerun.execute.meeting import SPOILED, LaunchFailed, Meeting, is_running, who
from samerun.execute.ranks import divide
from samerun.execute.upload import FileStreams
from samerun.stores.destination import INCOMPLETE_SCHEMA, StoredPlace, part_bytes
from samerun.stores.local import TreeFingerprint, fingerprint_tree
from samerun.stores.remote import INCOMPLETE_NAME, RemoteView, is_url, original_name

_COPIES_OF_A_PART = 4  # ours, the driver's two, and the request's
_OWN = frozenset({INCOMPLETE_NAME, PROOF_NAME})


def require_stored(dest: str, source: str) -> StoredPlace:
    """Returns where a destination is to lie in a store.

    Raises:
        UsageError: if something is there that is not left of a conversion, or it lies inside or around the source.
        ExecutionError: if the store does not answer.
    """
    place = StoredPlace(dest)
    if is_url(source) and place.is_within(source):
        raise UsageError(_refused("SR-CONVERT-NESTED", "source and destination lie inside each other", dest))
    for single_file in (False, True):
        place.single_file = single_file
        if place.read_marker():
            return place
    if place.sizes():
        raise UsageError(_refused("SR-CONVERT-EXISTS", "something is there already", dest))
    return place


@dataclass(slots=True)
class Attempt:
    """A destination in a store that this process, or this launch, builds. `kept` are objects that lie there already."""

    place: StoredPlace
    marker: Mapping[str, Any]
    files: Sequence[FilePlan]
    kept: frozenset[str] = frozenset()
    notes: list[Problem] = field(default_factory=list[Problem])

    def left(self) -> tuple[list[int], list[int]]:
        """Returns the files that are to be uploaded: those that hold values, and then those that only say where they
        are. Without these no framework takes what lies there for a checkpoint."""
        left = [number for number, file in enumerate(self.files) if file.path not in self.kept]
        heads = {n for n in left if sum(len(known.content) for known in self.files[n].literals) == self.files[n].size}
        heads = heads if len(self.files) > 1 else set[int]()
        return [number for number in left if number not in heads], sorted(heads)

    def commit(self, proof: Mapping[str, Any]) -> None:
        """Writes the proof and takes away the marker.

        Raises:
            UsageError: if another process took the place over, or put something there.
        """
        if self.place.read_marker() != self.marker:
            raise UsageError(_taken_over(self.place))
        found = {name: size for name, size in self.place.sizes().items() if name not in _OWN}
        if found != (wanted := _sizes(self.place, self.files)):
            other = next(name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name))
            raise UsageError(_refused("SR-CONVERT-EXISTS", f"{other or 'it'} was put there meanwhile", str(self.place)))
        self.place.write_own(PROOF_NAME, proof)
        self.place.remove_own(INCOMPLETE_NAME)

    def discard(self) -> None:
        """Removes everything, the marker last."""
        with suppress(ExecutionError):  # the marker stays then, and what lies there is no checkpoint for any reader
            if self.place.read_marker() == self.marker:
                _remove(self.place, self.marker)


def open_attempt(prepared: Prepared, place: StoredPlace) -> Attempt:
    """Takes the place of the destination, keeping what an equal attempt left, and nothing else.

    Raises:
        UsageError: if a process of this machine is building there, or something else lies there.
    """
    plan, files = prepared.plan, prepared.plan.destination.files
    source = original_name(prepared.source.path.resolve())
    identity = {"source": source, "fingerprint": plan.source_fingerprint, "plan": plan.hash}
    names = [file.path for file in files]
    marker = {"schema": INCOMPLETE_SCHEMA, **identity, "files": names, **who(), "nonce": os.urandom(8).hex()}
    notes: list[Problem] = []
    found: Mapping[str, Any] | None = None
    for single_file in (not plan.destination.single_file, plan.destination.single_file):
        place.single_file = single_file
        found = place.read_marker()
        if found and is_running(found):
            raise UsageError(_busy(place, found))
        same = single_file == plan.destination.single_file
        if found and not (same and all(found.get(name) == value for name, value in identity.items())):
            _remove(place, found)
            notes.append(_discarded(place))
            found = None
    there = {name: size for name, size in place.sizes().items() if name not in _OWN}
    wanted = _sizes(place, files)
    if strange := sorted(there.keys() - (wanted.keys() if found else set[str]())):
        raise UsageError(_refused("SR-CONVERT-EXISTS", f"{strange[0] or 'something'} is there already", str(place)))
    place.write_own(INCOMPLETE_NAME, marker)
    if found:
        place.remove_own(PROOF_NAME)
        place.abandon_uploads(names)
    kept = {file.path for file in files if there.get("" if place.single_file else file.path) == file.size}
    return Attempt(place, marker, files, frozenset(kept), notes)


def _sizes(place: StoredPlace, files: Sequence[FilePlan]) -> dict[str, int]:
    return {"" if place.single_file else file.path: file.size for file in files}


def _remove(place: StoredPlace, marker: Mapping[str, Any]) -> None:
    names = [str(name) for name in marker["files"]]
    if strange := [name for name in names if {"", ".", ".."} & set(name.split("/"))]:  # it would lie elsewhere
        raise UsageError(_refused("SR-CONVERT-EXISTS", f"a marker that names {strange[0]!r} is there", str(place)))
    place.remove(names)
    place.remove_own(PROOF_NAME)
    place.remove_own(INCOMPLETE_NAME)


def carry_out_stored(
    prepared: Prepared,
    place: StoredPlace,
    *,
    settings: Settings,
    progress: ProgressCallback | None = None,
    cancel: Event,
) -> Converted:
    """Does what `carry_out` does, for a destination in a store. Raises as it does."""
    started = time.monotonic()
    work = _Work(prepared, place, settings, progress, cancel)
    attempt = open_attempt(prepared, place)
    with _building(place, attempt):
        for numbers in attempt.left():
            work.upload(numbers)
        evidence = work.read_back((0, 1))
        work.commit(attempt, evidence)
    return work.converted(attempt, evidence, started)


def carry_out_stored_together(
    prepared: Prepared,
    place: StoredPlace,
    meeting: Meeting,
    *,
    settings: Settings,
    progress: ProgressCallback | None = None,
) -> Converted | None:
    """Does this process's share of what `carry_out_stored` does. Every rank calls this.

    Ranks upload whole files, about equal in bytes, then prove contiguous parts of the tensors. Rank 0 writes the
    marker and the proof, and commits; it returns what was done, the others None. Raises as `carry_out_together` does.
    """
    started = time.monotonic()
    work = _Work(prepared, place, agree(prepared, meeting, settings), progress, meeting.cancel)
    if not meeting.first:
        with _building(place, None), told(meeting):
            _follow(work, meeting)
        return None
    attempt = open_attempt(prepared, place)
    with _building(place, attempt), told(meeting):
        evidence = _lead(work, meeting, attempt)
        work.commit(attempt, evidence)
    with suppress(OSError):  # it is committed, whoever hears of it
        meeting.tell("committed", {})
    return work.converted(attempt, evidence, started)


def _lead(work: _Work, meeting: Meeting, attempt: Attempt) -> Evidence:
    ranks = meeting.launch.world_size
    values, heads = attempt.left()
    parts = divide([attempt.files[number].size for number in values], ranks)
    shares = [values[part.start : part.stop] for part in parts]
    meeting.tell("begin", {"shares": shares})
    work.upload(shares[0])
    meeting.hear_all("written", {})
    work.upload(heads)
    meeting.tell("prove", {})
    evidence = join_evidence(work.read_back((0, ranks)), meeting.hear_all("proved", {}))
    meeting.check()
    return evidence


def _follow(work: _Work, meeting: Meeting) -> None:
    rank, ranks = meeting.launch.rank, meeting.launch.world_size
    work.upload([int(number) for number in meeting.hear("begin")["shares"][rank]])
    meeting.say("written", {})
    meeting.hear("prove")
    meeting.say("proved", evidence_to_json(work.read_back((rank, ranks))))
    meeting.hear("committed")


@dataclass(slots=True)
class _Work:
    """What one process does."""

    prepared: Prepared
    place: StoredPlace
    settings: Settings
    progress: ProgressCallback | None
    cancel: Event

    def upload(self, numbers: Sequence[int]) -> None:
        """Uploads files of the plan, as many at once as the memory for their parts allows."""
        files = self.prepared.plan.destination.files
        sizes = [part_bytes(files[number].size) for number in numbers]
        memory = _COPIES_OF_A_PART * max(sizes, default=1)
        at_once = max(1, min(self.settings.threads, self.settings.budget_bytes // memory))
        total, done, lock = sum(files[number].size for number in numbers), 0, Lock()
        started, failed = time.monotonic(), list[BaseException]()

        def counted(part: bytearray) -> bytearray:
            nonlocal done
            if failed or self.cancel.is_set():
                raise InterruptedError(4, "the conversion was interrupted")
            with lock:
                done += len(part)
                if self.progress is not None:
                    self.progress(Progress("copying", done, total, time.monotonic() - started))
            return part

        with FileStreams(self.prepared.plan, self.prepared.view, self.settings, self.cancel) as streams:

            def send(number: int) -> None:
                file = files[number]
                try:
                    parts = streams.parts(number, part_bytes(file.size))
                    self.place.upload(file.path, file.size, map(counted, parts))
                except BaseException as error:
                    failed.append(error)

            with ThreadPoolExecutor(max_workers=at_once) as pool:
                try:
                    list(pool.map(send, numbers))
                except BaseException:  # an interrupt from the keyboard: the threads end at their next part
                    self.cancel.set()
                    raise
        if failed:
            raise failed[0]

    def read_back(self, share: tuple[int, int]) -> Evidence:
        return read_back(self.prepared, self.place.url, self.settings, self.progress, self.cancel, share)

    def commit(self, attempt: Attempt, evidence: Evidence) -> None:
        require_proved(self.prepared, evidence)
        attempt.commit(make_proof(self.prepared, evidence, _fingerprint(self.place)))

    def converted(self, attempt: Attempt, evidence: Evidence, started: float) -> Converted:
        plan = self.prepared.plan
        return Converted(
            dest=self.place.url,
            bytes_read=plan.bytes_read,
            bytes_written=plan.bytes_written,
            seconds=time.monotonic() - started,
            proof=self.place.beside(PROOF_NAME),
            state=evidence.state,
            problems=(*attempt.notes, *self.prepared.problems, *evidence.problems),
        )


def _fingerprint(place: StoredPlace) -> TreeFingerprint:
    """What the store says of every object, without marker and proof."""
    view = RemoteView(place.url)
    try:
        found = fingerprint_tree(view.path)
    finally:
        view.close()
    return TreeFingerprint(found.root, {name: entry for name, entry in found.files.items() if name not in _OWN})


@contextmanager
def _building(place: StoredPlace, attempt: Attempt | None) -> Generator[None]:
    """Decides, when the block ends with an exception, whether what was uploaded stays for another attempt."""
    try:
        yield
    except BaseException as error:
        if attempt is not None and (isinstance(error, SPOILED) or (isinstance(error, LaunchFailed) and error.discard)):
            attempt.discard()
        match error:
            case KeyboardInterrupt() | InterruptedError():
                raise ExecutionError(interrupted(place)) from error
            case OSError():
                raise ExecutionError(_failed(place, error)) from error
            case _:
                raise


# --- findings -----------------------------------------------------------------------------------------------------


def _refused(code: str, message: str, url: str) -> Problem:
    return Problem(code, message, where={"file": url}, hint="choose a prefix that nothing has, outside the source")


def _busy(place: StoredPlace, marker: Mapping[str, Any]) -> Problem:
    return Problem(
        "SR-CONVERT-BUSY",
        "another process is building this destination",
        where={"file": str(place), "pid": marker.get("pid")},
        hint="wait for it, or stop it; the next attempt goes on where it was",
    )


def _taken_over(place: StoredPlace) -> Problem:
    return Problem(
        "SR-CONVERT-BUSY",
        "another process took this destination over, or removed its marker",
        where={"file": str(place)},
        hint="a store has no locks: start one conversion to a URL at a time",
    )


def _discarded(place: StoredPlace) -> Problem:
    return Problem(
        "SR-CONVERT-STALE",
        "what an earlier attempt left was removed: it was for another source, or another plan",
        severity=Severity.NOTE,
        where={"file": str(place)},
        hint="nothing of it went into this destination",
    )


def _failed(place: StoredPlace, error: OSError) -> Problem:
    return Problem(
        "SR-CONVERT-IO",
        f"reading or writing failed: {error.strerror or error}",
        where={"file": str(error.filename or place)},
        hint="no reader of samerun takes what lies there for whole. The same command goes on where it was; a window of "
        "each file passes through the temporary directory (TMPDIR), which needs room for it",
    )

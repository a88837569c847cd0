"""Where a destination is built, and how it appears: whole, proved, or not at all.

Beside a destination `name` lies, while it is built, `.name.samerun-partial-<id>/` with the journal and, under its own
name, the destination. The id is made from the source, its fingerprint and the plan, so that what another source or plan
left behind is never found by this one. `docs/adr/0004` says why and in which order things are renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.errors import Problem, Severity, UsageError
from samerun.execute.check import PROOF_NAME
from samerun.execute.engine import flush_directory
from samerun.execute.journal import Done, Journal, Segment, boot_id, read_journal

_JOURNAL, _PROOF = "journal", "proof.json"
_MEETING = "samerun-ranks"


def require_places(source: Path, dest: Path) -> Path:
    """Returns the destination with every link in its parent resolved.

    Raises:
        UsageError: if it exists (a dangling link counts), has no parent directory, or lies inside or around the source.
    """
    parent = dest.parent.resolve()
    if not parent.is_dir():
        raise UsageError(_refused("SR-CONVERT-DEST", "the directory that it would lie in does not exist", dest))
    place = parent / dest.name
    if dest.name in ("", ".", "..") or place == parent:
        raise UsageError(_refused("SR-CONVERT-DEST", "this is no name for a destination", dest))
    home = source.resolve()
    if place == home or home in place.parents:
        raise UsageError(_refused("SR-CONVERT-NESTED", "the destination lies inside the source", dest))
    if place in home.parents:
        raise UsageError(_refused("SR-CONVERT-NESTED", "the source would lie inside the destination", dest))
    if os.path.lexists(place):
        _tidy(place)
        raise UsageError(_refused("SR-CONVERT-EXISTS", "something is there already", dest))
    return place


def _tidy(place: Path) -> None:
    """Removes what a process that was killed right after it committed had no time to remove: an empty scaffold."""
    for folder in leftovers(place):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not os.path.lexists(folder / place.name) and _locked(lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def leftovers(place: Path) -> list[Path]:
    """Returns the directories in which a destination is, or was, being built."""
    found = sorted(place.parent.glob(f"{_quoted(_prefix(place))}*"))
    return [folder for folder in found if stat.S_ISDIR(os.lstat(folder).st_mode)]


def _prefix(place: Path) -> str:
    return f".{place.name}.samerun-partial-"


def lock_folder(folder: Path) -> int | None:
    """Returns a descriptor that locks a directory until it is closed, None if another process has locked it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    if _locked(lock):
        return lock
    os.close(lock)
    return None


def meeting_place(place: Path) -> Path:
    """Returns the directory in which processes that build a destination together meet."""
    return place.with_name(f".{place.name}.{_MEETING}")


def _refused(code: str, message: str, dest: Path) -> Problem:
    return Problem(code, message, where={"file": str(dest)}, hint="choose a name that nothing has, beside the source")


def proof_beside(place: Path) -> Path:
    """Returns where the proof of a destination that is a single file lies."""
    return place.with_name(f"{place.name}.{PROOF_NAME}")


@dataclass(slots=True)
class Partial:
    """A destination being built.

    `header` says what its journals are for; `done` is what an earlier attempt wrote and this one may keep.
    """

    place: Path
    folder: Path
    journal: Journal
    header: Mapping[str, Any]
    single_file: bool
    done: dict[int, list[Segment]] = field(default_factory=dict[int, list[Segment]])
    notes: list[Problem] = field(default_factory=list[Problem])

    @property
    def payload(self) -> Path:
        """Where the destination lies while it is built: under its own name."""
        return self.folder / self.place.name

    @staticmethod
    def journal_in(folder: Path, rank: int, session: str) -> Path:
        """Returns where another process notes its share. Each launch has names of its own: a straggler of an earlier
        one never writes into a journal of this one."""
        return folder / f"{_JOURNAL}-{session}-{rank:05d}"

    def gather(self) -> dict[int, list[Segment]]:
        """Returns what the journals of the other processes of this launch say that was written."""
        found = _other_journals(self.folder)
        return {number: segments for _, done in found for number, segments in done.units.items()}

    def write_proof(self, proof: Mapping[str, Any]) -> None:
        """Puts the proof into the destination, or beside it where that is a single file, and flushes it."""
        text = (json.dumps(proof, indent=1, default=str) + "\n").encode()
        path = self.folder / _PROOF if self.single_file else self.payload / PROOF_NAME
        with open(path, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        flush_directory(path.parent)
        self.journal.stage("proved")

    def commit(self) -> None:
        """Makes the destination visible under its name. For a single file the proof comes first.

        Raises:
            UsageError: if something else took the name meanwhile.
        """
        if os.path.lexists(self.place):
            raise UsageError(_refused("SR-CONVERT-EXISTS", "something was put there meanwhile", self.place))
        self.journal.stage("committing")
        if self.single_file:
            os.replace(self.folder / _PROOF, proof_beside(self.place))
            flush_directory(self.place.parent)
        os.rename(self.payload, self.place)
        flush_directory(self.place.parent)
        self.discard()

    def discard(self) -> None:
        """Removes everything that was built and lies under the temporary name."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Lets go of the directory; what was built stays for another attempt."""
        self.journal.close()


def open_partial(
    place: Path,
    source: Path | str,
    source_fingerprint: str,
    plan_hash: str,
    *,
    files: Collection[str],
    single_file: bool,
    boots: Collection[str] = (),
) -> Partial:
    """Opens the directory in which a destination is built, keeping what an equal attempt left, and nothing else.

    `files` are the relative paths that the plan writes: a directory with any other file in it is not kept. What other
    attempts for the same destination left is removed, unless one of them is still running. `boots` are the boot ids of
    other machines that take part: what was journalled there, under the same one, is kept too.

    Raises:
        UsageError: if another process is building this destination.
        OSError: if the directory cannot be made.
    """
    header = {
        "source": str(source),
        "fingerprint": source_fingerprint,
        "plan": plan_hash,
        "dest": str(place),
        "boot": boot_id(),
    }
    identity = hashlib.sha256(json.dumps([header[name] for name in ("source", "fingerprint", "plan")]).encode())
    folder = place.with_name(f"{_prefix(place)}{identity.hexdigest()[:12]}")
    notes = [_remove_stale(found) for found in leftovers(place) if found != folder]
    if os.path.lexists(folder) and not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise UsageError(_refused("SR-CONVERT-EXISTS", "the name for building it is taken by something else", folder))
    folder.mkdir(mode=0o700, exist_ok=True)
    if (lock := lock_folder(folder)) is None:
        raise UsageError(_busy(folder))
    _remove_meeting(meeting_place(place))
    partial = _take_up(place, folder, header, frozenset(files), {boot_id(), *boots}, single_file=single_file)
    partial.notes[:0] = notes
    partial.journal.hold(lock)
    if single_file and os.path.lexists(beside := proof_beside(place)) and not _is_proof(beside):
        partial.close()
        raise UsageError(_refused("SR-CONVERT-EXISTS", "something lies where its proof would be", beside))
    return partial


def _remove_meeting(folder: Path) -> None:
    """Removes the place where processes met that were killed, unless some meet there now."""
    if folder.is_dir() and not folder.is_symlink() and (lock := lock_folder(folder)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _other_journals(folder: Path) -> Iterator[tuple[Path, Done]]:
    """Yields the journals that other processes of a launch left or are writing."""
    for path in sorted(folder.glob(f"{_JOURNAL}-*")):
        if stat.S_ISREG(os.lstat(path).st_mode):
            yield path, read_journal(path)


def _take_up(
    place: Path,
    folder: Path,
    header: Mapping[str, Any],
    files: frozenset[str],
    boots: Collection[str],
    *,
    single_file: bool,
) -> Partial:
    """Keeps what is in `folder` if its journal is for the same work and something was done; otherwise empties it."""
    path = folder / _JOURNAL
    payload = folder / place.name
    try:
        done = read_journal(path)
    except OSError:
        done = Done()
    known = [Done()] if not _same(done, header, boots) else [done]
    others = list(_other_journals(folder))
    known += [found for _, found in others if _same(found, header, boots)]
    units = {number: segments for found in known for number, segments in found.units.items()}
    if units and _only_planned(payload, files, single_file=single_file):
        (folder / _PROOF).unlink(missing_ok=True)
        if not single_file:
            (payload / PROOF_NAME).unlink(missing_ok=True)
        journal = Journal(path, known[0].num_bytes)
        _keep_all(journal, header, known[0], units)
        for other, _ in others:
            other.unlink()
        return Partial(place, folder, journal, header, single_file, units)
    found = sorted(folder.iterdir())
    for item in found:
        _remove(item)
    journal = Journal(path)
    journal.start(header)
    notes = [_discarded(folder, "nothing in it could be used")] if payload in found else []
    return Partial(place, folder, journal, header, single_file, notes=notes)


def _same(done: Done, header: Mapping[str, Any], boots: Collection[str]) -> bool:
    """Whether a journal is for the same work, on a machine that still runs as it did then."""
    known = {**header, "boot": done.header.get("boot")}
    return bool(done.units) and known["boot"] in boots and {**done.header, **known} == done.header


def _keep_all(journal: Journal, header: Mapping[str, Any], own: Done, units: Mapping[int, list[Segment]]) -> None:
    """Writes into one journal what others have said."""
    if not own.header:
        journal.start(header)
    for number, segments in units.items():
        if number not in own.units:
            journal.unit(number, segments)


def _only_planned(payload: Path, files: frozenset[str], *, single_file: bool) -> bool:
    """Whether all planned files are there, as ordinary files, and nothing else but the proof."""
    if single_file:
        return os.path.lexists(payload) and stat.S_ISREG(os.lstat(payload).st_mode)
    found: set[str] = set()
    for folder, folders, names in os.walk(payload):
        if any(os.path.islink(os.path.join(folder, name)) for name in (*folders, *names)):
            return False
        found.update(os.path.relpath(os.path.join(folder, name), payload) for name in names)
    return frozenset(found) - {PROOF_NAME} == files


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_stale(folder: Path) -> Problem:
    """Removes what another attempt for the same destination left. Never follows a link."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not _locked(lock):
            raise UsageError(_busy(folder))
        shutil.rmtree(folder)
    finally:
        os.close(lock)
    return _discarded(folder, "it was for another source, or another plan")


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: two conversions to one name are then the user's to avoid
        return True
    return True


def _quoted(text: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


def _is_proof(path: Path) -> bool:
    try:
        return str(json.loads(path.read_bytes()).get("schema", "")).startswith("samerun/convert-proof/")
    except (OSError, ValueError, AttributeError):
        return False


def _busy(folder: Path) -> Problem:
    return Problem(
        "SR-CONVERT-BUSY",
        "another process is building this destination",
        where={"file": str(folder)},
        hint="wait for it, or stop it; the next attempt goes on where it was",
    )


def _discarded(folder: Path, why: str) -> Problem:
    return Problem(
        "SR-CONVERT-STALE",
        f"what an earlier attempt left was removed: {why}",
        severity=Severity.NOTE,
        where={"file": str(folder)},
        hint="nothing of it went into this destination",
    )

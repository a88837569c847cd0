"""The files of a DCP directory: where each may lie, whether it is there, whole, and not left over from another save."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from samerun.errors import Problem, Severity
from samerun.formats.dcpfile.detect import RANK_METADATA
from samerun.formats.dcpfile.index import NOWHERE, Index, Ints

DATA_FILE = re.compile(r"__(\d+)_(\d+)\.distcp$")
_RESTORE = "restore the file from the source; nothing else holds these values"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file that the metadata names. `found_bytes` is None when it is not there or may not be read."""

    name: str
    path: Path
    found_bytes: int | None


def find_files(root: Path, index: Index) -> tuple[tuple[DataFile, ...], list[Problem]]:
    """Looks every file that the index names up below `root`, without opening any.

    A name that is absolute, climbs out of the directory, or leads out of it through a link is refused.
    """
    real_root = os.path.realpath(root)
    counts = np.bincount(index.places.file, minlength=len(index.files)).tolist()
    files: list[DataFile] = []
    problems: list[Problem] = []
    for name, count in zip(index.files, counts, strict=True):
        problem, found = _find_file(root, real_root, name, count)
        files.append(found)
        if problem is not None:
            problems.append(problem)
    return tuple(files), problems


def _find_file(root: Path, real_root: str, name: str, count: int) -> tuple[Problem | None, DataFile]:
    relative = PurePosixPath(name)
    path = root / name if not relative.is_absolute() else root / relative.name
    absent = DataFile(name, path, None)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name or not relative.parts:
        return _escapes(root, name, "the metadata points outside the checkpoint's directory"), absent
    try:
        found = os.stat(path)
        real = os.path.realpath(path)
    except (FileNotFoundError, NotADirectoryError):
        return _missing(root, path, count, "is not there"), absent
    except OSError as error:
        return _missing(root, path, count, f"cannot be reached: {error.strerror}"), absent
    if not real.startswith(real_root.rstrip("/") + "/"):
        return _escapes(root, name, "the file is a link that leads out of the checkpoint's directory"), absent
    if not stat.S_ISREG(found.st_mode):
        return _special(path), absent
    return None, DataFile(name, path, found.st_size)


def _escapes(root: Path, name: str, message: str) -> Problem:
    return Problem(
        "SR-FILE-ESCAPE",
        message,
        where={"file": str(root / ".metadata"), "names": name},
        hint="samerun does not follow it; put the data files beside the metadata, under the names it gives",
    )


def _missing(root: Path, path: Path, count: int, what: str) -> Problem:
    beside = _beside(root, path.name)
    gather = "If ranks wrote to disks of their own, gather every rank's files into one directory first"
    return Problem(
        "SR-FILE-MISSING",
        f"a file that the metadata names {what}: {count} items are lost",
        where={"file": str(path)},
        hint=f"a file of that name lies in {beside}: a save that was not moved into place?"
        if beside
        else f"{_RESTORE}. {gather}",
    )


def _beside(root: Path, name: str) -> str:
    """Returns a temporary-looking directory beside the checkpoint that holds a file of that name, or nothing."""
    stem = root.name.strip("._")
    try:
        with os.scandir(root.absolute().parent) as entries:
            folders = [entry.path for _, entry in zip(range(1_000), entries, strict=False) if stem in entry.name]
    except OSError:
        return ""
    return next((path for path in folders if path != str(root.absolute()) and os.path.isfile(f"{path}/{name}")), "")


def _special(path: Path) -> Problem:
    return Problem(
        "SR-FILE-SPECIAL",
        "this is not an ordinary file",
        where={"file": str(path)},
        hint="a checkpoint holds ordinary files only; copy it again from where it was written",
    )


def check_places(index: Index, files: tuple[DataFile, ...], smallest: Ints) -> tuple[list[Problem], Ints]:
    """Checks every item against the size of its file, its own content and its neighbours.

    `smallest` gives, by row, the fewest bytes that an item can have. Returns the findings and a mask (1 or 0 by row) of
    items that can be read.
    """
    places = index.places
    sizes = np.array([-1 if file.found_bytes is None else file.found_bytes for file in files] or [0], np.int64)
    held = sizes[places.file] if len(places) else np.empty(0, np.int64)
    stops = places.offset_bytes + places.length_bytes
    sane = (places.offset_bytes >= 0) & (places.length_bytes >= 0) & (stops >= 0)
    whole = (held >= 0) & sane & (stops <= held)
    problems: list[Problem] = []
    wanted = _wanted_bytes(len(files), places.file[sane], stops[sane])
    for number, file in enumerate(files):
        mine = places.file == number
        if file.found_bytes is not None and not bool(whole[mine].all()):
            other = _with_the_size_of(number, files, wanted)
            problems.append(_truncated(file, mine & ~whole & sane, stops, int((mine & ~whole).sum()), other))
    enough = places.length_bytes >= smallest
    if bool((whole & ~enough).any()):
        problems.extend(_too_short(index, files, np.flatnonzero(whole & ~enough)))
    problems.extend(_overlapping(index, files, whole))
    return problems, (whole & enough).astype(np.int64)


def _wanted_bytes(count: int, file_of: Ints, stops: Ints) -> list[int]:
    """Returns, by file, where the last of its items ends, which is the size with which it was written."""
    wanted = np.zeros(count, np.int64)
    np.maximum.at(wanted, file_of, stops)
    return wanted.tolist()


def _with_the_size_of(number: int, files: tuple[DataFile, ...], wanted: list[int]) -> DataFile | None:
    """Returns the one file that has the size which file `number` should have, and not the size of its own name."""
    fitting = [file for file, own in zip(files, wanted, strict=True) if file.found_bytes == wanted[number] != own]
    return fitting[0] if len(fitting) == 1 else None


def _truncated(file: DataFile, cut: np.ndarray, stops: Ints, count: int, other: DataFile | None) -> Problem:
    exchanged = (
        f"{other.path.name} has exactly that size, which is not its own: did files change names? Else restore this one"
        if other is not None
        else _RESTORE
    )
    needed = int(stops[cut].max()) if bool(cut.any()) else None
    return Problem(
        "SR-FILE-TRUNCATED",
        f"the file ends before {count} of the items that it should hold",
        where={"file": str(file.path)},
        expected=None if needed is None else f"at least {needed} bytes",
        found=f"{file.found_bytes} bytes",
        hint=exchanged,
    )


def _too_short(index: Index, files: tuple[DataFile, ...], rows: np.ndarray) -> list[Problem]:
    by_row = {int(row): tensor.name for tensor in index.tensors for row in tensor.rows.tolist() if row != NOWHERE}
    by_row |= {row: item.name for item in index.objects for row in item.rows}
    return [
        Problem(
            "SR-FILE-ITEM",
            f"the place given for {'this item' if len(rows) == 1 else f'this and {len(rows) - 1} other items'} is "
            "smaller than its values",
            where={"file": str(files[int(index.places.file[row])].path), "tensor": by_row.get(int(row), "")},
            found=f"{int(index.places.length_bytes[row])} bytes",
            hint="the metadata does not belong to these files, or was edited; restore both from the source",
        )
        for row in rows[:1].tolist()
    ]


def _overlapping(index: Index, files: tuple[DataFile, ...], whole: np.ndarray) -> list[Problem]:
    places = index.places
    rows = np.flatnonzero(whole & (places.length_bytes > 0))
    order = rows[np.lexsort((places.offset_bytes[rows], places.file[rows]))]
    if len(order) < 2:
        return []
    stops = places.offset_bytes[order] + places.length_bytes[order]
    same = places.file[order][1:] == places.file[order][:-1]
    clash = same & (places.offset_bytes[order][1:] < stops[:-1])
    return [
        Problem(
            "SR-FILE-OVERLAP",
            f"{int(clash.sum())} items share bytes with another item",
            where={"file": str(files[int(places.file[order[i]])].path), "byte": int(places.offset_bytes[order[i + 1]])},
            hint="DCP never writes this: the metadata was edited or belongs to another save",
        )
        for i in np.flatnonzero(clash)[:1].tolist()
    ]


def check_leftovers(root: Path, used: Iterable[str], metadata: Iterable[str]) -> list[Problem]:
    """Names data files and per-rank metadata in the directory that nothing refers to: stale, from another save."""
    known = {*used, *metadata}
    stale = sorted(
        name
        for name in os.listdir(root)
        if name not in known and (DATA_FILE.match(name) or RANK_METADATA.match(name) or name.endswith(".distcp"))
    )
    if not stale:
        return []
    shown = ", ".join(stale[:6]) + (f" and {len(stale) - 6} more" if len(stale) > 6 else "")
    return [
        Problem(
            "SR-FILE-STALE",
            f"{len(stale)} files belong to no tensor of this checkpoint: {shown}",
            severity=Severity.WARNING,
            where={"file": str(root / stale[0])},
            hint="an earlier save with more ranks, or another one, wrote here before; nothing reads these files",
        )
    ]


def ranks_of(names: Iterable[str]) -> tuple[int, ...]:
    """Returns the ranks that data files name themselves after, in order."""
    found = {int(match.group(1)) for name in names if (match := DATA_FILE.match(name.rpartition("/")[2]))}
    return tuple(sorted(found))

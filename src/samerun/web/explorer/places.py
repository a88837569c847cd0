"""What may be looked at: the paths that were named, what lies inside them, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from samerun.errors import FormatError, Problem, SamerunError, UsageError
from samerun.formats.detect import find_checkpoints, recognise
from samerun.stores.remote import is_url

MAX_FOLDERS = 2_000
"""Folders that are searched for run directories below each named path."""
_RUN_DEPTH = 3  # a demo or a move keeps its run directory that far down

Kind = Literal["checkpoint", "run", "unreadable"]


@dataclass(frozen=True, slots=True)
class Place:
    """Something to look at. `name` is `<number of the named path>/<path below it>`, as addresses have it."""

    name: str
    title: str
    kind: Kind
    path: Path | str
    about: str = ""
    """What it was recognised by, or why it cannot be read."""


class Places:
    """The named paths. Symbolic links are followed before anything is compared."""

    def __init__(self, named: Sequence[str | Path]) -> None:
        """Takes the paths as they were typed; URLs of object stores too.

        Raises:
            UsageError: SR-PATH-NONE if nothing lies at one of them.
        """
        self.named = [str(item) for item in named]
        self._roots = [None if is_url(item) else _require(item) for item in self.named]

    def find(self) -> list[Place]:
        """Returns every checkpoint and run directory inside the named paths, in the order in which they were named."""
        found: list[Place] = []
        for number, (text, root) in enumerate(zip(self.named, self._roots, strict=True)):
            if root is None:
                found.append(Place(str(number), text, "checkpoint", text, "an address"))
            else:
                found += _search(number, root)
        return found

    def resolve(self, name: str) -> Path | str:
        """Returns what a place's name means: a path inside what was named, or a named URL.

        Raises:
            UsageError: SR-UI-OUTSIDE if it leads outside, also over a symbolic link; SR-PATH-NONE if nothing is there.
        """
        number, _, below = name.partition("/")
        known = number.isascii() and number.isdigit() and int(number) < len(self._roots)
        root = self._roots[int(number)] if known else None
        if known and root is None and not below:
            return self.named[int(number)]
        if root is None or "\0" in name or PurePosixPath(below).is_absolute():
            raise UsageError(_outside(name))
        return confine(root, below)


def confine(root: Path, below: str) -> Path:
    """Returns `root/below` with links resolved. `root` is resolved already.

    Raises:
        UsageError: SR-UI-OUTSIDE if that is not inside `root`; SR-PATH-NONE if nothing is there.
    """
    try:
        found = (root / below).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a name that no file can have
        raise UsageError(_outside(below)) from error
    if not found.is_relative_to(root):
        raise UsageError(_outside(below))
    if not found.exists():
        raise UsageError(_nothing(below))
    return found


def _search(number: int, root: Path) -> Iterator[Place]:
    def place(path: Path, kind: Kind, about: str) -> Place:
        below = path.relative_to(root).as_posix()
        return Place(str(number) if below == "." else f"{number}/{below}", _title(root, path), kind, path, about)

    if is_run(root):
        yield place(root, "run", "")
    runs = sorted(path for path in _folders(root) if is_run(path)) if root.is_dir() else []
    for run in runs:
        yield place(run, "run", "")
    checkpoints = find_checkpoints(root)
    for path in checkpoints:
        if path.resolve().is_relative_to(root):
            yield place(path, "checkpoint", recognise(path) or "")
    if not checkpoints and not runs and not is_run(root):
        yield place(root, "unreadable", _why(root))
    for path in _folders(root, depth=1) if root.is_dir() else ():
        if not is_run(path) and (why := _unfinished(path)):
            yield place(path, "unreadable", why)


def is_run(path: Path) -> bool:
    """Returns whether a folder is a run directory."""
    return (path / "manifest.yaml").is_file() and (path / "stages").is_dir()


def _folders(root: Path, depth: int = _RUN_DEPTH) -> Iterator[Path]:
    """Yields the folders below `root`, links not followed, those of runs not entered."""
    level, seen = [root], 0
    for _ in range(depth):
        below: list[Path] = []
        for folder in level:
            try:
                with os.scandir(folder) as entries:
                    inside = sorted(Path(item.path) for item in entries if item.is_dir(follow_symlinks=False))
            except OSError:
                continue
            for path in inside:
                if (seen := seen + 1) > MAX_FOLDERS:
                    return
                yield path
                below.append(path)
        level = [path for path in below if not is_run(path)]


def _unfinished(folder: Path) -> str | None:
    """Returns why a folder with data files of a checkpoint is none, or None where there is nothing of that kind."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    if not any(name.endswith(".distcp") for name in names) or recognise(folder):
        return None
    return _why(folder)


def _why(path: Path) -> str:
    from samerun.formats.detect import open_checkpoint

    try:
        open_checkpoint(path).close()
    except SamerunError as error:
        return error.problems[0].message
    except OSError as error:
        return str(error.strerror)
    return ""


def _title(root: Path, path: Path) -> str:
    return path.name or str(path) if path == root else f"{root.name}/{path.relative_to(root).as_posix()}"


def _require(named: str) -> Path:
    """Returns the path with links resolved; refuses what is not there, and an empty name, as every verb does."""
    if not named or not os.path.lexists(named):
        from samerun.formats.detect import open_checkpoint

        open_checkpoint(named).close()
    found = Path(named).resolve()
    if not found.exists():
        raise FormatError(_nothing(named))
    return found


def _outside(name: str) -> Problem:
    return Problem(
        "SR-UI-OUTSIDE",
        "this path does not lie inside what was named on the command line",
        where={"file": name},
        hint="start `samerun ui` again with that path",
    )


def _nothing(name: str) -> Problem:
    return Problem(
        "SR-PATH-NONE",
        "there is nothing at this path",
        where={"file": name},
        hint="it may have been removed since the page was opened; go back to the list",
    )

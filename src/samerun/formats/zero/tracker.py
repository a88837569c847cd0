"""The `latest` file beside a checkpoint: whether it names a save that did not finish, and which others did."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from samerun.errors import Problem
from samerun.formats.zero.directory import read_directory

_UNFINISHED = ("SR-FILE-MISSING", "SR-FILE-TRUNCATED")
_MOST_TAGS = 1_000
_MOST_BYTES = 4_096


def check_tracker(root: Path, problems: Sequence[Problem]) -> list[Problem]:
    """Returns the finding that `latest` names this directory although files of it are missing or cut off."""
    if not any(problem.code in _UNFINISHED for problem in problems) or _named(root.parent) != root.name:
        return []
    complete = [name for name in _tags(root.parent) if name != root.name and is_whole(root.parent / name)]
    return [
        Problem(
            "SR-ZERO-LATEST",
            "`latest` names this directory, whose files are not all here",
            where={"file": str(root.parent / "latest")},
            expected="a save that finished",
            found=root.name,
            hint=f"directories beside it that have a file for every rank: {', '.join(complete[-5:])}"
            if complete
            else "no directory beside it has a file for every rank",
        )
    ]


def _named(parent: Path) -> str | None:
    path = parent / "latest"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


def _tags(parent: Path) -> list[str]:
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(names[:_MOST_TAGS], key=lambda name: (len(name), name))


def is_whole(root: Path) -> bool:
    """Whether a directory has, by names alone, a model file and an optimizer file for every rank up to the highest."""
    found = read_directory(root)
    held = {(name.mp, name.dp or 0) for name in found.optims}
    models = {name.mp for name in found.models}
    if not models or not held:
        return bool(models) and not found.optims
    ranks = range(max(dp for _, dp in held) + 1)
    return all((mp, dp) in held for mp in range(max(models) + 1) for dp in ranks)

"""Small files beside a model: torch.save files and JSON, each opened if it is there and a finding if it is damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from samerun.errors import FormatError, Problem, Severity
from samerun.formats.statedict.saved import SavedState, sort_tree
from samerun.formats.statedict.tree import Tree, open_file
from samerun.stores.local import MappedFiles

EXTRA = "extra_state.pt"
_MAX_JSON_BYTES = 1 << 28


def open_beside(file: Path, saved: SavedState, files: MappedFiles, *, known: bool = True) -> Tree | None:
    """Returns the value of a torch.save file or pickle, None (and a finding) if it cannot be decoded.

    With `known` false its classes are not reported: what a trainer pickles of its own configuration.
    """
    saved.files.append(file)
    try:
        bound = open_file(file, files)
    except FormatError as error:
        saved.problems += error.problems
        return None
    except OSError as error:
        saved.problems.append(_unreadable(file, str(error.strerror)))
        return None
    saved.problems += bound.problems
    if known:
        saved.unknown.update(bound.unknown)
    return bound.tree


def add_extra(folder: Path, saved: SavedState, files: MappedFiles) -> None:
    """Adds what samerun wrote beside the files that a framework knows: the state that none of them has a place for."""
    if (folder / EXTRA).is_file():
        tree = open_beside(folder / EXTRA, saved, files)
        if isinstance(tree, dict):
            for name, node in tree.items():
                sort_tree({name: node}, saved)


def read_json(file: Path, saved: SavedState) -> dict[str, Any]:
    """Returns a JSON file's mapping, empty (and a finding) if it is none."""
    saved.files.append(file)
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError("it is too large")
        value = json.loads(file.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it is no mapping")
        return value
    except OSError as error:
        saved.problems.append(_unreadable(file, str(error.strerror)))
    except (ValueError, RecursionError) as error:
        saved.problems.append(_unreadable(file, str(error)))
    return {}


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Returns the files or directories whose whole name matches `pattern`, by the number that its group 1 catches.

    A name without a number is number 0.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(pattern, path.name)
        if match and len(match.group(1) or "") < 10:
            found.setdefault(int(match.group(1) or 0), path)
    return dict(sorted(found.items()))


def check_ranks_of(found: dict[int, Path], what: str, world_size: int = 0) -> list[Problem]:
    """Checks that files numbered by rank leave none out of as many ranks as there were at least (`world_size`)."""
    missing = sorted(set(range(max(max(found, default=-1) + 1, world_size))) - found.keys()) if found else []
    if not missing:
        return []
    why = "of higher ranks it is" if missing[0] < max(found) else f"other files are of {world_size} ranks"
    return [
        Problem(
            "SR-RNG-LOST",
            f"{what} of rank {', '.join(map(str, missing))} is not here, {why}",
            severity=Severity.WARNING,
            where={"file": str(next(iter(found.values())).parent), "rank": missing[0]},
            hint="these ranks would draw other random numbers; gather every rank's file",
        )
    ]


def _unreadable(file: Path, why: str) -> Problem:
    return Problem(
        "SR-FILE-BESIDE",
        f"a file of the checkpoint cannot be read: {why}",
        where={"file": str(file)},
        hint="restore the file from the source",
    )

"""What the files of ranks hold, as far as telling their format needs it."""

from __future__ import annotations

from pathlib import Path

from samerun.errors import FormatError
from samerun.formats.statedict.geometry import find_distributed
from samerun.formats.statedict.rankfiles import find_rank_files
from samerun.formats.statedict.tree import Tree, open_file
from samerun.formats.torchfile.container import looks_like_torch_file
from samerun.stores.local import MappedFiles


def peek_ranks(path: Path) -> tuple[str, Tree] | None:
    """Returns what the rank files of a directory are called, and what the first that can be read holds.

    A single file counts as a rank's if it holds a distributed tensor. None if there are no rank files.
    """
    if path.is_file():
        tree = _peek(path)
        return (path.name, tree) if find_distributed(tree) is not None else None
    sets = find_rank_files(path)
    if not sets or len(sets[0].files) < 2:
        return None
    trees = (tree for file in sets[0].files.values() if (tree := _peek(file)) is not None)
    first = next(trees, None)
    return (f"{len(sets[0].files)} files {sets[0].pattern}", first) if first is not None else None


def _peek(file: Path) -> Tree | None:
    try:
        with open(file, "rb") as stream:
            if not looks_like_torch_file(stream.read(16)):
                return None
        return open_file(file, MappedFiles()).tree
    except (FormatError, OSError):
        return None

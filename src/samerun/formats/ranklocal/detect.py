"""Tells directories with one torch.save file per rank."""

from __future__ import annotations

from pathlib import Path

from samerun.formats.statedict.geometry import find_distributed
from samerun.formats.statedict.rankdetect import peek_ranks


def looks_like(path: Path) -> str | None:
    """Returns why a directory looks like one of rank files, or a file like a rank's, None if it does not."""
    peeked = peek_ranks(path)
    if peeked is None:
        return None
    what, tree = peeked
    return f"it holds {what}, {'with DTensors' if find_distributed(tree) is not None else 'one per rank'}"

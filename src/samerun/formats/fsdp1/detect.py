"""Tells FSDP1 state saved per rank: by ShardedTensors and flat parameters in the files."""

from __future__ import annotations

from pathlib import Path

from samerun.formats.statedict.flat import has_flat
from samerun.formats.statedict.geometry import find_distributed
from samerun.formats.statedict.rankdetect import peek_ranks


def looks_like(path: Path) -> str | None:
    """Returns why a directory, or one rank's file, looks like FSDP1's, None if it does not."""
    peeked = peek_ranks(path)
    if peeked is None:
        return None
    what, tree = peeked
    if has_flat(tree):
        return f"it holds {what} with flat parameters"
    found = find_distributed(tree)
    return (
        f"it holds {what} with ShardedTensors" if found is not None and found.name.endswith("ShardedTensor") else None
    )

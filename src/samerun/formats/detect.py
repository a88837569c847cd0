"""Opens whatever lies at a path: says what it is and why, follows trackers, and never guesses between several."""

from __future__ import annotations

import os
from pathlib import Path

from samerun.errors import FormatError, Problem, UsageError
from samerun.formats.base import Checkpoint
from samerun.formats.dcp.reader import metadata_files, open_dcp


def open_checkpoint(path: str | os.PathLike[str], format: str | None = None) -> Checkpoint:
    """Opens a checkpoint, read-only and lazily."""
    root = Path(path)
    if not root.is_dir() or not metadata_files(root):
        raise UsageError(Problem("SR-PATH-UNKNOWN", f"no checkpoint at {root}: looked for .metadata"))
    return open_dcp(root)

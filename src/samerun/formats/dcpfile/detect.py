"""Tells DCP directories by their metadata. Loads nothing of the reader: every checkpoint is looked at like this."""

from __future__ import annotations

import os
import re
from pathlib import Path

RANK_METADATA = re.compile(r"__(\d+)\.metadata$")


def metadata_files(root: Path) -> tuple[Path, ...]:
    """Returns the metadata of a DCP directory: `.metadata`, or every rank's own; empty if it is none."""
    whole = root / ".metadata"
    if os.path.lexists(whole):
        return (whole,)
    found = [(int(match.group(1)), name) for name in os.listdir(root) if (match := RANK_METADATA.match(name))]
    return tuple(root / name for _, name in sorted(found))

"""Tells torch.save files, and what kind of training state they hold."""

from __future__ import annotations

from pathlib import Path

from samerun.formats.torchfile.container import looks_like_torch_file
from samerun.formats.torchfile.legacy import is_legacy

_HEAD_BYTES = 512


def looks_like(path: Path) -> str | None:
    """Returns why a file looks like one that torch.save wrote, None if it does not."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if not looks_like_torch_file(head):
        return None
    if head[:2] == b"PK":
        return "it begins as torch.save's zip container does"
    return "it begins with the legacy torch.save magic number" if is_legacy(head) else "it begins as a pickle does"

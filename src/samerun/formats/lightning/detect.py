"""Tells Lightning checkpoints: by what the file holds, and in a directory by `meta.pt` beside DCP files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samerun.errors import FormatError
from samerun.formats.statedict.tree import open_file
from samerun.formats.torchfile.container import looks_like_torch_file
from samerun.stores.local import MappedFiles

META = "meta.pt"
VERSION = "pytorch-lightning_version"
_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")


def looks_like(path: Path) -> str | None:
    """Returns why a file or directory looks like a Lightning checkpoint, None if it does not."""
    if path.is_dir():
        sharded = (path / ".metadata").is_file() and (path / META).is_file() and _holds(path / META)
        return f"it holds DCP files and {META} of Lightning" if sharded else None
    if path.suffix in _SUFFIXES and path.is_file() and _holds(path):
        return "the file holds pytorch-lightning_version, state_dict and loops"
    return None


def _holds(file: Path) -> bool:
    with open(file, "rb") as stream:
        if not looks_like_torch_file(stream.read(16)):
            return False
    try:
        return is_lightning(open_file(file, MappedFiles()).tree)
    except FormatError:
        return False


def is_lightning(tree: Any) -> bool:
    """Whether a value that a file holds is a Lightning checkpoint's."""
    if not isinstance(tree, Mapping):
        return False
    return VERSION in tree or {"state_dict", "optimizer_states", "loops"} <= tree.keys()

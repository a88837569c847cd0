"""Tells Lightning checkpoints: by what the file holds, and in a directory by `meta.pt` beside DCP files."""

from __future__ import annotations

from pathlib import Path

from samerun.errors import FormatError
from samerun.formats.lightning.reader import META, is_lightning
from samerun.formats.statedict.tree import open_file
from samerun.formats.torchfile.container import looks_like_torch_file
from samerun.stores.local import MappedFiles

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

"""Tells safetensors files, and directories that hold nothing else that could be a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from samerun.formats.statedict.safefolder import INDEX_SUFFIX, find_weights

_USUAL = ("model.safetensors", "state.safetensors", "consolidated.safetensors")
_OF_SEVERAL = re.compile(r"^shard-\d{5}-|-\d{5}-of-\d{5}\.safetensors$")
_OTHER = (".pt", ".pth", ".ckpt", ".bin", ".pkl")


def looks_like(path: Path) -> str | None:
    """Returns why a file or directory looks like safetensors, None if it does not."""
    if path.is_file():
        if path.name.endswith(f".safetensors{INDEX_SUFFIX}"):
            return "it is an index of safetensors files"
        if path.suffix == ".safetensors":
            return "it is called .safetensors"
        return "it begins as a safetensors file does" if _begins(path) else None
    found = [name for name in find_weights(path) if ".safetensors" in name] if path.is_dir() else []
    indexes = [name for name in found if name.endswith(INDEX_SUFFIX)]
    if len(indexes) == 1:
        return f"it holds {indexes[0]}"
    others = any(entry.name.endswith(_OTHER) for entry in path.iterdir()) if found else False
    alone = len(found) == 1 and not others
    return f"it holds {found[0]}" if alone and (_OF_SEVERAL.search(found[0]) or found[0] in _USUAL) else None


def _begins(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(9)
    return len(head) == 9 and int.from_bytes(head[:8], "little") < path.stat().st_size and head[8:] == b"{"

"""Recognises directories of Megatron's distributed checkpointing by the names in them."""

from __future__ import annotations

import re
from pathlib import Path

_ITERATION = re.compile(r"iter_\d{7,}|release")
_TRACKER = "latest_checkpointed_iteration.txt"


def looks_like(path: Path) -> str | None:
    """Returns why a directory looks like a Megatron distributed checkpoint, None if it does not.

    A directory whose `.metadata` is gone is still one: opening it says what is missing.
    """
    if not path.is_dir():
        return None
    marks = [name for name in ("metadata.json", "common.pt") if (path / name).exists()]
    if marks and "common.pt" in marks:
        return f"it holds {' and '.join(marks)}" if _has_data(path) else None
    if not (path / ".metadata").exists():
        return None
    if marks and _names_backend(path / "metadata.json"):
        return "it holds .metadata and a metadata.json that names a backend"
    if not marks and _ITERATION.fullmatch(path.name) and (path.parent / _TRACKER).exists():
        return f"it holds .metadata and lies beside {_TRACKER}"
    return None


def _has_data(path: Path) -> bool:
    return (path / ".metadata").exists() or any(path.glob("*.distcp"))


def _names_backend(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b"sharded_backend" in file.read(4_096)
    except OSError:
        return False

"""Recognises directories of one torch.save file per model-parallel rank by the names in them."""

from __future__ import annotations

import os
import re
from pathlib import Path

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MOST_ENTRIES = 100_000


def looks_like(path: Path) -> str | None:
    """Returns why a directory looks like a Megatron checkpoint of one file per rank, None if it does not."""
    if not path.is_dir():
        return None
    found = rank_folders(path)
    for name in sorted(found):
        for file in (MODEL_FILE, OPTIMIZER_FILE):
            if (path / name / file).is_file():
                return f"it holds {name}/{file}"
    return None


def rank_folders(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the folders that are named after model-parallel ranks, with the numbers in their names."""
    with os.scandir(path) as entries:
        names = [entry.name for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False) if entry.is_dir()]
    matched = ((name, RANK_FOLDER.fullmatch(name)) for name in names)
    return {name: tuple(int(part) for part in match.groups() if part) for name, match in matched if match}

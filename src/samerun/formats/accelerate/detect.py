"""Tells directories that Accelerate's `save_state` wrote by the names of its files."""

from __future__ import annotations

import re
from pathlib import Path

from samerun.formats.statedict.fsdpfiles import is_fsdp_rank_file

_RANDOM = re.compile(r"random_states_\d+\.pkl")
_OPTIMIZER = re.compile(r"optimizer(?:_\d+)?\.bin|optimizer_\d+(?:_rank\d+\.bin)?")
_MODEL = re.compile(
    r"(?:model|pytorch_model|pytorch_model_fsdp)(?:_\d+)?(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)(?:\.index\.json)?|"
    r"pytorch_model(?:_fsdp_\d+)?"
)


def looks_like(path: Path) -> str | None:
    """Returns why a directory looks like one of `save_state`, None if it does not."""
    if not path.is_dir():
        return None
    names = sorted(entry.name for entry in path.iterdir())
    random = next((name for name in names if _RANDOM.fullmatch(name)), None)
    if random is not None:
        return f"it holds {random}"
    optimizer = next((name for name in names if _OPTIMIZER.fullmatch(name)), None)
    model = next((name for name in names if _MODEL.fullmatch(name) or is_fsdp_rank_file(name)), None)
    return f"it holds {optimizer} and {model}" if optimizer and model else None

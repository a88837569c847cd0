"""Tells Hugging Face checkpoints by the names that transformers gives its files."""

from __future__ import annotations

import re
from pathlib import Path

from samerun.formats.statedict.sidefiles import EXTRA

_WEIGHTS = re.compile(
    r"(?:model|pytorch_model|adapter_model)(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)(?:\.index\.json)?"
)
_RANDOM = re.compile(r"rng_state(?:_\d+)?\.pth")


def looks_like(path: Path) -> str | None:
    """Returns why a directory looks like a Trainer checkpoint or an export, None if it does not."""
    if not path.is_dir():
        return None
    names = {entry.name for entry in path.iterdir()}
    if "trainer_state.json" in names:
        return "it holds trainer_state.json"
    weights = sorted(name for name in names if _WEIGHTS.fullmatch(name))
    if {"optimizer.pt", "scheduler.pt"} <= names and (weights or any(map(_RANDOM.fullmatch, names))):
        return "it holds optimizer.pt and scheduler.pt as Trainer writes them"
    others = any(name.startswith("random_states_") or name == "optimizer.bin" for name in names)
    if weights and not others and names & {"optimizer.pt", EXTRA}:
        return f"it holds {weights[0]} and {min(names & {'optimizer.pt', EXTRA})}"
    if "adapter_config.json" in names and any(name.startswith("adapter_model.") for name in weights) and not others:
        return "it holds adapter_config.json and its weights"
    if "config.json" in names and weights and not any(name.startswith("random_states_") for name in names):
        return f"it holds config.json and {weights[0]}"
    return None

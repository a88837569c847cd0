"""What Accelerate's `save_state` writes beside model and optimizer, also in directories that Trainer reads as well.

Samplers and loaders (`sampler.bin`, `dl_state_dict.bin`), and what a script gave to `register_for_checkpointing`
(`custom_checkpoint_N.pkl`): `load_state` counts these files and stops unless there is one for each registered object.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samerun.formats.statedict.recognise import is_averaged_model, is_state_dict
from samerun.formats.statedict.saved import SavedState, sort_tree
from samerun.formats.statedict.sidefiles import numbered, open_beside
from samerun.stores.local import MappedFiles

POSITION = frozenset({"last_epoch", "_step_count", "lr_lambdas"})
"""What a `scheduler.pt` holds that samerun made of a count of updates: the schedule is the job's own, or lies in
`extra_state.pt`."""


def add_registered(path: Path, saved: SavedState, files: MappedFiles) -> None:
    """Adds the states of samplers, loaders and registered objects, each under the name of its file."""
    for stem in ("sampler", "dl_state_dict"):
        for number, file in numbered(path, rf"{stem}(?:_(\d+))?\.bin").items():
            saved.data[numbered_name(stem, number)] = open_beside(file, saved, files)
    for number, file in numbered(path, r"custom_checkpoint_(\d+)\.pkl").items():
        tree = open_beside(file, saved, files)
        if is_state_dict(tree) and not is_averaged_model(tree):
            saved.objects[f"custom_checkpoint_{number}"] = tree
        else:
            sort_tree(tree, saved, f"custom_checkpoint_{number}")


def settle_schedulers(saved: SavedState) -> None:
    """Takes out schedulers that are there twice, or are no more than a position that samerun wrote.

    A registered scheduler is written for Trainer as well, as `scheduler.pt`; its own name is kept.
    """
    kept: list[tuple[str, Any]] = []
    for name, tree in sorted(saved.schedulers, key=lambda item: not item[0].startswith("custom_checkpoint")):
        if isinstance(tree, Mapping) and (frozenset(tree) == POSITION or any(tree == other for _, other in kept)):
            continue
        kept.append((name, tree))
    saved.schedulers = kept


def numbered_name(stem: str, number: int) -> str:
    """Returns the name of the file of that number, the first of which has none."""
    return f"{stem}_{number}" if number else stem

"""Opens one torch.save file as logical state."""

from __future__ import annotations

from pathlib import Path

from samerun.formats.statedict.assemble import assemble
from samerun.formats.statedict.checkpoint import StateDictCheckpoint
from samerun.formats.statedict.saved import SavedState, sort_tree
from samerun.formats.statedict.tree import open_file
from samerun.stores.local import MappedFiles


def open_torch(path: Path) -> StateDictCheckpoint:
    """Opens a file. Reads its pickle and small objects; tensors stay on disk.

    Raises:
        CorruptCheckpoint, UnsupportedVersion: if it cannot be decoded at all. Anything less is a finding of the state.
    """
    files = MappedFiles()
    bound = open_file(path, files)
    saved = SavedState(files=[path], unknown=set(bound.unknown), problems=list(bound.problems))
    saved.written_by["format"] = f"torch.save ({bound.container})"
    sort_tree(bound.tree, saved)
    return assemble(path, "torch", saved, files)

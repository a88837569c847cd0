"""Opens a Megatron checkpoint of one file per model-parallel rank as logical state and reads its values."""

from __future__ import annotations

from pathlib import Path

from samerun.errors import Problem
from samerun.formats.mcore.held import HeldCheckpoint, Storage
from samerun.formats.megatron_legacy.assemble import Assembled, assemble
from samerun.formats.megatron_legacy.source import read_source
from samerun.stores.local import MappedFiles


def open_megatron_legacy(path: Path) -> LegacyCheckpoint:
    """Opens the directory of one iteration (`iter_0000010`). Tensors stay on disk.

    What is missing or damaged is a finding of the state, and the rest is read.
    """
    return LegacyCheckpoint(path, assemble(read_source(path, MappedFiles())))


class LegacyCheckpoint(HeldCheckpoint):
    """A Megatron checkpoint of one file per rank. See `samerun.formats.base.Checkpoint`."""

    def __init__(self, path: Path, assembled: Assembled) -> None:
        storage = Storage(assembled.source.files)
        super().__init__(path, assembled.state, assembled.placed, assembled.constants, storage, assembled.replicas)
        self.assembled = assembled

    @property
    def num_files(self) -> int:
        """Files that could be opened."""
        return len(self.assembled.source.opened())

    def check_items(self, limit: int | None = None) -> list[Problem]:
        """Nothing beyond what opening checked already: every file's pickle was read then."""
        return []

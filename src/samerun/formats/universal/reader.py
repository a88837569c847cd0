"""Opens a DeepSpeed universal checkpoint as logical state and reads its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from samerun.core.mesh import Layout
from samerun.errors import Problem
from samerun.formats.base import PayloadCheck
from samerun.formats.placement import PlacedCheckpoint
from samerun.formats.universal.assemble import Assembled, assemble
from samerun.formats.universal.checks import check_assembled, check_destination, check_values
from samerun.formats.universal.source import FOLDER, looks_like, read_source
from samerun.stores.local import MappedFiles


def open_universal(path: Path) -> UniversalCheckpoint:
    """Opens the directory that holds `zero/` and the model files. Tensors stay on disk."""
    files = MappedFiles()
    recognised = looks_like(path) or f"it holds {FOLDER}/"
    return UniversalCheckpoint(path, assemble(read_source(path, files), recognised), files)


class UniversalCheckpoint(PlacedCheckpoint):
    """A universal checkpoint. See `samerun.formats.base.Checkpoint`."""

    def __init__(self, path: Path, assembled: Assembled, files: MappedFiles) -> None:
        super().__init__(path, assembled.state, assembled.placements, assembled.constants, files)
        self.assembled = assembled
        self.state = replace(assembled.state, problems=(*assembled.state.problems, *check_assembled(self, assembled)))

    @property
    def num_files(self) -> int:
        """State files that could be opened."""
        return len(self.assembled.source.state_files())

    def check_items(self, limit: int | None = None) -> list[Problem]:
        """Nothing beyond what opening checked already: every file's pickle was read then."""
        return []

    def check_payloads(self, advance: Callable[[int], None] | None = None) -> PayloadCheck:
        """Reads every byte: checksums, and what only values show. See `samerun.formats.universal.checks`."""
        return check_values(self, self.assembled, advance)

    def check_destination(self, destination: Layout) -> list[Problem]:
        """Returns why DeepSpeed would not load the checkpoint at another layout; nothing if it would."""
        return check_destination(self.assembled.source, destination)

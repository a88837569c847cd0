"""Opens a native DeepSpeed checkpoint directory as logical state and reads its values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from samerun.core.mesh import Layout
from samerun.errors import Problem
from samerun.formats.base import PayloadCheck
from samerun.formats.placement import PlacedCheckpoint
from samerun.formats.zero.assemble import Assembled, assemble
from samerun.formats.zero.deep import check_values
from samerun.formats.zero.loadable import check_destination
from samerun.formats.zero.source import read_source
from samerun.stores.local import MappedFiles


def open_zero(path: Path) -> ZeroCheckpoint:
    """Opens the directory of one tag (`global_step5`). Tensors stay on disk.

    What is missing or damaged is a finding of the state, and the rest is read.
    """
    files = MappedFiles()
    return ZeroCheckpoint(path, assemble(read_source(path, files)), files)


class ZeroCheckpoint(PlacedCheckpoint):
    """A native DeepSpeed checkpoint. See `samerun.formats.base.Checkpoint`."""

    def __init__(self, path: Path, assembled: Assembled, files: MappedFiles) -> None:
        super().__init__(path, assembled.state, assembled.placements, assembled.constants, files)
        self.assembled = assembled

    @property
    def num_files(self) -> int:
        """State files that could be opened."""
        return len(self.assembled.source.state_files())

    def check_items(self, limit: int | None = None) -> list[Problem]:
        """Nothing beyond what opening checked already: every file's pickle was read then."""
        return []

    def check_payloads(self, advance: Callable[[int], None] | None = None) -> PayloadCheck:
        """Reads every byte: checksums, and what only values show. See `samerun.formats.zero.deep`."""
        return check_values(self, self.assembled, advance)

    def check_destination(self, destination: Layout) -> list[Problem]:
        """Returns why DeepSpeed itself would not load the checkpoint at another layout; nothing if it would."""
        return check_destination(self.assembled.source, destination)

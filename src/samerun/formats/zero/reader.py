"""Opens a native DeepSpeed checkpoint directory as logical state and reads its values."""

from __future__ import annotations

from pathlib import Path

from samerun.formats.placement import PlacedCheckpoint
from samerun.formats.zero.assemble import Assembled, assemble
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

"""Opens a Megatron checkpoint of one file per model-parallel rank as logical state and reads its values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from samerun.core.mesh import Layout
from samerun.errors import Problem, has_errors
from samerun.formats.base import PayloadCheck
from samerun.formats.deepspeed.values import check_checksums
from samerun.formats.mcore.destination import check_legacy
from samerun.formats.mcore.held import HeldCheckpoint, Storage
from samerun.formats.mcore.values import check_masters, check_replicas
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

    def check_payloads(self, advance: Callable[[int], None] | None = None) -> PayloadCheck:
        """Reads every byte: checksums, copies that must be equal, masters against weights."""
        source = self.assembled.source
        opened = source.opened()
        broken = check_checksums(opened, source.files, advance)
        problems = [*broken, *check_replicas(self), *check_masters(self)]
        count = sum(len(file.archive.records) for file in opened)
        intact = False if broken else None if problems or has_errors(source.problems) else True
        return PayloadCheck(count, count, intact, tuple(problems))

    def check_destination(self, destination: Layout) -> list[Problem]:
        """Returns why Megatron itself would not load the checkpoint at another layout; nothing if it would."""
        source = self.assembled.source
        sharded = any(rank.flat is not None for rank in source.ranks.values())
        return check_legacy(source.run, sharded=sharded, destination=destination, root=source.root)

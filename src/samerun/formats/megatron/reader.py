"""Opens a Megatron distributed checkpoint (torch_dist) as logical state and reads its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from samerun.core.mesh import Layout
from samerun.errors import Problem
from samerun.formats.base import PayloadCheck
from samerun.formats.dcpfile.evidence import check_items, check_object_payloads, check_payloads
from samerun.formats.mcore.destination import check_distributed
from samerun.formats.mcore.held import HeldCheckpoint, Storage
from samerun.formats.mcore.values import check_masters, check_replicas
from samerun.formats.megatron.assemble import Assembled, assemble
from samerun.formats.megatron.source import read_source
from samerun.stores.local import MappedFiles


def open_megatron(path: Path) -> MegatronCheckpoint:
    """Opens the directory of one iteration (`iter_0000010`). Tensors stay on disk.

    Raises:
        CorruptCheckpoint: if `.metadata` is missing or cannot be used at all. Anything less is a finding of the state.
    """
    files = MappedFiles()
    return MegatronCheckpoint(path, assemble(read_source(path, files)))


class MegatronCheckpoint(HeldCheckpoint):
    """A Megatron distributed checkpoint. See `samerun.formats.base.Checkpoint`."""

    def __init__(self, path: Path, assembled: Assembled) -> None:
        source = assembled.source
        storage = Storage(source.files, source.items)
        super().__init__(path, assembled.state, assembled.placed, assembled.constants, storage, assembled.replicas)
        self.assembled = assembled

    @property
    def num_files(self) -> int:
        """Metadata, common state and data files that are there."""
        source = self.assembled.source
        beside = sum((self.path / name).exists() for name in ("common.pt", "metadata.json"))
        return len(source.metadata) + beside + sum(file.found_bytes is not None for file in source.items.files)

    def check_items(self, limit: int | None = None) -> list[Problem]:
        """Checks the archive of every item, at most `limit` spread over all. See `Inspectable.check_items`."""
        source = self.assembled.source
        return check_items(source.index, source.items, limit)

    def check_payloads(self, advance: Callable[[int], None] | None = None) -> PayloadCheck:
        """Reads every payload: checksums, copies that must be equal, masters against weights."""
        source = self.assembled.source
        found = check_payloads(source.index, source.items, advance)
        objects = check_object_payloads(source.index, source.items)
        problems = (*found.problems, *objects, *check_replicas(self), *check_masters(self))
        return replace(found, intact=False if objects else found.intact, problems=problems)

    def check_destination(self, destination: Layout) -> list[Problem]:
        """Returns why Megatron itself would not load the checkpoint at another layout; nothing if it would."""
        source = self.assembled.source
        return check_distributed(source.run, self.assembled.optimizer.encodings, destination, source.root)

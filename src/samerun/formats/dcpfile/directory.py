"""Lays out the data files and the `.metadata` of a `torch.distributed.checkpoint` directory, whatever its items mean.

Tensors that are sharded are cut along their first dimension as FSDP2 cuts them (`torch.chunk`), others are whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import Role, TensorEntry
from samerun.core.written import FilePlan
from samerun.errors import PlanError, Problem
from samerun.formats.dcpfile.metadata import Chunk, Stored, emit_metadata
from samerun.formats.torchfile.nodes import Tensor
from samerun.formats.torchfile.write import ALIGNMENT, Pieces, add_archive, add_tensor

Path = tuple[str | int, ...]


class Directory:
    """Files as they fill up. Of the ranks that would hold a shard, the one whose file is smallest so far gets it.

    `folder` is where in the destination the directory lies, with a slash at its end, or nothing.
    """

    def __init__(self, layout: Layout, folder: str = "") -> None:
        self._folder = folder
        self._shards = layout.dp_shard * layout.cp
        self._holders: list[list[int]] = [[] for _ in range(self._shards)]
        for rank in range(layout.world_size):
            place = layout.coordinate(rank)
            self._holders[place["dp_shard"] * layout.cp + place["cp"]].append(rank)
        self._files = [Pieces() for _ in range(layout.world_size)]
        self._items: dict[str, Stored] = {}
        self._dealt = -1

    def add_object(self, path: Path, value: Any) -> None:
        """Adds an object, to the first rank's file."""
        self._add(Stored(path, [self._write(0, value, (), ())]))

    def add_known(self, path: Path, tensor: Tensor) -> None:
        """Adds a tensor that lies in no file of the source, such as the state of a generator."""
        origin = (0,) * len(tensor.shape)
        chunk = self._write(self._lightest(range(len(self._files))), tensor, origin, tensor.shape)
        self._add(Stored(path, [chunk], tensor.shape, tensor.storage.dtype))

    def add_tensor(self, path: Path, entry: TensorEntry) -> None:
        """Adds a tensor of the state, in chunks.

        Raises:
            PlanError: if there is an item of that name.
        """
        chunks: list[Chunk] = []
        for holders, offsets, sizes in self._cut(entry):
            rank = self._lightest(holders) if entry.shape else self._next()
            start = self._begin(rank)
            add_tensor(self._files[rank], str(entry.key), entry.dtype, offsets, sizes)
            chunks.append(self._chunk(rank, start, offsets, sizes))
        self._add(Stored(path, chunks, entry.shape, entry.dtype))

    def _cut(self, entry: TensorEntry) -> Iterator[tuple[list[int], tuple[int, ...], tuple[int, ...]]]:
        """Yields (ranks that hold it, offsets, sizes) of each chunk. No chunk is empty unless the tensor is."""
        shape, everyone = entry.shape, list(range(len(self._files)))
        if not shape or entry.key.role is Role.BUFFER or 0 in shape:
            yield everyone, (0,) * len(shape), shape
            return
        rows = -(-shape[0] // self._shards)
        for shard, start in enumerate(range(0, shape[0], rows)):
            count = min(rows, shape[0] - start)
            yield self._holders[shard], (start, *(0,) * (len(shape) - 1)), (count, *shape[1:])

    def _lightest(self, ranks: Any) -> int:
        return min(ranks, key=lambda rank: (self._files[rank].position, rank))

    def _next(self) -> int:
        """Deals scalars to all ranks in turn: every file then holds some counters, which tell saves apart."""
        self._dealt += 1
        return self._dealt % len(self._files)

    def _write(self, rank: int, value: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        start = self._begin(rank)
        add_archive(self._files[rank], value)
        return self._chunk(rank, start, offsets, sizes)

    def _begin(self, rank: int) -> int:
        """Aligns the next item, so that what is aligned inside it is so in the file and can be mapped."""
        pieces = self._files[rank]
        pieces.fill(-pieces.position % ALIGNMENT)
        return pieces.position

    def _chunk(self, rank: int, start: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        return Chunk(offsets, sizes, _file_name(rank), start, self._files[rank].position - start)

    def _add(self, item: Stored) -> None:
        if item.name in self._items:
            raise PlanError(_twice(item.name))
        self._items[item.name] = item

    @property
    def written(self) -> list[Pieces]:
        """The files that hold anything, by rank."""
        return [pieces for pieces in self._files if pieces.position]

    def finish(self) -> tuple[FilePlan, ...]:
        """Returns the data files, and the metadata as the last one: until it is there, the directory is none."""
        data = [
            pieces.file(self._folder + _file_name(rank)) for rank, pieces in enumerate(self._files) if pieces.position
        ]
        metadata = Pieces()
        metadata.write(emit_metadata(list(self._items.values())))
        return (*data, metadata.file(self._folder + ".metadata"))


def _twice(name: str) -> Problem:
    return Problem(
        "SR-WRITE-TWICE",
        f"two values of the source would both be called {name}",
        where={"key": name},
        hint="an object of the source has the name of a tensor; rename one of them with --map",
    )


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"

"""The items inside `.distcp` files: each a small torch.save archive holding one chunk of a tensor, or one object."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

from samerun.core.state import Role, TensorEntry, TensorKey
from samerun.errors import CorruptCheckpoint, Problem, UnsupportedVersion
from samerun.formats.base import Array, Extent, assemble_box, view_extent
from samerun.formats.dcpfile.files import DataFile
from samerun.formats.dcpfile.index import NOWHERE, Index, Ints, StoredTensor
from samerun.formats.dcpfile.packed import find_zstd, is_zstd, largest_item_bytes, unpack
from samerun.formats.torchfile.archive import Archive, checksum_problem, read_archive, read_value
from samerun.formats.torchfile.unpickle import Decoded
from samerun.formats.torchfile.values import TensorRef
from samerun.stores.crc32 import crc32
from samerun.stores.local import MappedFiles

_KEPT_EXTENTS = 65_536


class Items:
    """Reads items of one directory by row of its index. Nothing is read before it is asked for."""

    def __init__(self, index: Index, files: tuple[DataFile, ...], readable: Ints, maps: MappedFiles) -> None:
        self.index = index
        self.files = files
        self._readable = readable
        self._maps = maps
        self._extents: OrderedDict[int, Extent] = OrderedDict()
        self._zstd = find_zstd() if any(map(is_zstd, index.transforms.values())) else None

    def readable(self, row: int) -> bool:
        """Whether the item's file is there and long enough for it."""
        return row != NOWHERE and bool(self._readable[row]) and self.unpacks(row)

    def unpacks(self, row: int) -> bool:
        """Whether an item's bytes are as torch.save left them, or were changed in a way that can be undone here."""
        transforms = self.index.transforms.get(row)
        return transforms is None or (self._zstd is not None and is_zstd(transforms))

    def archive(self, row: int, name: str, value_bytes: int | None = None) -> Archive:
        """Returns an item's archive directory. `value_bytes` are those of a tensor, which bound what is unpacked.

        Raises:
            CorruptCheckpoint: if its file is missing or too short, or it is no consistent archive.
        """
        if row == NOWHERE:
            raise CorruptCheckpoint(no_place(name))
        file = self.files[int(self.index.places.file[row])]
        if not self.unpacks(row):
            raise UnsupportedVersion(transformed(file.path, name, self.index.transforms[row]))
        if not self._readable[row]:
            raise CorruptCheckpoint(_unreadable(file, name))
        start, length = int(self.index.places.offset_bytes[row]), int(self.index.places.length_bytes[row])
        if row not in self.index.transforms:
            return read_archive(self._maps.map(file.path), file.path, start, length)
        unpacked = Path(f"{file.path}@{start}")
        self._maps.lend(unpacked, lambda: self._unpack(file, start, length, name, value_bytes))
        return read_archive(self._maps.map(unpacked), unpacked)

    def _unpack(self, file: DataFile, start: int, length: int, name: str, value_bytes: int | None) -> bytes:
        packed = self._maps.range(file.path, start, start + length)
        found = unpack(self._zstd, packed, largest_item_bytes(value_bytes)) if self._zstd is not None else None
        if found is None:
            raise CorruptCheckpoint(_badly_packed(file.path, name))
        return found

    def value(self, row: int, name: str) -> Decoded:
        """Decodes an object after checking its checksum; tensors inside come back as arrays.

        Raises:
            CorruptCheckpoint: as `archive` does, or if the pickle is damaged or hostile.
        """
        archive = self.archive(row, name)
        decoded = read_value(self._maps.map(archive.file), archive, name)
        return Decoded(self._arrays(decoded.value, archive), decoded.unknown)

    def _arrays(self, value: Any, archive: Archive) -> Any:
        if isinstance(value, TensorRef):
            extent = archive.extent(value)
            if extent.num_bytes > extent.storage_bytes:
                raise CorruptCheckpoint(_expanded(archive.file, value))
            return view_extent(self._maps, extent).copy()
        if isinstance(value, dict):
            return {key: self._arrays(item, archive) for key, item in value.items()}
        return [self._arrays(item, archive) for item in value] if isinstance(value, list) else value

    def extent(self, tensor: StoredTensor, piece: int) -> Extent:
        """Returns where the values of one chunk of a tensor lie.

        Raises:
            CorruptCheckpoint: if the item is not readable or does not hold a chunk of that shape and type.
        """
        row = int(tensor.rows[piece])
        known = self._extents.get(row)
        if known is not None:
            return known
        extent = self._find_extent(tensor, piece, row)
        self._extents[row] = extent
        if len(self._extents) > _KEPT_EXTENTS:
            self._extents.popitem(last=False)
        return extent

    def _find_extent(self, tensor: StoredTensor, piece: int, row: int) -> Extent:
        shape = tuple(tensor.tiling.sizes[piece].tolist())
        if row == NOWHERE and math.prod(shape) == 0:
            return Extent(Path(), 0, tensor.dtype, shape, tuple(0 for _ in shape))
        archive = self.archive(row, tensor.name, math.prod(shape) * tensor.dtype.num_bytes)
        found = read_value(self._maps.map(archive.file), archive, tensor.name).value
        if not isinstance(found, TensorRef) or (found.shape, found.dtype) != (shape, tensor.dtype):
            raise CorruptCheckpoint(_mismatch(archive.file, tensor, shape, found))
        return archive.extent(found)

    def view(self, tensor: StoredTensor, piece: int) -> Array:
        """Returns the values of one chunk, a read-only view of its file."""
        return view_extent(self._maps, self.extent(tensor, piece))

    def assemble(self, tensor: StoredTensor) -> Array:
        """Returns a whole tensor, put together from its chunks."""
        entry = TensorEntry(TensorKey(Role.BUFFER, tensor.name), tensor.shape, tensor.dtype, tensor.tiling, tensor.name)
        return assemble_box(entry, lambda piece: self.view(tensor, piece))

    def check_archive(self, row: int, name: str) -> list[Problem]:
        """Compares every payload of one item with the checksum that its archive records, reading it."""
        archive = self.archive(row, name)

        def found_crc32(start: int, size: int) -> int:
            return crc32(self._maps.range(archive.file, start, start + size))

        return [
            checksum_problem(archive.file, f"{name} ({part})", record.crc32, found)
            for part, record in archive.records.items()
            if record.crc32 is not None
            and part.startswith("data/")
            and (found := found_crc32(record.offset_bytes, record.num_bytes)) != record.crc32
        ]

    def checksum(self, extent: Extent) -> int:
        """Computes the CRC-32 of the storage that holds a piece, reading it."""
        stop = extent.storage_offset_bytes + extent.storage_bytes
        return crc32(self._maps.range(extent.file, extent.storage_offset_bytes, stop))


def no_place(name: str) -> Problem:
    """Returns the finding for an item that the metadata lists without saying where it lies."""
    return Problem(
        "SR-FILE-NOPLACE",
        "the metadata lists this but does not say in which file it lies",
        where={"tensor": name},
        hint="the save did not finish or its metadata was edited; use another checkpoint",
    )


def transformed(file: Path, name: str, transforms: tuple[str, ...]) -> Problem:
    """Returns the finding for an item whose bytes were compressed or otherwise changed on the way to disk."""
    return Problem(
        "SR-FILE-TRANSFORM",
        f"the bytes were written through {', '.join(transforms)}, which cannot be undone here",
        where={"file": str(file), "tensor": name},
        hint="install zstandard (pip install samerun[zstd])"
        if is_zstd(transforms)
        else "load it with torch and save it again without that extension",
    )


def _badly_packed(file: Path, name: str) -> Problem:
    return Problem(
        "SR-FILE-PACKED",
        "the compressed bytes cannot be unpacked, or hold more than this item can",
        where={"file": str(file), "tensor": name},
        hint="the file is damaged; restore it from the source",
    )


def _unreadable(file: DataFile, name: str) -> Problem:
    there = file.found_bytes is not None
    return Problem(
        "SR-FILE-TRUNCATED" if there else "SR-FILE-MISSING",
        "the file is too short for this item" if there else "the file that holds this is not there",
        where={"file": str(file.path), "tensor": name},
        hint="restore the file from the source",
    )


def _expanded(file: Path, tensor: TensorRef) -> Problem:
    return Problem(
        "SR-PKL-HOSTILE",
        f"a tensor of shape {list(tensor.shape)} repeats the few values of its storage",
        where={"file": str(file)},
        hint="it would take far more memory than the file; nothing in a checkpoint needs this",
    )


def _mismatch(file: Path, tensor: StoredTensor, shape: tuple[int, ...], found: Any) -> Problem:
    held = f"{found.dtype.name} {list(found.shape)}" if isinstance(found, TensorRef) else type(found).__name__
    return Problem(
        "SR-FILE-MISMATCH",
        "the data file holds something else than the metadata says",
        where={"file": str(file), "tensor": tensor.name},
        expected=f"{tensor.dtype.name} {list(shape)}",
        found=held,
        hint="metadata and data come from different saves; restore both from the source",
    )

"""Lays out torch.save's zip container (2.x, `caffe2/serialize/inline_container.cc` over miniz), byte for byte.

Entries are stored, each payload begins at a multiple of 64 bytes from the start of the archive, local headers carry
neither sizes nor checksums (they follow the payload and are repeated in the central directory), and what passes 4 GiB
has the wide fields that miniz writes. Not torch's is the serialization id, which there depends on the values.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from samerun.core.dtype import DTYPES, DType
from samerun.core.written import Checksum, FilePlan, Fill, Literal, TensorSlots
from samerun.formats.torchfile.emit import Emitted, emit_pickle
from samerun.formats.torchfile.nodes import Storage, whole

ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_FLAGS = 0x0808  # sizes follow the payload; names are UTF-8
_WIDE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Slot:
    """One box of a tensor and the byte of the file where its first value goes."""

    key: str
    dtype: DType
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


@dataclass(slots=True)
class Pieces:
    """The parts of a file as they are laid out, one behind the other, from byte `position` on."""

    position: int = 0
    literals: list[Literal] = field(default_factory=list[Literal])
    fills: list[Fill] = field(default_factory=list[Fill])
    checksums: list[Checksum] = field(default_factory=list[Checksum])
    slots: list[Slot] = field(default_factory=list[Slot])
    _open: bytearray = field(default_factory=bytearray)

    def write(self, content: bytes) -> None:
        """Adds known bytes. What comes directly behind other known bytes joins them."""
        self._open += content
        self.position += len(content)

    def fill(self, num_bytes: int) -> None:
        """Adds zeros."""
        self._close()
        if num_bytes:
            self.fills.append(Fill(self.position, num_bytes))
            self.position += num_bytes

    def slot(self, key: str, dtype: DType, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Adds the values of a box."""
        self._close()
        self.slots.append(Slot(key, dtype, offsets, sizes, self.position))
        self.position += math.prod(sizes) * dtype.num_bytes

    def checksum(self, start: int, stop: int, *places: int) -> None:
        """Says where the checksum of bytes that are not known yet belongs."""
        self.checksums.append(Checksum(start, stop, places))

    def _close(self) -> None:
        if self._open:
            self.literals.append(Literal(self.position - len(self._open), bytes(self._open)))
            self._open = bytearray()

    def file(self, path: str) -> FilePlan:
        """Returns the whole as one file of the destination."""
        self._close()
        return FilePlan(
            path=path,
            size=self.position,
            literals=tuple(self.literals),
            fills=tuple(self.fills),
            checksums=tuple(self.checksums),
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    local: int
    size: int
    crc32: int
    payload: tuple[int, int] | None  # where it lies, if its checksum is not known yet
    descriptor: int


def add_archive(pieces: Pieces, value: Any, name: str = "archive") -> None:
    """Adds an archive that holds `value` behind what is there already. Offsets in it count from its own start.

    `value` is what `emit_pickle` takes. `name` is the folder inside, which torch takes from the file's name (without
    its ending), or `archive` where it saves to a stream.

    Raises:
        TypeError: if something in it cannot be written.
    """
    emitted = emit_pickle(value)
    writer = _Writer(pieces, name)
    writer.pickle(emitted)
    writer.known(".format_version", b"1")
    writer.known(".storage_alignment", str(ALIGNMENT).encode())
    writer.known("byteorder", b"little")
    for number, storage in enumerate(emitted.storages):
        writer.storage(f"data/{number}", storage)
    writer.known("version", b"3\n")
    identity = int.from_bytes(hashlib.sha256(emitted.pickle).digest(), "big") % 10**40
    writer.known(".data/serialization_id", f"{identity:040}".encode())
    writer.finish()


@dataclass(frozen=True, slots=True)
class _Stencil:
    """An archive of one tensor with its values cut out: all such archives of one type and shape are alike."""

    head: bytes
    num_bytes: int
    tail: bytes
    places: tuple[int, ...]


@lru_cache(maxsize=4_096)
def _stencil(dtype: DType, shape: tuple[int, ...]) -> _Stencil:
    pieces = Pieces()
    add_archive(pieces, whole("", dtype, shape))
    file = pieces.file("")
    head, tail = file.literals
    places = file.checksums[0].places if file.checksums else ()
    return _Stencil(head.content, tail.at - len(head.content), tail.content, places)


def add_tensor(pieces: Pieces, key: str, dtype: DType, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Adds an archive that holds one tensor: the box of `key` at `offsets`. What `add_archive` does, faster."""
    made = _stencil(dtype, sizes)
    base = pieces.position
    pieces.write(made.head)
    start = pieces.position
    pieces.slot(key, dtype, offsets, sizes)
    if made.num_bytes:
        pieces.checksum(start, pieces.position, *(base + place for place in made.places))
    pieces.write(made.tail)


class _Writer:
    def __init__(self, pieces: Pieces, name: str) -> None:
        self._pieces = pieces
        self._base = pieces.position
        self._name = name
        self._entries: list[_Entry] = []

    def known(self, name: str, content: bytes) -> None:
        local = self._begin(name, len(content))
        self._pieces.write(content)
        self._end(name, local, len(content), zlib.crc32(content), None)

    def pickle(self, emitted: Emitted) -> None:
        """The pickle, with holes where integers of the state go."""
        if not emitted.numbers:
            self.known("data.pkl", emitted.pickle)
            return
        data, done = emitted.pickle, 0
        local = self._begin("data.pkl", len(data))
        start = self._pieces.position
        for at, key in emitted.numbers:
            self._pieces.write(data[done:at])
            self._pieces.slot(key, DTYPES["int64"], (), ())
            done = at + 8
        self._pieces.write(data[done:])
        self._end("data.pkl", local, len(data), 0, (start, self._pieces.position))

    def storage(self, name: str, storage: Storage) -> None:
        """One storage's values: known ones, or boxes with zeros between them."""
        if storage.content is not None or not storage.num_bytes:
            self.known(name, storage.content or b"")
            for part in storage.parts:  # no values, but the tensor has its place
                self._pieces.slot(part.key, storage.dtype, part.offsets, part.sizes)
            return
        local = self._begin(name, storage.num_bytes)
        start = self._pieces.position
        width = storage.dtype.num_bytes
        for part in sorted(storage.parts, key=lambda part: part.start):
            gap = start + part.start * width - self._pieces.position
            if gap < 0:
                raise ValueError(f"{part.key} overlaps what lies before it in its storage")
            if part.num_elements:
                self._pieces.fill(gap)
                self._pieces.slot(part.key, storage.dtype, part.offsets, part.sizes)
        rest = start + storage.num_bytes - self._pieces.position
        if rest < 0:
            raise ValueError(f"the parts of a storage are larger than its {storage.num_elements} elements")
        self._pieces.fill(rest)
        self._end(name, local, storage.num_bytes, 0, (start, self._pieces.position))

    def _begin(self, name: str, num_bytes: int) -> int:
        """Writes the local header, padded so that the payload is aligned. Returns where in the archive it begins."""
        local = self._pieces.position - self._base
        path = f"{self._name}/{name}".encode()
        wide = _wide_extra(num_bytes, local)
        start = local + _LOCAL.size + len(path) + len(wide) + 4
        padding = -start % ALIGNMENT
        extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        flags = _FLAGS if num_bytes else _FLAGS & ~8
        self._pieces.write(_LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra)
        return local

    def _end(self, name: str, local: int, num_bytes: int, crc32: int, payload: tuple[int, int] | None) -> None:
        descriptor = self._pieces.position
        if num_bytes:
            wide = bool(_wide_extra(num_bytes, local))
            self._pieces.write(struct.pack("<4sL2Q" if wide else "<4s3L", b"PK\x07\x08", crc32, num_bytes, num_bytes))
        path = f"{self._name}/{name}".encode()
        self._entries.append(_Entry(path, local, num_bytes, crc32, payload, descriptor))

    def finish(self) -> None:
        """Writes the central directory and the end records, the wide ones always, as torch does."""
        directory = self._pieces.position - self._base
        for entry in self._entries:
            extra = _wide_extra(entry.size, entry.local)
            size, local = min(entry.size, _WIDE), min(entry.local, _WIDE)
            if entry.payload:
                self._pieces.checksum(*entry.payload, entry.descriptor + 4, self._pieces.position + 16)
            flags = _FLAGS if entry.size else _FLAGS & ~8
            lengths = (len(entry.name), len(extra), 0, 0, 0, 0)
            self._pieces.write(
                _CENTRAL.pack(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, entry.crc32, size, size, *lengths, local)
                + entry.name
                + extra
            )
        end = self._pieces.position - self._base
        count, length = len(self._entries), end - directory
        wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, length, directory)
        locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
        few, short, low = min(count, 0xFFFF), min(length, _WIDE), min(directory, _WIDE)
        self._pieces.write(wide + locator + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, few, few, short, low, 0))


def _wide_extra(size: int, local: int) -> bytes:
    """Returns the zip64 field of an entry that is larger, or lies further in, than 32 bits can say."""
    values = ([size, size] if size >= _WIDE else []) + ([local] if local >= _WIDE else [])
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def gather_slots(files: Sequence[Sequence[Slot]]) -> tuple[TensorSlots, ...]:
    """Returns the slots of all files by tensor, in order of first appearance. `files[i]` are those of file `i`."""
    rows: dict[str, list[tuple[int, Slot]]] = {}
    for number, slots in enumerate(files):
        for slot in slots:
            rows.setdefault(slot.key, []).append((number, slot))
    return tuple(_column(key, found) for key, found in rows.items())


def _column(key: str, rows: list[tuple[int, Slot]]) -> TensorSlots:
    first = rows[0][1]
    if any(slot.dtype != first.dtype for _, slot in rows):
        raise ValueError(f"{key} is to be written in several element types")
    shape = (len(rows), len(first.sizes))
    return TensorSlots(
        key,
        first.dtype,
        np.array([slot.offsets for _, slot in rows], np.int64).reshape(shape),
        np.array([slot.sizes for _, slot in rows], np.int64).reshape(shape),
        np.array([number for number, _ in rows], np.int64),
        np.array([slot.at for _, slot in rows], np.int64),
    )


def archive_file(path: str, value: Any) -> tuple[FilePlan, list[Slot]]:
    """Returns a file that is one torch.save archive, and where tensors' values go in it."""
    pieces = Pieces()
    add_archive(pieces, value, path.rpartition("/")[2].removesuffix(".pt"))
    return pieces.file(path), pieces.slots


def text_file(path: str, content: str) -> tuple[FilePlan, list[Slot]]:
    """Returns a file that is text, such as a tracker; no tensor's values go in it."""
    pieces = Pieces()
    pieces.write(content.encode())
    return pieces.file(path), []

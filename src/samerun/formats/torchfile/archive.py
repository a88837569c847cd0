"""The torch.save container: a zip of stored entries, so that a tensor is a byte range of the file.

Only the central directory is believed (local headers of torch.save carry neither sizes nor checksums), and only when it
is consistent with the bytes: entries stored, in bounds, not overlapping, no name twice, local headers where it says.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.base import Extent
from samerun.formats.torchfile.unpickle import Decoded, decode_pickle
from samerun.formats.torchfile.values import TensorRef
from samerun.stores.remote import Buffer

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT_BYTES = 65_535

# Entries that torch.save writes and nothing here needs.
_UNUSED = frozenset({".format_version", ".storage_alignment", "version", ".data/serialization_id"})


@dataclass(frozen=True, slots=True)
class Record:
    """One stored entry: its bytes lie at `offset_bytes` of the file, `num_bytes` long, with this checksum if any."""

    offset_bytes: int
    num_bytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class Archive:
    """A torch.save archive inside a file. `records` are by name without the archive's own folder."""

    file: Path
    records: dict[str, Record]
    big_endian: bool

    def extent(self, tensor: TensorRef) -> Extent:
        """Returns where a tensor's values lie.

        Raises:
            CorruptCheckpoint: if its storage is absent or too small for it.
        """
        record = self.records.get(f"data/{tensor.storage}")
        if record is None:
            raise _bad(self.file, f"storage {tensor.storage!r} of a tensor is not in the archive")
        width = tensor.dtype.num_bytes
        if record.num_bytes < tensor.storage_elements * width:
            raise _bad(self.file, f"storage {tensor.storage!r} has {record.num_bytes} bytes, fewer than it declares")
        last = tensor.offset_elements + 1
        for size, stride in zip(tensor.shape, tensor.strides, strict=True):
            last += (size - 1) * stride
        if 0 not in tensor.shape and last > record.num_bytes // width:
            raise _bad(self.file, f"a tensor reaches beyond its storage {tensor.storage!r}")
        return Extent(
            self.file,
            record.offset_bytes + tensor.offset_elements * width,
            tensor.dtype,
            tensor.shape,
            tensor.strides,
            self.big_endian,
            record.offset_bytes,
            record.num_bytes,
            record.crc32,
        )


def _bad(file: Path | str, message: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        Problem(
            "SR-PKL-ZIP",
            message,
            where={"file": str(file)},
            hint="the file is damaged or was not written by torch.save; restore it from the source",
        )
    )


def read_archive(buffer: Buffer, file: Path, start: int = 0, length: int | None = None) -> Archive:
    """Reads the directory of the archive that fills `buffer[start:start + length]`; no payload is read.

    Raises:
        CorruptCheckpoint: if it is no consistent archive of stored entries.
    """
    stop = len(buffer) if length is None else start + length
    if start < 0 or stop > len(buffer) or stop - start < _END.size:
        raise _bad(file, "the file is too short to hold what it should")
    entries, directory, directory_bytes = _find_directory(buffer, file, start, stop)
    records: dict[str, Record] = {}
    position = directory
    for _ in range(entries):
        if position + _CENTRAL.size > directory + directory_bytes:
            raise _bad(file, "the archive's directory is shorter than its number of entries")
        position = _read_entry(buffer, file, start, directory, position, records)
    _check_overlap(file, records)
    if "data.pkl" not in records:
        raise _bad(file, "the archive holds no data.pkl")
    order = records.get("byteorder")
    text = bytes(buffer[order.offset_bytes : order.offset_bytes + min(order.num_bytes, 6)]) if order else b"little"
    if text not in (b"little", b"big"):
        raise _bad(file, f"unknown byte order {text!r}")
    return Archive(file, records, text == b"big")


def _find_directory(buffer: Buffer, file: Path, start: int, stop: int) -> tuple[int, int, int]:
    """Returns the number of entries, and where the central directory lies: position and length in bytes."""
    end = stop - _END.size
    if buffer[end : end + 4] != b"PK\x05\x06":
        end = buffer.rfind(b"PK\x05\x06", max(start, end - _MAX_COMMENT_BYTES), stop)
    if end < start or end + _END.size > stop:
        raise _bad(file, "the archive has no end record: it was cut off or never finished")
    _, disk, first_disk, here, entries, size, offset, comment = _END.unpack(buffer[end : end + _END.size])
    if end + _END.size + comment != stop or disk or first_disk or here != entries:
        raise _bad(file, "the archive's end record is inconsistent")
    limit = end
    if 0xFFFF in (here, entries) or 0xFFFFFFFF in (size, offset):
        entries, size, offset, limit = _find_directory64(buffer, file, start, end)
    if offset + size > limit - start or entries * _CENTRAL.size > size:
        raise _bad(file, "the archive's directory lies outside the archive")
    return entries, start + offset, size


def _find_directory64(buffer: Buffer, file: Path, start: int, end: int) -> tuple[int, int, int, int]:
    locator = end - _END64_LOCATOR.size
    if locator < start or buffer[locator : locator + 4] != b"PK\x06\x07":
        raise _bad(file, "the archive's 64-bit end record is missing")
    at = start + _END64_LOCATOR.unpack(buffer[locator : locator + _END64_LOCATOR.size])[2]
    if at + _END64.size > locator or buffer[at : at + 4] != b"PK\x06\x06":
        raise _bad(file, "the archive's 64-bit end record is not where it should be")
    *_, entries, size, offset = _END64.unpack(buffer[at : at + _END64.size])
    return entries, size, offset, at


def _read_entry(
    buffer: Buffer, file: Path, start: int, directory: int, position: int, records: dict[str, Record]
) -> int:
    """Adds the entry at `position` of the central directory to `records`; returns the position of the next."""
    fields = _CENTRAL.unpack(buffer[position : position + _CENTRAL.size])
    signature, flags, method, crc = fields[0], fields[3], fields[4], fields[7]
    packed, size, name_bytes, extra_bytes, comment_bytes, offset = *fields[8:13], fields[16]
    names = position + _CENTRAL.size
    raw_name = bytes(buffer[names : names + name_bytes])
    if signature != b"PK\x01\x02" or len(raw_name) != name_bytes:
        raise _bad(file, "the archive's directory is damaged")
    if 0xFFFFFFFF in (packed, size, offset):
        extra = bytes(buffer[names + name_bytes : names + name_bytes + extra_bytes])
        packed, size, offset = _wide_fields(file, extra, packed, size, offset)
    if method != 0 or packed != size or flags & 0x2041:
        raise _bad(file, "an entry of the archive is compressed or encrypted")
    folder, _, name = raw_name.decode("utf-8", "surrogateescape").partition("/")
    if name not in _UNUSED:
        data = _payload_offset(buffer, file, start + offset, raw_name)
        if data + size > directory:
            raise _bad(file, "an entry of the archive reaches beyond its payload")
        if not folder or not name or name in records:
            raise _bad(file, f"the archive names {name or folder!r} twice or outside its folder")
        records[name] = Record(data, size, crc)
    return names + name_bytes + extra_bytes + comment_bytes


def _wide_fields(file: Path, extra: bytes, packed: int, size: int, offset: int) -> tuple[int, int, int]:
    """Fills in the fields that are too large for 32 bits from the zip64 extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            wide = iter(struct.iter_unpack("<Q", extra[position + 4 : position + 4 + length // 8 * 8]))
            values = [next(wide, (field,))[0] if field == 0xFFFFFFFF else field for field in (size, packed, offset)]
            return values[1], values[0], values[2]
        position += 4 + length
    raise _bad(file, "an entry of the archive lacks its 64-bit sizes")


def _payload_offset(buffer: Buffer, file: Path, local: int, name: bytes) -> int:
    if local < 0 or local + _LOCAL.size > len(buffer):
        raise _bad(file, "an entry of the archive begins outside it")
    fields = _LOCAL.unpack(buffer[local : local + _LOCAL.size])
    at = local + _LOCAL.size
    if fields[0] != b"PK\x03\x04" or fields[9] != len(name) or buffer[at : at + len(name)] != name:
        raise _bad(file, "an entry of the archive is not where its directory says")
    return at + len(name) + fields[10]


def _check_overlap(file: Path, records: dict[str, Record]) -> None:
    spans = sorted((record.offset_bytes, record.offset_bytes + record.num_bytes) for record in records.values())
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise _bad(file, "entries of the archive overlap")


def read_payload(buffer: Buffer, record: Record) -> bytes:
    """Returns the bytes of one entry."""
    return bytes(buffer[record.offset_bytes : record.offset_bytes + record.num_bytes])


def read_value(buffer: Buffer, archive: Archive, name: str = "") -> Decoded:
    """Decodes the archive's `data.pkl` after checking it against its checksum. Tensors come back as `TensorRef`.

    Raises:
        CorruptCheckpoint: if the checksum differs, or the pickle is malformed or hostile.
    """
    record = archive.records["data.pkl"]
    data = read_payload(buffer, record)
    if record.crc32 is not None and zlib.crc32(data) != record.crc32:
        raise CorruptCheckpoint(_description_damaged(archive.file, name or "data.pkl", record.crc32, zlib.crc32(data)))
    return decode_pickle(data, f"{archive.file}{f' ({name})' if name else ''}")


def _description_damaged(file: Path, name: str, expected: int, found: int) -> Problem:
    return Problem(
        "SR-PKL-CRC",
        "the pickle that describes this value is not the one that was written: its recorded checksum differs",
        where={"file": str(file), "tensor": name},
        expected=f"{expected:08x}",
        found=f"{found:08x}",
        hint="torch decodes it without looking; restore the file from the source or use another checkpoint",
    )


def checksum_problem(file: Path, name: str, expected: int, found: int) -> Problem:
    """Returns the finding for a payload that is not what was written."""
    return Problem(
        "SR-FILE-CRC",
        "the bytes are not those that were written: the checksum recorded beside them differs",
        where={"file": str(file), "tensor": name},
        expected=f"{expected:08x}",
        found=f"{found:08x}",
        hint="torch loads this without an error; restore the file from the source or use another checkpoint",
    )


def as_refs(value: Any) -> list[TensorRef]:
    """Returns every tensor inside a decoded value, in order of appearance."""
    if isinstance(value, TensorRef):
        return [value]
    if isinstance(value, dict):
        return [ref for item in value.values() for ref in as_refs(item)]
    return [ref for item in value for ref in as_refs(item)] if isinstance(value, list) else []

"""The container that torch.save wrote before 1.6 and still writes on request: five pickles, then bare storages.

In order: a magic number, the protocol version, a description of the machine, the saved value, the list of its storages'
keys; then for each key the number of elements (8 bytes) and the values. Nothing in it is a checksum
(`torch/serialization.py`, `_legacy_save`, 2.13).
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from samerun.errors import CorruptCheckpoint, Problem, UnsupportedVersion
from samerun.formats.torchfile.archive import Archive, Record
from samerun.formats.torchfile.plain import Converter
from samerun.formats.torchfile.scan import COMPILE_FROM_BYTES, ENDLESS, TRUNCATED, scan_interpreted, scan_pickle
from samerun.formats.torchfile.stubs import RestrictedUnpickler
from samerun.formats.torchfile.unpickle import DECODING_ERRORS, Decoded, broken_pickle
from samerun.stores.remote import Buffer

_NUMBER = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
MAGIC = b"\x80\x02" + _NUMBER
# The same in the protocols that torch.save takes as `pickle_protocol`: from 4 on in a frame, whose length comes first.
_MAGICS = (MAGIC, b"\x80\x03" + _NUMBER, *(bytes((0x80, n, 0x95, len(_NUMBER), *(0,) * 7)) + _NUMBER for n in (4, 5)))
_PROTOCOL = 1001
_FIRST_WINDOW_BYTES = 1 << 16
_MAX_STORAGES = 10_000_000

# Element types that samerun does not read, whose storages must still be stepped over.
_OTHER_WIDTHS = {
    f"torch.{name}Storage": width
    for name, width in (("QInt8", 1), ("QUInt8", 1), ("QInt32", 4), ("QUInt4x2", 1), ("QUInt2x4", 1))
}


def is_legacy(buffer: Buffer) -> bool:
    """Whether a file begins like the legacy container."""
    return bytes(buffer[: len(_MAGICS[-1])]).startswith(_MAGICS)


def read_legacy(buffer: Buffer, file: Path) -> tuple[Archive, Decoded, tuple[Problem, ...]]:
    """Reads the saved value and where each storage lies; no payload is read.

    Storages are given as the records of an `Archive`, without checksums, as the container has none. A file that was
    cut off among its storages is a finding, the last of the three.

    Raises:
        CorruptCheckpoint: if the file is cut off before them, malformed or hostile.
        UnsupportedVersion: for another protocol or for views of storages (before torch 0.4).
    """
    name = str(file)
    _, position = _decode(buffer, 0, name)
    version, position = _decode(buffer, position, name)
    if version.value != _PROTOCOL:
        raise UnsupportedVersion(_problem(file, f"the legacy container's protocol {version.value!r} is unknown"))
    machine, position = _decode(buffer, position, name)
    storages = _Storages()
    value, position = _decode(buffer, position, name, storages)
    if storages.views:
        raise UnsupportedVersion(_problem(file, "it holds views of storages, which torch stopped writing in 0.4"))
    keys, position = _decode(buffer, position, name)
    records, problems = _place_storages(buffer, position, file, keys.value, storages.sizes)
    little = not isinstance(machine.value, dict) or machine.value.get("little_endian", True)
    return Archive(file, records, not little), value, problems


class _Storages:
    """The storages that a pickle refers to: key -> (bytes per element, elements); and whether any is a view."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, int]] = {}
        self.views = False

    def note(self, key: str, width_bytes: int, count: int, view: Any) -> None:
        known = self.sizes.setdefault(key, (width_bytes, count))
        if known != (width_bytes, count) or not 0 <= count < 1 << 62:
            raise ValueError(f"storage {key!r} is declared twice, differently")
        self.views = self.views or view is not None


class _Unpickler(RestrictedUnpickler):
    """Notes every storage on the way, because the list of keys has no types."""

    def __init__(self, stream: Any, storages: _Storages | None) -> None:
        super().__init__(stream)
        self._storages = storages

    def persistent_load(self, pid: Any, /) -> Any:
        made = super().persistent_load(pid)
        if self._storages is not None and isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage":
            width = _OTHER_WIDTHS.get(getattr(pid[1], "qualified_name", ""))
            if width is not None and isinstance(pid[4], int):
                self._storages.note(str(pid[2]), width, pid[4], None)
            else:
                key, dtype, count = Converter().storage(made)
                self._storages.note(key, dtype.num_bytes, count, pid[5] if len(pid) > 5 else None)
        return made


def _decode(buffer: Buffer, start: int, name: str, storages: _Storages | None = None) -> tuple[Decoded, int]:
    """Decodes the pickle at `start`; returns its value and where it ends."""
    data = _pickle_bytes(buffer, start, name)
    try:
        stream: Any = io.BufferedReader(io.BytesIO(data))  # pyright: ignore[reportArgumentType]
        raw = _Unpickler(stream, storages).load()
        converter = Converter(len(data))
        return Decoded(converter.plain(raw), tuple(sorted(converter.unknown))), start + len(data)
    except (*DECODING_ERRORS, pickle.PickleError) as error:
        raise broken_pickle(name, error) from None


def _pickle_bytes(buffer: Buffer, start: int, name: str) -> bytes:
    """Returns the bytes of the pickle at `start`, looking no further into a large file than needed."""
    window = _FIRST_WINDOW_BYTES
    while True:
        data = bytes(buffer[start : start + window])
        last = start + window >= len(buffer)
        if not last and window < COMPILE_FROM_BYTES:
            status, stop = scan_interpreted(data)
            if status in (TRUNCATED, ENDLESS):
                window *= 8
                continue
            if status == 0:
                return data[:stop]
        if last:
            return data[: scan_pickle(data, name)]
        try:
            return data[: scan_pickle(data, name)]
        except CorruptCheckpoint:
            window *= 8


def _place_storages(
    buffer: Buffer, position: int, file: Path, keys: Any, sizes: dict[str, tuple[int, int]]
) -> tuple[dict[str, Record], tuple[Problem, ...]]:
    """Walks the storages in file order. Those behind the end of a cut-off file are left out, with a finding."""
    if not isinstance(keys, list) or len(keys) > _MAX_STORAGES:
        raise CorruptCheckpoint(_problem(file, "the list of storages is missing"))
    records: dict[str, Record] = {}
    for item in keys:
        key = str(item)
        if key not in sizes or f"data/{key}" in records:
            raise CorruptCheckpoint(_problem(file, f"storage {key!r} is listed twice or belongs to no tensor"))
        width, count = sizes[key]
        stop = position + 8 + count * width
        if stop > len(buffer):
            return records, (_cut(file, len(keys) - len(records), stop, len(buffer)),)
        if int.from_bytes(buffer[position : position + 8], "little") != count:
            raise CorruptCheckpoint(_problem(file, f"storage {key!r} is not as large as the saved value says"))
        records[f"data/{key}"] = Record(position + 8, stop - position - 8, None)
        position = stop
    return records, ()


def _cut(file: Path, lost: int, needed: int, found: int) -> Problem:
    return Problem(
        "SR-FILE-TRUNCATED",
        f"the file ends before {lost} of its storages",
        where={"file": str(file)},
        expected=f"at least {needed} bytes",
        found=f"{found} bytes",
        hint="it was cut off or is still being written; restore it from the source",
    )


def _problem(file: Path, message: str) -> Problem:
    return Problem(
        "SR-PKL-LEGACY",
        message,
        where={"file": str(file)},
        hint="restore the file from the source; if it loads in torch, save it again in the present container",
    )

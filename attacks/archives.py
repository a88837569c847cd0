"""torch.save archives, and objects in them, that lie about themselves. Each replaces an object of the checkpoint."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.catalogue import attack, edit_metadata

PARSER = "the archive parser"


def replace_object(folder: Path, archive: bytes, name: str = "progress.tokens") -> None:
    """Stores `archive` as the object `name`, in a file of its own."""
    with edit_metadata(folder) as found:
        (key,) = [key for key in found.storage_data if key.fqn == name]
        place = found.storage_data[key]
        place.relative_path, place.offset, place.length = "__0_5.distcp", 0, len(archive)
    (folder / "__0_5.distcp").write_bytes(archive)


def sound_archive(data: bytes = b"\x80\x02K\x03.", **extra: bytes) -> bytes:
    """Returns an archive such as torch.save writes, around the pickle `data`."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", b"little")
        for name, content in extra.items():
            archive.writestr(f"archive/{name}", content)
    return body.getvalue()


def _edited(edit: Callable[[bytearray], Any]) -> bytes:
    data = bytearray(sound_archive())
    edit(data)
    return bytes(data)


def _directory(data: bytearray) -> int:
    return data.index(b"PK\x01\x02")


def _end(data: bytearray) -> int:
    return data.rindex(b"PK\x05\x06")


@attack("a megabyte of zeros unpacks to a gigabyte", PARSER, "SR-PKL-ZIP")
def compressed_bomb(folder: Path) -> None:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * 50_000_000 + b"N.")
    replace_object(folder, body.getvalue())


@attack("one reader sees the first entry, another the second", PARSER, "SR-PKL-ZIP")
def duplicate_names(folder: Path) -> None:
    import warnings

    body = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(body, "w") as archive:
        warnings.simplefilter("ignore")
        for value in (b"\x80\x02K\x03.", b"\x80\x02K\x04."):
            archive.writestr("archive/data.pkl", value)
    replace_object(folder, body.getvalue())


@attack("entries that share bytes multiply what is read", PARSER, "SR-PKL-ZIP")
def overlapping_entries(folder: Path) -> None:
    """The second entry's local header lies inside the first one's payload."""
    inner = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 3, 3, 6, 0) + b"archiv"
    data = bytearray(sound_archive(b"\x80\x02K\x03." + inner.replace(b"archiv", b"archive/data/0") + b"abc"))
    at = data.index(b"PK\x03\x04", 4)
    data[at + 26 : at + 28] = struct.pack("<H", 14)
    second = data.index(b"PK\x01\x02", _directory(data) + 4)
    name = data.index(b"archive/byteorder", second)
    data[name : name + 17] = b"archive/data/0"
    data[second + 28 : second + 30] = struct.pack("<H", 14)
    data[second + 20 : second + 28] = struct.pack("<2L", 3, 3)
    data[second + 42 : second + 46] = struct.pack("<L", at)
    end = _end(data)
    data[end + 12 : end + 16] = struct.pack("<L", end - _directory(data))
    replace_object(folder, bytes(data))


@attack("the directory points to a payload that is another file's bytes", PARSER, "SR-PKL-ZIP")
def entry_outside(folder: Path) -> None:
    replace_object(folder, _edited(lambda data: data.__setitem__(
        slice(_directory(data) + 42, _directory(data) + 46), struct.pack("<I", 1 << 30)
    )))  # fmt: skip


@attack("an entry claims four gigabytes", PARSER, "SR-PKL-ZIP")
def huge_entry(folder: Path) -> None:
    def edit(data: bytearray) -> None:
        at = _directory(data)
        data[at + 20 : at + 28] = struct.pack("<2I", 0xFFFFFFF0, 0xFFFFFFF0)

    replace_object(folder, _edited(edit))


@attack("a directory of 65,534 entries that is not there", PARSER, "SR-PKL-ZIP")
def too_many_entries(folder: Path) -> None:
    def edit(data: bytearray) -> None:
        at = _end(data)
        data[at + 8 : at + 12] = struct.pack("<2H", 65_534, 65_534)

    replace_object(folder, _edited(edit))


@attack("the directory lies before the file", PARSER, "SR-PKL-ZIP")
def directory_outside(folder: Path) -> None:
    def edit(data: bytearray) -> None:
        at = _end(data)
        data[at + 16 : at + 20] = struct.pack("<I", 0xFFFFFF00)

    replace_object(folder, _edited(edit))


@attack("a 64-bit directory that points nowhere", PARSER, "SR-PKL-ZIP")
def false_zip64(folder: Path) -> None:
    def edit(data: bytearray) -> None:
        at = _end(data)
        data[at + 8 : at + 20] = b"\xff" * 12

    replace_object(folder, _edited(edit))


@attack("asks for a password", PARSER, "SR-PKL-ZIP")
def encrypted(folder: Path) -> None:
    replace_object(folder, _edited(lambda data: data.__setitem__(_directory(data) + 8, data[_directory(data) + 8] | 1)))


@attack("extracting it writes outside the folder", "nothing is extracted", "SR-PKL-ZIP")
def name_climbs(folder: Path) -> None:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        archive.writestr("../../../../tmp/pwned", b"x" * 200)
    replace_object(folder, body.getvalue())


@attack("an object's pickle runs a command", "every name resolves to a stub", "SR-PKL-UNKNOWN")
def object_calls_os_system(folder: Path) -> None:
    command = f"touch {folder}/pwned".encode()
    pickled = b"\x80\x02cos\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85R."
    replace_object(folder, sound_archive(pickled))


@attack("an object's pickle asks for a memo of four billion entries", "the opcode scan", "SR-PKL-HOSTILE")
def object_memo(folder: Path) -> None:
    replace_object(folder, sound_archive(b"\x80\x02Nr\xff\xff\xff\xff."))


@attack(
    "forty lists of two become a trillion values when printed", "values are counted as if written out", "SR-PKL-BROKEN"
)
def object_doubles(folder: Path) -> None:
    body = b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([number]) + b"h" + bytes([number]) + b"eq" + bytes([number + 1]) for number in range(40)
    )
    replace_object(folder, sound_archive(body + b"."))


@attack("an object that contains itself is walked for ever", "values that are open are remembered", "SR-PKL-UNKNOWN")
def object_contains_itself(folder: Path) -> None:
    replace_object(folder, sound_archive(b"\x80\x02]q\x00h\x00a."))


def _tensor(shape: bytes, strides: bytes, count: bytes = b"K\x01") -> bytes:
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + count + b"tQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + strides + b"\x89)tR."


_BILLION = b"J" + struct.pack("<i", 1_000_000_000)


@attack(
    "four bytes, expanded by strides of zero, become four exabytes",
    "no more values than the storage has",
    "SR-PKL-HOSTILE",
)
def object_tensor_expands(folder: Path) -> None:
    pickled = _tensor(_BILLION + _BILLION + b"\x86", b"K\x00K\x00\x86")
    replace_object(folder, sound_archive(pickled, **{"data/0": b"\0\0\0\0"}))


@attack("a tensor reaches beyond its storage", "extents are checked against the storage", "SR-PKL-ZIP")
def object_tensor_outside(folder: Path) -> None:
    replace_object(folder, sound_archive(_tensor(b"K\x09\x85", b"K\x01\x85"), **{"data/0": b"\0\0\0\0"}))


@attack("a negative stride reads before the storage", "strides are sizes", "SR-PKL-BROKEN")
def object_tensor_backwards(folder: Path) -> None:
    strides = b"J" + struct.pack("<i", -4) + b"\x85"
    replace_object(folder, sound_archive(_tensor(b"K\x02\x85", strides), **{"data/0": b"\0" * 8}))


@attack("an array of Python objects is unpickled by NumPy", "only numbers are read", "SR-PKL-UNKNOWN")
def object_array_of_objects(folder: Path) -> None:
    import numpy as np

    replace_object(folder, sound_archive(pickle.dumps(np.array([{"a": 1}], object), 2)))


@attack("a changed value keeps its length", "the recorded checksum", "SR-PKL-CRC")
def object_edited(folder: Path) -> None:
    data = bytearray(sound_archive(b"\x80\x02K\x03."))
    data[data.index(b"\x80\x02K\x03.") + 3] = 4
    assert zlib.crc32(b"\x80\x02K\x04.") != zlib.crc32(b"\x80\x02K\x03.")
    replace_object(folder, bytes(data))

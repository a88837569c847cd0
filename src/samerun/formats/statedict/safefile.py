"""One safetensors file: a header of JSON, then the tensors (safetensors format, 0.3 to 0.8)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from samerun.core.dtype import DTYPES, DType
from samerun.errors import CorruptCheckpoint, FormatError, Problem
from samerun.formats.base import Extent
from samerun.formats.statedict.stored import Stored, store_nothing, store_whole
from samerun.formats.torchfile.archive import read_archive
from samerun.stores.local import MappedFiles

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES: dict[str, DType] = {
    stored: DTYPES[name]
    for stored, name in {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
        "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    }.items()
}  # fmt: skip
STORED_NAMES: dict[str, str] = {dtype.name: stored for stored, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class SafeFile:
    """An opened file: its tensors in header order, its metadata, and findings about what cannot be read."""

    file: Path
    tensors: dict[str, Stored]
    metadata: dict[str, str]
    problems: tuple[Problem, ...] = ()


def read_safetensors(file: Path, files: MappedFiles) -> SafeFile:
    """Reads a file's header; tensors stay on disk.

    Raises:
        CorruptCheckpoint: if there is no header that can be understood. Tensors behind the end of a file that was cut
            off, or of unknown types, are findings.
    """
    buffer = files.map(file)
    start, problems = _skip_objects(file, files)
    if len(buffer) - start < 8:
        raise CorruptCheckpoint(_empty(file) if not len(buffer) else _cut(file, start + 8, len(buffer)))
    length = int.from_bytes(buffer[start : start + 8], "little")
    data = start + 8 + length
    if length > _MAX_HEADER_BYTES:
        raise CorruptCheckpoint(_header(file, f"it claims {length} bytes"))
    if data > len(buffer):
        raise CorruptCheckpoint(_cut(file, data, len(buffer)))
    entries = _parse_header(file, bytes(buffer[start + 8 : data]))
    metadata = entries.pop("__metadata__", {})
    tensors, found = _place(file, entries, data, len(buffer))
    return SafeFile(file, tensors, _texts(metadata), (*problems, *found))


def _skip_objects(file: Path, files: MappedFiles) -> tuple[int, list[Problem]]:
    """Returns where the header begins: behind objects that torch's HuggingFaceStorageWriter put in front of it."""
    buffer, start = files.map(file), 0
    while bytes(buffer[start : start + 4]) == b"PK\x03\x04":
        end = buffer.find(b"PK\x05\x06", start)
        try:
            read_archive(buffer, file, start, end + 22 - start)
        except FormatError:
            raise CorruptCheckpoint(_header(file, "the file begins with something else")) from None
        start = end + 22
    return start, ([_object_in_front(file)] if start else [])


def _parse_header(file: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(_header(file, str(error)[:200] or "it is nested too deeply")) from None
    if not isinstance(entries, dict):
        raise CorruptCheckpoint(_header(file, "it is no mapping"))
    if broken := [name for name in entries if any("\ud800" <= letter <= "\udfff" for letter in name)]:
        raise CorruptCheckpoint(_header(file, f"the name {broken[0]!r} is no Unicode text"))
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name in it stands twice")
    return made


def _texts(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict):
        return {}
    return {str(name): value for name, value in metadata.items() if isinstance(value, str)}


def _place(file: Path, entries: dict[str, Any], data: int, end: int) -> tuple[dict[str, Stored], list[Problem]]:
    tensors: dict[str, Stored] = {}
    spans: list[tuple[int, int]] = []
    unknown: dict[str, list[str]] = {}
    lost, needed = 0, 0
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise CorruptCheckpoint(_header(file, f"the entry of {name!r} is no mapping"))
        shape, offsets = _sizes(file, name, entry.get("shape")), _sizes(file, name, entry.get("data_offsets"))
        dtype = _DTYPES.get(str(entry.get("dtype")))
        if len(offsets) != 2 or offsets[1] < offsets[0]:
            raise CorruptCheckpoint(_header(file, f"the place of {name!r} is no range"))
        spans.append((offsets[0], offsets[1]))
        if dtype is None:
            unknown.setdefault(str(entry.get("dtype")), []).append(name)
            continue
        if offsets[1] - offsets[0] != math.prod(shape) * dtype.num_bytes:
            raise CorruptCheckpoint(_header(file, f"the place of {name!r} is not as large as its shape and type"))
        if data + offsets[1] > end:
            lost, needed = lost + 1, max(needed, data + offsets[1])
            tensors[name] = store_nothing(shape, dtype)
        else:
            tensors[name] = store_whole(_extent(file, data + offsets[0], dtype, shape))
    problems = [_cut(file, needed, end, lost)] if lost else []
    problems += [_unknown_dtype(file, name, names) for name, names in unknown.items()]
    if _overlap(spans):
        raise CorruptCheckpoint(_header(file, "two tensors share bytes"))
    if not lost and (loose := end - data - sum(after - before for before, after in spans)) > 0:
        problems.append(_loose(file, loose))
    return tensors, problems


def _extent(file: Path, offset: int, dtype: DType, shape: tuple[int, ...]) -> Extent:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return Extent(file, offset, dtype, shape, tuple(strides))


def _sizes(file: Path, name: str, value: Any) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > 64
        or not all(type(item) is int and 0 <= item < 1 << 62 for item in value)
    ):
        raise CorruptCheckpoint(_header(file, f"the shape or place of {name!r} is no list of sizes"))
    return tuple(value)


def _overlap(spans: list[tuple[int, int]]) -> bool:
    held = sorted(span for span in spans if span[1] > span[0])
    return any(after[0] < before[1] for before, after in pairwise(held))


def _header(file: Path, why: str) -> Problem:
    return Problem(
        "SR-FILE-HEADER",
        f"the safetensors header cannot be used: {why}",
        where={"file": str(file)},
        hint="the file is damaged or is no safetensors file; restore it from the source",
    )


def _empty(file: Path) -> Problem:
    return Problem(
        "SR-FILE-EMPTY",
        "the file is empty: whatever wrote it failed before the first byte",
        where={"file": str(file)},
        hint="torch's HuggingFaceStorageWriter leaves empty files when two names share one tensor (tied weights): save "
        "the tied tensor under one name",
    )


def _cut(file: Path, needed: int, found: int, lost: int = 0) -> Problem:
    return Problem(
        "SR-FILE-TRUNCATED",
        f"the file ends before {f'{lost} of its tensors' if lost else 'its header'}",
        where={"file": str(file)},
        expected=f"at least {needed} bytes",
        found=f"{found} bytes",
        hint="it was cut off or is still being written; restore it from the source",
    )


def _loose(file: Path, num_bytes: int) -> Problem:
    return Problem(
        "SR-ST-LOOSE",
        f"{num_bytes} bytes of the file belong to no tensor: safetensors refuses to load it",
        where={"file": str(file)},
        hint="something was added to it, or its header is of another file; restore it from the source",
    )


def _unknown_dtype(file: Path, dtype: str, names: list[str]) -> Problem:
    return Problem(
        "SR-FILE-DTYPE",
        f"{len(names)} tensors have the element type {dtype}, which samerun does not read",
        where={"file": str(file), "tensor": names[0]},
        hint="convert them with the library that wrote them",
    )


def _object_in_front(file: Path) -> Problem:
    return Problem(
        "SR-ST-OBJECT",
        "a pickled object lies in front of the safetensors header: only samerun finds the tensors behind it",
        where={"file": str(file)},
        hint="torch's HuggingFaceStorageWriter writes this when the state dict holds anything but tensors; neither it "
        "nor safetensors loads the file. Save again with tensors only",
    )

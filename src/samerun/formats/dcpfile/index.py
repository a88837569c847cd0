"""`.metadata` as columns: which tensors and objects a DCP directory promises, and where each chunk should lie.

The file is a bare pickle (protocol 4) of `torch.distributed.checkpoint.metadata.Metadata` (torch 2.0 to 2.13). It is
decoded by the C unpickler with stubs for its classes, and the millions of small objects that a large one holds are
turned into a few integer arrays at once.
"""

from __future__ import annotations

import gc
import io
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DType, parse_dtype
from samerun.core.state import Tiling
from samerun.errors import CorruptCheckpoint, Problem, Severity
from samerun.formats.torchfile.scan import scan_pickle
from samerun.formats.torchfile.stubs import Locked, RestrictedUnpickler
from samerun.formats.torchfile.unpickle import DECODING_ERRORS, broken_pickle

Ints = npt.NDArray[np.int64]
NOWHERE = -1

# What no real checkpoint exceeds. A pickle can refer to one long value from many places in a few bytes each; these keep
# the work proportional to the length of the file.
MAX_DIMENSIONS = 64
MAX_NAME = 1_000
MAX_COMPONENTS = 100
MAX_TRANSFORMS = 16
_FEWEST_BYTES_PER_CHUNK = 16


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where items lie, as columns: index into the list of files (or NOWHERE), byte offset, length in bytes."""

    file: Ints
    offset_bytes: Ints
    length_bytes: Ints

    def __len__(self) -> int:
        return len(self.file)

    @classmethod
    def join(cls, parts: Sequence[Places]) -> Places:
        """Returns the concatenation."""
        return cls(
            np.concatenate([part.file for part in parts]),
            np.concatenate([part.offset_bytes for part in parts]),
            np.concatenate([part.length_bytes for part in parts]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor as `.metadata` describes it. Its chunks are rows `first_row...` of the index's tensor places."""

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: DType
    tiling: Tiling
    rows: Ints


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One pickled object and its rows in the index's places: several where ranks each saved it for themselves."""

    name: str
    path: tuple[str | int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """A whole `.metadata`. `transforms` names, by row of `places`, what was applied to an item's bytes."""

    tensors: tuple[StoredTensor, ...]
    objects: tuple[StoredObject, ...]
    places: Places
    files: tuple[str, ...]
    transforms: Mapping[int, tuple[str, ...]]
    save_id: str | None
    version: str | None
    structured: bool
    problems: tuple[Problem, ...]


class _Record(metaclass=Locked):
    """Stub for the plain dataclasses of `.metadata`: BUILD fills its attributes, nothing is called."""


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Bytes(_Record):
    pass


class _Properties(_Record):
    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state


class _Key(_Record):
    """`MetadataIndex`: what an object leaves at its default is not in the pickle."""

    offset = None
    index = None


class _Place(_Record):
    """`_StorageInfo`: releases before 2.6 have no transforms."""

    transform_descriptors = None


class _DTypeName(str):
    __slots__ = ()


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "MetadataIndex"): _Key,
    **{(_METADATA, name): _Record for name in ("ChunkStorageMetadata", "StorageMeta")},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    ("torch", "Size"): tuple,
    **{
        ("torch", name): _DTypeName(name)
        for name in (
            "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
            "float8_e5m2fnuz", "float8_e8m0fnu", "complex128", "complex64", "int64", "int32", "int16", "int8",
            "uint64", "uint32", "uint16", "uint8", "bool",
        )
    },
}  # fmt: skip


def read_index(data: bytes | mmap.mmap, file: Path) -> Index:
    """Decodes one metadata file.

    Raises:
        CorruptCheckpoint: if it is damaged, hostile, or not DCP metadata.
    """
    end = scan_pickle(data, str(file))
    enabled = gc.isenabled()
    gc.disable()  # millions of small objects, none of them garbage
    try:
        stream = io.BufferedReader(io.BytesIO(data[:end]), 1 << 20)  # pyright: ignore[reportArgumentType]
        found = RestrictedUnpickler(stream, _KNOWN).load()
        del stream
        return _index(found, file, end // _FEWEST_BYTES_PER_CHUNK)
    except DECODING_ERRORS as error:
        raise broken_pickle(str(file), error) from None
    finally:
        if enabled:
            gc.enable()


def _index(found: Any, file: Path, max_chunks: int) -> Index:
    if not isinstance(found, _Metadata):
        raise _malformed(file, "it does not hold DCP metadata")
    fields = vars(found)
    entries, storage, paths = fields.get("state_dict_metadata"), fields.get("storage_data"), fields.get("planner_data")
    if type(entries) is not dict or type(storage) is not dict:
        raise _malformed(file, "its tables of tensors or of places are missing")
    if not all(type(name) is str and _is_name(name) for name in entries):
        raise _malformed(file, "a name in it is not text, or longer than any")
    problems: list[Problem] = []
    tensors = [(name, entry) for name, entry in entries.items() if type(entry) is _Tensor]
    blobs = [name for name, entry in entries.items() if type(entry) is _Bytes]
    problems.extend(
        _unreadable(file, name, "it is neither a tensor nor an object")
        for name, entry in entries.items()
        if type(entry) not in (_Tensor, _Bytes)
    )
    if sum(len(vars(entry)["chunks"]) for _, entry in tensors) > max_chunks:
        raise _malformed(file, "it lists more chunks than its length can hold")
    files, rows = _storage_columns(storage, file)
    placer = _Placer(storage, [name for name, _ in tensors], file)
    stored: list[StoredTensor] = []
    path_of = _paths(paths)
    for number, (name, entry) in enumerate(tensors):
        made = _tensor(name, entry, path_of(name), number, placer, file)
        (stored if isinstance(made, StoredTensor) else problems).append(made)  # pyright: ignore[reportArgumentType]
    objects = [StoredObject(name, path_of(name), placer.object_rows(name)) for name in blobs]
    return Index(
        tuple(stored),
        tuple(objects),
        rows,
        files,
        _transforms(storage),
        _text(fields.get("storage_meta"), "save_id"),
        fields["version"] if isinstance(fields.get("version"), str) else None,
        type(paths) is dict and bool(paths),
        tuple(problems),
    )


def _malformed(file: Path, message: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        Problem(
            "SR-META-BROKEN",
            f"the metadata cannot be used: {message}",
            where={"file": str(file)},
            hint="restore the file from the source; without it the data files cannot be put together",
        )
    )


def _unreadable(file: Path, name: str, message: str) -> Problem:
    return Problem(
        "SR-META-ENTRY",
        f"an entry of the metadata cannot be used: {message}",
        where={"file": str(file), "tensor": name},
        hint="restore the metadata from the source",
    )


def _is_name(name: str) -> bool:
    return len(name) <= MAX_NAME and name.count(".") <= MAX_COMPONENTS


def _text(value: Any, name: str) -> str | None:
    found = vars(value).get(name) if isinstance(value, _Record) else None
    return found if isinstance(found, str) else None


def _paths(paths: Any) -> Callable[[str], tuple[str | int, ...]]:
    """Returns a function from a flat name to its path in the saved state dict; (name,) where none is recorded."""
    known: dict[Any, Any] = paths if type(paths) is dict else {}

    def path_of(name: str) -> tuple[str | int, ...]:
        path = known.get(name)
        if type(path) is not tuple or not 0 < len(path) <= MAX_COMPONENTS:
            return (name,)
        plain = all(type(part) in (str, int) for part in path)
        return path if plain and sum(len(part) for part in path if type(part) is str) <= MAX_NAME else (name,)

    return path_of


def _storage_columns(storage: dict[Any, Any], file: Path) -> tuple[tuple[str, ...], Places]:
    """Returns the relative file names and, for every row of the storage table, where the item lies."""
    values = list(storage.values())
    names = list(map(attrgetter("relative_path"), values))
    if not _all_of(names, str):
        raise _malformed(file, "a file name in it is not text")
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    numbers = np.fromiter(map(order.__getitem__, names), np.int64, len(names))
    offsets = _integers(list(map(attrgetter("offset"), values)))
    lengths = _integers(list(map(attrgetter("length"), values)))
    return tuple(order), Places(numbers, offsets, lengths)


def _all_of(values: list[Any], kind: type) -> bool:
    """Whether all values are exactly of one type. Asked before values are hashed: text cannot be made to collide."""
    return set(map(type, values)) <= {kind}


def _transforms(storage: dict[Any, Any]) -> dict[int, tuple[str, ...]]:
    every = list(map(attrgetter("transform_descriptors"), storage.values()))
    if every.count(None) == len(every):
        return {}
    found: dict[int, tuple[str, ...]] = {}
    for row, names in enumerate(every):
        if names:
            listed: list[Any] = list(names[:MAX_TRANSFORMS]) if type(names) in (list, tuple) else [names]
            found[row] = tuple(str(name)[:80] for name in listed)
    return found


def _integers(values: list[Any]) -> Ints:
    """Returns the integers as a column. Raises for anything that is no 64-bit integer."""
    array = np.array(values) if values else np.empty(0, np.int64)
    if array.dtype.kind != "i" or array.ndim != 1:
        raise ValueError("a size or offset is not an integer of 64 bits")
    return array.astype(np.int64, copy=False)


class _Placer:
    """Finds the storage row of every chunk: by the position that the row claims, checked, else by its offsets."""

    def __init__(self, storage: dict[Any, Any], tensor_names: list[str], file: Path) -> None:
        keys = list(storage)
        self._offsets = list(map(attrgetter("offset"), keys))
        names = list(map(attrgetter("fqn"), keys))
        if not _all_of(names, str):
            raise _malformed(file, "a name in its table of places is not text")
        number = {name: i for i, name in enumerate(tensor_names)}
        owners = np.fromiter(map(number.get, names, repeat(-1)), np.int64, len(names))
        hints = [-1 if hint is None else hint for hint in map(attrgetter("index"), keys)]
        self._hints = _integers(hints) if _all_of(hints, int) else np.full(len(keys), -1, np.int64)
        order = np.lexsort((self._hints, owners))
        self._order, self._bounds = order, np.searchsorted(owners[order], np.arange(len(tensor_names) + 1))
        self._rows_by_name: dict[str, list[int]] = {}
        for row in np.sort(order[: int(self._bounds[0])]).tolist():
            self._rows_by_name.setdefault(names[row], []).append(row)

    def object_rows(self, name: str) -> tuple[int, ...]:
        """Returns the storage rows that name an object."""
        return tuple(self._rows_by_name.get(name, ()))

    def align(self, tensor: int, offsets: list[tuple[int, ...]]) -> Ints:
        """Returns the row of each chunk of a tensor, NOWHERE for a chunk that no row places."""
        rows = self._order[self._bounds[tensor] : self._bounds[tensor + 1]]  # in the order of their hints
        if len(rows) == len(offsets) and np.array_equal(self._hints[rows], np.arange(len(rows))):
            placed = list(map(self._offsets.__getitem__, rows.tolist()))
            if placed == offsets:
                return rows
        return self._align_by_offset(np.sort(rows).tolist(), offsets)

    def _align_by_offset(self, rows: list[int], offsets: list[tuple[int, ...]]) -> Ints:
        aligned = np.full(len(offsets), NOWHERE, np.int64)
        free: dict[str, list[int]] = {}
        for chunk in range(len(offsets) - 1, -1, -1):
            free.setdefault(repr(offsets[chunk]), []).append(chunk)
        for row in rows:
            waiting = free.get(repr(self._offsets[row]))
            if waiting:
                aligned[waiting.pop()] = row
        return aligned


def _tensor(
    name: str, entry: Any, path: tuple[str | int, ...], number: int, placer: _Placer, file: Path
) -> StoredTensor | Problem:
    fields = vars(entry)
    shape, chunks = fields.get("size"), fields.get("chunks")
    properties = fields.get("properties")
    state = vars(properties).get("state") if isinstance(properties, _Properties) else None
    dtype = state[0] if type(state) is tuple and state else None
    if type(dtype) is not _DTypeName:
        return _unreadable(file, name, f"its element type is {dtype!r}")
    if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS or type(chunks) is not list:
        return _unreadable(file, name, "its shape or its list of chunks is missing")
    offsets = list(map(attrgetter("offsets"), chunks))
    sizes = list(map(attrgetter("sizes"), chunks))
    columns = (_boxes(offsets, len(shape)), _boxes(sizes, len(shape)))
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape) or columns[0] is None or columns[1] is None:
        return _unreadable(file, name, "its shape or a chunk's box is not made of as many sizes as it has dimensions")
    tiling = Tiling(columns[0], columns[1])
    return StoredTensor(name, path, shape, parse_dtype(dtype), tiling, placer.align(number, offsets))


def _boxes(values: list[Any], ndim: int) -> Ints | None:
    if not _all_of(values, tuple) or not set(map(len, values)) <= {ndim}:
        return None
    if ndim == 0:
        return np.zeros((len(values), 0), np.int64)
    try:
        return _integers(list(chain.from_iterable(values))).reshape(len(values), ndim)
    except (ValueError, OverflowError):
        return None


def merge_indexes(indexes: Sequence[tuple[Path, Index]]) -> Index:
    """Joins the metadata files that ranks wrote each for itself (`use_collectives=False`).

    Chunks that several ranks saved become replicas. A tensor on whose shape or type they disagree is a finding.
    """
    if len(indexes) == 1:
        return indexes[0][1]
    files: dict[str, int] = {}
    places: list[Places] = []
    transforms: dict[int, tuple[str, ...]] = {}
    tensors: dict[str, list[StoredTensor]] = {}
    objects: dict[str, list[StoredObject]] = {}
    problems: list[Problem] = []
    base = 0
    for path, index in indexes:
        numbers = np.array([files.setdefault(name, len(files)) for name in index.files], np.int64)
        places.append(Places(numbers[index.places.file], index.places.offset_bytes, index.places.length_bytes))
        transforms |= {row + base: names for row, names in index.transforms.items()}
        problems.extend(index.problems)
        for tensor in index.tensors:
            rows = np.where(tensor.rows == NOWHERE, NOWHERE, tensor.rows + base)
            moved = StoredTensor(tensor.name, tensor.path, tensor.shape, tensor.dtype, tensor.tiling, rows)
            known = tensors.setdefault(tensor.name, [])
            if known and (known[0].shape, known[0].dtype) != (moved.shape, moved.dtype):
                problems.append(_conflict(path, known[0], moved))
            else:
                known.append(moved)
        for item in index.objects:
            moved_rows = tuple(row + base for row in item.rows)
            objects.setdefault(item.name, []).append(StoredObject(item.name, item.path, moved_rows))
        base += len(index.places)
    return Index(
        tuple(_join_tensor(parts) for parts in tensors.values()),
        tuple(StoredObject(p[0].name, p[0].path, tuple(r for o in p for r in o.rows)) for p in objects.values()),
        Places.join(places),
        tuple(files),
        transforms,
        indexes[0][1].save_id,
        indexes[0][1].version,
        all(index.structured for _, index in indexes),
        tuple(problems),
    )


def _join_tensor(parts: list[StoredTensor]) -> StoredTensor:
    first = parts[0]
    tiling = Tiling(
        np.concatenate([part.tiling.offsets for part in parts]), np.concatenate([part.tiling.sizes for part in parts])
    )
    rows = np.concatenate([part.rows for part in parts])
    return StoredTensor(first.name, first.path, first.shape, first.dtype, tiling, rows)


def _conflict(file: Path, known: StoredTensor, other: StoredTensor) -> Problem:
    return Problem(
        "SR-META-CONFLICT",
        "ranks disagree about a tensor",
        where={"file": str(file), "tensor": other.name},
        severity=Severity.ERROR,
        expected=f"{known.dtype.name} {list(known.shape)}",
        found=f"{other.dtype.name} {list(other.shape)}",
        hint="the metadata files come from different saves; remove the stale ones from a copy and inspect again",
    )

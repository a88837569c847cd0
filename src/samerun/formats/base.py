"""What every reader offers: a checkpoint as logical state, and its values, however the bytes lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from samerun.core.box import Coverage, check_tilings
from samerun.core.dtype import DType
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, TensorEntry, Tiling
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.stores.local import MappedFiles
from samerun.stores.remote import RemoteFile

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of one piece lie. `strides` are in elements, `offset_bytes` counts from the file's start.

    `crc32` is the checksum that the file itself records for the storage which holds the piece, with that storage's
    place, where there is one. `divisor` is what the stored values must be divided by to be the tensor's.
    """

    file: Path
    offset_bytes: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    big_endian: bool = False
    storage_offset_bytes: int = 0
    storage_bytes: int = 0
    crc32: int | None = None
    divisor: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the values themselves (not of any gaps between strides)."""
        return math.prod(self.shape) * self.dtype.num_bytes

    @property
    def contiguous(self) -> bool:
        """Whether the values lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True


@runtime_checkable
class Checkpoint(Protocol):
    """An opened checkpoint: read-only, lazy, no framework needed.

    Keys are the text form of `TensorKey`; piece `i` of a tensor is row `i` of its tiling.
    """

    path: Path
    state: LogicalState

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the bytes of one piece lie.

        Raises:
            CorruptCheckpoint: if they do not lie where the checkpoint says they do.
        """
        ...

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor, assembled from its pieces; the whole tensor when no box is given.

        Raises:
            UsageError: for an unknown key or a box outside the tensor.
            CorruptCheckpoint: if a value of the box is in no piece, or a piece cannot be read.
        """
        ...

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece, a read-only view of the mapped file wherever possible."""
        ...

    def close(self) -> None:
        """Releases the files. Arrays that were returned stay valid."""
        ...


@dataclass(frozen=True, slots=True)
class PayloadCheck:
    """What comparing stored bytes with the evidence recorded beside them gave.

    `checked` of `total` payloads had evidence. `intact` is true only if every one had, all agreed, and nothing else
    leaves open whether the files belong together; None when that cannot be decided.
    """

    checked: int
    total: int
    intact: bool | None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteSource:
    """What a writer is given: the state to be written, and the values of small tensors that belong into pickles."""

    state: LogicalState
    scalar: Callable[[str], Array]  # reads a whole small tensor by key (step counters and the like), at most 64 KiB


@runtime_checkable
class Inspectable(Protocol):
    """What a reader adds to `Checkpoint` when its format records evidence about files and payloads."""

    @property
    def num_files(self) -> int:
        """Number of files that belong to the checkpoint."""
        ...

    def check_items(self, limit: int | None = None) -> list[Problem]:
        """Checks that stored items are what the checkpoint says, reading their headers only; at most `limit` items."""
        ...

    def check_payloads(self, advance: Callable[[int], None] | None = None) -> PayloadCheck:
        """Reads every payload and compares it with its recorded checksum. `advance` is told the bytes read."""
        ...


@runtime_checkable
class Rigid(Protocol):
    """What a reader adds to `Checkpoint` when its own framework cannot load the format at every layout."""

    def check_destination(self, destination: Layout) -> list[Problem]:
        """Returns why the framework would refuse that layout, and which conversion helps; nothing if it would not."""
        ...


@cache
def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Returns the NumPy type that stores `dtype`: bfloat16 and float8 are `ml_dtypes` types."""
    if dtype.name == "bfloat16" or dtype.name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype.name))
    return np.dtype(dtype.name)


def view_extent(files: MappedFiles, extent: Extent) -> Array:
    """Returns the values at an extent as a read-only array: a view of the file unless bytes must be swapped.

    Raises:
        CorruptCheckpoint: if the extent reaches beyond the end of its file.
    """
    buffer = files.map(extent.file)
    kind = numpy_dtype(extent.dtype)
    if math.prod(extent.shape) == 0:
        return _read_only(np.empty(extent.shape, kind))
    last = sum((size - 1) * stride for size, stride in zip(extent.shape, extent.strides, strict=True))
    if (
        extent.offset_bytes < 0
        or min(extent.strides, default=0) < 0
        or (extent.offset_bytes + (last + 1) * kind.itemsize > len(buffer))
    ):
        raise CorruptCheckpoint(
            Problem(
                "SR-FILE-TRUNCATED",
                "a piece reaches beyond the end of its file",
                where={"file": str(extent.file)},
                expected=f"at least {extent.offset_bytes + (last + 1) * kind.itemsize} bytes",
                found=f"{len(buffer)} bytes",
                hint="the file was cut off or is still being written; restore it from the source",
            )
        )
    strides = tuple(stride * kind.itemsize for stride in extent.strides)
    if isinstance(buffer, RemoteFile):
        part = files.range(extent.file, extent.offset_bytes, extent.offset_bytes + (last + 1) * kind.itemsize)
        view = np.ndarray(extent.shape, kind, buffer=part, strides=strides)
    else:
        view = np.ndarray(extent.shape, kind, buffer=buffer, offset=extent.offset_bytes, strides=strides)
    return _read_only(_swapped(view) if extent.big_endian else view)


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _swapped(view: Array) -> Array:
    if view.dtype.itemsize == 1:
        return view
    if view.dtype.kind == "c":
        return view.byteswap()
    words = np.ascontiguousarray(view).view(f"u{view.dtype.itemsize}")
    return words.byteswap().view(view.dtype).reshape(view.shape)


def coverage_problems(name: str, coverage: Coverage) -> list[Problem]:
    """Returns the findings for how one tensor's pieces cover it: none if exactly."""
    problems: list[Problem] = []
    if coverage.outside:
        problems.append(
            Problem(
                "SR-COV-BOUNDS",
                f"{len(coverage.outside)} pieces reach outside the tensor, the first is piece {coverage.outside[0]}",
                where={"tensor": name},
                hint="the metadata is damaged or belongs to another model; restore it from the source",
            )
        )
    if coverage.missing_elements is None:
        problems.append(
            Problem(
                "SR-COV-IRREGULAR",
                "the pieces are laid out so irregularly that their coverage was not counted to the end",
                where={"tensor": name},
                hint="no framework cuts a tensor like this; restore the metadata from the source",
            )
        )
    elif coverage.missing_elements:
        problems.append(
            Problem(
                "SR-COV-GAP",
                f"{coverage.missing_elements} values are in no piece, the first at {coverage.first_gap}",
                where={"tensor": name},
                hint="a rank's part was never written or its metadata is missing; gather every rank's files, or use "
                "another checkpoint",
            )
        )
    if coverage.overlapping:
        problems.append(_overlap(name, ", ".join(f"{a} and {b}" for a, b in coverage.overlapping)))
    return problems


def require_key(state: LogicalState, key: str) -> TensorEntry:
    """Returns the tensor called `key`.

    Raises:
        UsageError: if there is none; the message names the closest keys.
    """
    entry = state.tensors.get(key)
    if entry is not None:
        return entry
    import difflib

    close = difflib.get_close_matches(key, state.tensors, n=3)
    raise UsageError(
        Problem(
            "SR-USAGE-KEY",
            f"the checkpoint has no tensor {key!r}",
            hint=f"closest: {', '.join(close)}" if close else "`samerun inspect --json` lists every key",
        )
    )


def require_box(
    entry: TensorEntry, offsets: tuple[int, ...] | None, sizes: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns a box of `entry` with defaults filled in (from the origin; up to the end).

    Raises:
        UsageError: if the box has another number of dimensions or lies outside the tensor.
    """
    ndim = len(entry.shape)
    start = (0,) * ndim if offsets is None else tuple(offsets)
    if sizes is None and len(start) == ndim:
        sizes = tuple(size - first for size, first in zip(entry.shape, start, strict=True))
    size = tuple(sizes or ())
    inside = len(start) == ndim and len(size) == ndim
    inside = inside and all(
        first >= 0 and count >= 0 and first + count <= whole
        for first, count, whole in zip(start, size, entry.shape, strict=True)
    )
    if inside:
        return start, size
    raise UsageError(
        Problem(
            "SR-USAGE-BOX",
            f"the box at {start} of size {size} does not lie inside {entry.shape}",
            where={"tensor": str(entry.key)},
            hint="offsets and sizes are in elements, one per dimension",
        )
    )


def assemble_box(
    entry: TensorEntry,
    read_piece: Callable[[int], Array],
    offsets: tuple[int, ...] | None = None,
    sizes: tuple[int, ...] | None = None,
    *,
    read_part: Callable[[int, tuple[int, ...], tuple[int, ...]], Array] | None = None,
) -> Array:
    """Reads a box of a tensor from the pieces that touch it. The body of every reader's `read`.

    `read_part` returns the box at (offsets, sizes) inside a piece, for readers that would have to make the whole piece
    otherwise.

    Raises:
        UsageError: for a box outside the tensor.
        CorruptCheckpoint: if not every value of the box is in some piece, or pieces overlap without being replicas.
    """
    start, size = require_box(entry, offsets, sizes)
    low, high = np.array(start, np.int64), np.array(start, np.int64) + np.array(size, np.int64)
    first = np.maximum(entry.tiling.offsets, low)
    last = np.minimum(entry.tiling.offsets + entry.tiling.sizes, high)
    touching = _without_replicas(entry.tiling, np.flatnonzero((last > first).all(axis=1)))
    parts = Tiling(first[touching] - low, (last - first)[touching])
    coverage = check_tilings([(size, parts)])[0]
    if not coverage.exact or coverage.replicas:
        raise CorruptCheckpoint(coverage_problems(str(entry.key), coverage) or [_overlap(str(entry.key))])
    if len(touching) == 1 and math.prod(size) == entry.num_elements:
        return read_piece(int(touching[0])).reshape(size)
    box = np.empty(size, numpy_dtype(entry.dtype))
    for i, piece in enumerate(touching.tolist()):
        origin = first[piece] - entry.tiling.offsets[piece]
        if read_part is not None:
            found = read_part(piece, tuple(origin.tolist()), tuple(parts.sizes[i].tolist()))
        else:
            found = read_piece(piece)[_slices(origin, parts.sizes[i])]
        box[_slices(parts.offsets[i], parts.sizes[i])] = found
    return box


def _slices(offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets.tolist(), sizes.tolist(), strict=True))


def _without_replicas(tiling: Tiling, pieces: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    seen: dict[bytes, int] = {}
    for i in pieces.tolist():
        seen.setdefault(tiling.offsets[i].tobytes() + tiling.sizes[i].tobytes(), i)
    return np.array(list(seen.values()), np.intp)


def _overlap(name: str, pairs: str = "") -> Problem:
    return Problem(
        "SR-COV-OVERLAP",
        f"pieces overlap without being replicas{f': {pairs}' if pairs else ''}",
        where={"tensor": name},
        hint="which value is right cannot be told; metadata of two saves may be mixed in this directory",
    )

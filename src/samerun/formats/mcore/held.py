"""Where the values of Megatron tensors lie: in chunks of distributed checkpoints, or anywhere inside files.

A piece is a box of the logical tensor and a strided view of a source: one chunk of a stored tensor (found in its file
only when it is read), or an extent. Readers collect pieces; several copies of a tensor (a norm that every
tensor-parallel rank keeps in its own flat buffer) become one tensor and replicas to compare it with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DTYPES, DType
from samerun.core.flat import Part
from samerun.core.state import LogicalState, Role, TensorEntry, TensorKey, Tiling
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.formats.base import Array, Extent, assemble_box, numpy_dtype, require_key, view_extent
from samerun.formats.dcpfile.index import StoredTensor
from samerun.formats.dcpfile.items import Items
from samerun.stores.local import MappedFiles

Ints = npt.NDArray[np.int64]
Source = StoredTensor | Extent


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Where a tensor's pieces lie, as columns: row i belongs to piece i of the tiling.

    `source` numbers `sources`; `chunk` is the chunk of a stored tensor. `start` and `strides`, in elements, place the
    piece inside that; without them every piece is a whole source.
    """

    tiling: Tiling
    sources: tuple[Source, ...]
    source: Ints
    chunk: Ints
    start: Ints | None = None
    strides: Ints | None = None

    def clip(self, shape: tuple[int, ...]) -> Held:
        """Returns the pieces inside a smaller tensor, cut where they reach beyond it along the first dimension."""
        kept = np.flatnonzero(self.tiling.offsets[:, 0] < shape[0])
        offsets, sizes = self.tiling.offsets[kept], self.tiling.sizes[kept].copy()
        start = np.zeros(len(kept), np.int64) if self.start is None else self.start[kept]
        strides = _row_major(sizes) if self.strides is None else self.strides[kept]
        sizes[:, 0] = np.minimum(sizes[:, 0], shape[0] - offsets[:, 0])
        return Held(Tiling(offsets, sizes), self.sources, self.source[kept], self.chunk[kept], start, strides)


def _row_major(sizes: Ints) -> Ints:
    strides = np.ones_like(sizes)
    strides[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    return strides


def hold_stored(tensor: StoredTensor) -> Held:
    """Returns where a tensor lies that is stored as such."""
    count = len(tensor.rows)
    return Held(tensor.tiling, (tensor,), np.zeros(count, np.int64), np.arange(count))


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Another copy of a tensor or of a part of it, to be compared with it."""

    key: str
    held: Held


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of a tensor in one source, as columns: see `Held`."""

    tiling: Tiling
    chunk: Ints
    start: Ints
    strides: Ints


@dataclass(slots=True)
class _Copy:
    boxes: list[Part] = field(default_factory=list[Part])
    sources: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    strides: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    pieces: list[tuple[int, Pieces]] = field(default_factory=list[tuple[int, Pieces]])


@dataclass(slots=True)
class _Collected:
    key: TensorKey
    original: str
    dtype: DType
    shape: tuple[int, ...]
    copies: dict[tuple[int, ...], _Copy]
    sources: dict[int, int]
    kept: list[Source]


class Collector:
    """Pieces by key and copy. `finish` picks, for each key, the copy with the most values; the first of equals."""

    def __init__(self) -> None:
        self._found: dict[str, _Collected] = {}
        self._whole: dict[str, tuple[TensorEntry, Held]] = {}
        self.problems: list[Problem] = []

    def __contains__(self, key: TensorKey) -> bool:
        return str(key) in self._found or str(key) in self._whole

    def add_stored(self, key: TensorKey, tensor: StoredTensor, *, inferred: bool = False) -> None:
        """Adds a tensor that is stored as such."""
        entry = TensorEntry(key, tensor.shape, tensor.dtype, tensor.tiling, tensor.name, role_inferred=inferred)
        self._whole.setdefault(str(key), (entry, hold_stored(tensor)))

    def add_parts(
        self,
        key: TensorKey,
        original: str,
        shape: tuple[int, ...],
        dtype: DType,
        copy: tuple[int, ...],
        source: Source,
        chunk: int,
        start: int,
        strides: tuple[int, ...],
        parts: Iterable[Part],
    ) -> None:
        """Adds parts whose values begin, each at its own `start`, after element `start` of a source."""
        opened = self._open(key, original, shape, dtype, copy, source)
        if opened is None:
            return
        mine, number = opened
        for part in parts:
            mine.boxes.append(part)
            mine.sources.append((number, chunk, start + part.start))
            mine.strides.append(strides)

    def add_pieces(
        self,
        key: TensorKey,
        original: str,
        shape: tuple[int, ...],
        dtype: DType,
        copy: tuple[int, ...],
        source: Source,
        pieces: Pieces,
    ) -> None:
        """Adds many parts of one source."""
        opened = self._open(key, original, shape, dtype, copy, source)
        if opened is not None:
            mine, number = opened
            mine.pieces.append((number, pieces))

    def _open(
        self,
        key: TensorKey,
        original: str,
        shape: tuple[int, ...],
        dtype: DType,
        copy: tuple[int, ...],
        source: Source,
    ) -> tuple[_Copy, int] | None:
        """Returns the parts of a copy and the number of a source; None if the tensor is another elsewhere."""
        text = str(key)
        held = self._found.setdefault(text, _Collected(key, original, dtype, shape, {}, {}, []))
        if (held.dtype, held.shape) != (dtype, shape):
            if not any(problem.where.get("tensor") == text for problem in self.problems):
                self.problems.append(_differs(text, held, dtype, shape))
            return None
        number = held.sources.get(id(source))
        if number is None:
            number = held.sources[id(source)] = len(held.kept)
            held.kept.append(source)
        return held.copies.setdefault(copy, _Copy()), number

    def finish(
        self, alike: Callable[[TensorKey], Iterable[tuple[TensorKey, Mapping[int, StoredTensor]]]] = lambda key: ()
    ) -> tuple[dict[str, TensorEntry], dict[str, Held], list[Replica]]:
        """Returns the tensors, where they lie, and their other copies.

        `alike` gives, for a key, the keys of further tensors that lie in the same way in other sources, by the number
        (`id`) of the source that they replace: slots of one buffer are cut alike, and share the columns.
        """
        tensors = {key: entry for key, (entry, _) in self._whole.items()}
        placed = {key: held for key, (_, held) in self._whole.items()}
        replicas: list[Replica] = []
        for found in self._found.values():
            copies = {copy: _columns(found, mine) for copy, mine in found.copies.items()}
            chosen = max(copies, key=lambda copy: (_num_elements(copies[copy]), [-part for part in copy]))
            for key, others in [(found.key, None), *alike(found.key)]:
                text, dtype, original = str(key), found.dtype, found.original
                moved = copies
                if others is not None:
                    kept = tuple(others[id(source)] for source in found.kept)
                    moved = {copy: replace(held, sources=kept) for copy, held in copies.items()}
                    dtype, original = kept[0].dtype, kept[0].name
                if text not in tensors:
                    entry = TensorEntry(key, found.shape, dtype, moved[chosen].tiling, original)
                    tensors[text], placed[text] = entry, moved[chosen]
                    moved = {copy: held for copy, held in moved.items() if copy != chosen}
                replicas += [Replica(text, held) for held in moved.values()]
        return tensors, placed, replicas


def _columns(found: _Collected, copy: _Copy) -> Held:
    ndim, count = len(found.shape), len(copy.boxes)
    offsets = [np.array([part.offsets for part in copy.boxes], np.int64).reshape(count, ndim)]
    sizes = [np.array([part.sizes for part in copy.boxes], np.int64).reshape(count, ndim)]
    where = np.array(copy.sources, np.int64).reshape(count, 3)
    strides = [np.array(copy.strides, np.int64).reshape(count, ndim)]
    source, chunk, start = [where[:, 0]], [where[:, 1]], [where[:, 2]]
    for number, pieces in copy.pieces:
        offsets.append(pieces.tiling.offsets)
        sizes.append(pieces.tiling.sizes)
        source.append(np.full(len(pieces.tiling), number, np.int64))
        chunk.append(pieces.chunk)
        start.append(pieces.start)
        strides.append(pieces.strides)
    tiling = Tiling(np.concatenate(offsets), np.concatenate(sizes))
    columns = (np.concatenate(parts) for parts in (source, chunk, start, strides))
    return Held(tiling, tuple(found.kept), *columns)


def _num_elements(held: Held) -> int:
    return int(held.tiling.sizes.prod(axis=1).sum())


def _differs(key: str, held: _Collected, dtype: DType, shape: tuple[int, ...]) -> Problem:
    return Problem(
        "SR-MEG-LAYOUT",
        "ranks hold this tensor in different shapes or types",
        where={"tensor": key},
        expected=f"{held.dtype.name} {list(held.shape)}",
        found=f"{dtype.name} {list(shape)}",
        hint="files of different saves or models lie in one directory; restore the whole directory",
    )


def add_steps(tensors: dict[str, TensorEntry], steps: Mapping[str, Any]) -> dict[str, int | float]:
    """Adds the step of every trained parameter, by name, which Megatron keeps once per group or once for all.

    Returns the numbers by key. What is no number is left out.
    """
    constants: dict[str, int | float] = {}
    for fqn, step in sorted(steps.items()):
        if not isinstance(step, int | float) or isinstance(step, bool):
            continue
        key = TensorKey(Role.OPTIM, fqn, "step")
        dtype = DTYPES["int64" if isinstance(step, int) else "float64"]
        tensors[str(key)] = TensorEntry(key, (), dtype, Tiling.whole(()), "param_groups.step")
        constants[str(key)] = step
    return constants


class Storage:
    """Reads pieces: extents of mapped files, and chunks of a distributed checkpoint where there is one."""

    def __init__(self, files: MappedFiles, items: Items | None = None) -> None:
        self.files = files
        self.items = items

    def extent(self, held: Held, piece: int) -> Extent:
        """Returns where the values of a piece lie.

        Raises:
            CorruptCheckpoint: if the item that holds it is not readable or holds something else.
        """
        source = held.sources[int(held.source[piece])]
        if isinstance(source, Extent):
            whole = source
        elif self.items is not None:
            whole = self.items.extent(source, int(held.chunk[piece]))
        else:
            raise CorruptCheckpoint(Problem("SR-FILE-NOPLACE", "no file holds this", where={"tensor": source.name}))
        if held.start is None or held.strides is None:
            return whole
        if isinstance(source, StoredTensor) and not whole.contiguous:
            raise CorruptCheckpoint(_scattered(whole, source.name))
        return replace(
            whole,
            offset_bytes=whole.offset_bytes + int(held.start[piece]) * whole.dtype.num_bytes,
            shape=tuple(held.tiling.sizes[piece].tolist()),
            strides=tuple(held.strides[piece].tolist()),
        )

    def view(self, held: Held, piece: int) -> Array:
        """Returns the values of a piece, a view of its file."""
        return view_extent(self.files, self.extent(held, piece))


def _scattered(extent: Extent, name: str) -> Problem:
    return Problem(
        "SR-FILE-MISMATCH",
        "a chunk's values do not lie in one run, so positions inside it mean nothing",
        where={"file": str(extent.file), "tensor": name},
        hint="Megatron never writes this; restore the file from the source",
    )


class HeldCheckpoint:
    """A checkpoint whose tensors are held pieces, or plain numbers. See `samerun.formats.base.Checkpoint`."""

    def __init__(
        self,
        path: Path,
        state: LogicalState,
        placed: Mapping[str, Held],
        constants: Mapping[str, int | float],
        storage: Storage,
        replicas: Sequence[Replica] = (),
    ) -> None:
        self.path = path
        self.state = state
        self.placed = placed
        self.storage = storage
        self.replicas = replicas
        self._constants = constants

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the bytes of one piece lie. See `Checkpoint.locate`."""
        entry = require_key(self.state, key)
        if not 0 <= piece < len(entry.tiling):
            raise UsageError(Problem("SR-USAGE-PIECE", f"{key} has {len(entry.tiling)} pieces, none is number {piece}"))
        held = self.placed.get(key)
        if held is None:
            raise CorruptCheckpoint(
                Problem("SR-USAGE-PIECE", f"{key} is a number kept inside an object, not in a file")
            )
        return self.storage.extent(held, piece)

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece as a read-only view. See `Checkpoint.read_piece`."""
        constant = self._constants.get(key)
        if constant is not None:
            return np.asarray(constant, numpy_dtype(require_key(self.state, key).dtype))
        return view_extent(self.storage.files, self.locate(key, piece))

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor. See `Checkpoint.read`."""
        entry = require_key(self.state, key)
        return assemble_box(entry, lambda piece: self.read_piece(key, piece), offsets, sizes)

    def close(self) -> None:
        """Releases the files."""
        self.storage.files.close()

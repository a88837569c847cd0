"""Checkpoints made of arrays cut into pieces and laid into files, however a test likes, and destinations for them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from samerun.core.dtype import DType, parse_dtype
from samerun.core.state import LogicalState, TensorEntry, TensorKey, Tiling
from samerun.core.written import Checksum, DestinationPlan, FilePlan, Fill, Literal, TensorSlots
from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.base import Array, Extent, assemble_box, numpy_dtype, view_extent
from samerun.stores.local import MappedFiles

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a test: its values, how the source cuts and stores it, how the destination cuts it."""

    key: str
    values: Array
    dtype: DType
    pieces: list[Box]
    boxes: list[Box]
    stored_as: list[str]  # by piece: rows, columns (column-major), swapped (big-endian), wide (with gaps), made
    written: DType


class PieceCheckpoint:
    """A checkpoint whose pieces lie in files as a test wants them."""

    def __init__(self, path: Path, tensors: list[Tensor]) -> None:
        self.path = path
        self._files = MappedFiles()
        self._extents: dict[tuple[str, int], Extent | None] = {}
        self._values = {tensor.key: tensor.values for tensor in tensors}
        entries: dict[str, TensorEntry] = {}
        path.mkdir(parents=True)
        for tensor in tensors:
            ndim = tensor.values.ndim
            tiling = Tiling(
                np.array([box[0] for box in tensor.pieces], np.int64).reshape(len(tensor.pieces), ndim),
                np.array([box[1] for box in tensor.pieces], np.int64).reshape(len(tensor.pieces), ndim),
            )
            key = TensorKey.parse(tensor.key)
            entries[tensor.key] = TensorEntry(key, tensor.values.shape, tensor.dtype, tiling, tensor.key)
            for number, (box, how) in enumerate(zip(tensor.pieces, tensor.stored_as, strict=True)):
                file = path / f"part{number % 3}.bin"
                self._extents[tensor.key, number] = _store(file, tensor.values[as_slices(box)], tensor.dtype, how)
        self.state = LogicalState(format="pieces", tensors=entries)

    def locate(self, key: str, piece: int) -> Extent:
        extent = self._extents[key, piece]
        if extent is None:
            raise CorruptCheckpoint(Problem("SR-USAGE-PIECE", "made by the reader"))
        return extent

    def read_piece(self, key: str, piece: int) -> Array:
        extent = self._extents[key, piece]
        if extent is not None:
            return view_extent(self._files, extent)
        tiling = self.state.tensors[key].tiling
        box = tuple(tiling.offsets[piece].tolist()), tuple(tiling.sizes[piece].tolist())
        return self._values[key][as_slices(box)]

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        return assemble_box(self.state.tensors[key], lambda piece: self.read_piece(key, piece), offsets, sizes)

    def close(self) -> None:
        self._files.close()


def as_slices(box: Box) -> tuple[slice, ...]:
    """Returns a box as NumPy indexes it."""
    return tuple(slice(a, a + n) for a, n in zip(*box, strict=True))


def _store(file: Path, values: Array, dtype: DType, how: str) -> Extent | None:
    if how == "made":
        return None
    with open(file, "ab") as out:
        out.write(b"\xa5" * 3)  # what lies between pieces, and misaligns them
        offset = out.tell()
        strides = [n // values.itemsize for n in np.empty(values.shape, values.dtype).strides]
        if how == "columns":
            out.write(values.tobytes(order="F"))
            strides = [n // values.itemsize for n in np.empty(values.shape, values.dtype, order="F").strides]
        elif how == "wide" and values.ndim:
            wide = np.full((*values.shape[:-1], values.shape[-1] * 2), 7).astype(values.dtype)
            wide[..., : values.shape[-1]] = values
            out.write(wide.tobytes())
            strides = [2 * n for n in strides[:-1]] + strides[-1:]
        elif how == "swapped":
            out.write(np.ascontiguousarray(values).view(f"u{values.itemsize}").byteswap().tobytes())
        else:
            out.write(values.tobytes())
        size = out.tell() - offset
    crc = zlib.crc32(file.read_bytes()[offset:]) if how != "wide" else None
    return Extent(
        file,
        offset,
        dtype,
        values.shape,
        tuple(strides),
        big_endian=how == "swapped",
        storage_offset_bytes=offset,
        storage_bytes=size,
        crc32=crc,
    )


def lay_out_boxes(tensors: list[Tensor], num_files: int, *, checksums: bool = True) -> DestinationPlan:
    """Deals the destination's boxes to files in turn, with a literal in front of each and padding between them."""
    sizes = [8] * num_files
    literals: list[list[Literal]] = [[Literal(0, bytes(8))] for _ in range(num_files)]
    fills: list[list[Fill]] = [[] for _ in range(num_files)]
    slots: list[TensorSlots] = []
    turn = 0
    for tensor in tensors:
        file: list[int] = []
        at: list[int] = []
        for _, size in tensor.boxes:
            number = turn % num_files
            turn += 1
            fills[number].append(Fill(sizes[number], 1 + turn % 5))
            sizes[number] += 1 + turn % 5
            file.append(number)
            at.append(sizes[number])
            sizes[number] += int(np.prod(size)) * tensor.written.num_bytes
        ndim = tensor.values.ndim
        offsets = np.array([box[0] for box in tensor.boxes], np.int64).reshape(len(tensor.boxes), ndim)
        extents = np.array([box[1] for box in tensor.boxes], np.int64).reshape(len(tensor.boxes), ndim)
        slots.append(TensorSlots(tensor.key, tensor.written, offsets, extents, np.array(file), np.array(at)))
    files: list[FilePlan] = []
    for number in range(num_files):
        start, stop = 8, sizes[number]
        sums = (Checksum(start, stop, (4,)), Checksum(start, start + (stop - start) // 2, (0,))) if checksums else ()
        files.append(
            FilePlan(
                path=f"sub{number % 2}/file{number}.bin",
                size=sizes[number],
                literals=tuple(literals[number]),
                fills=tuple(fills[number]),
                checksums=sums,
            )
        )
    return DestinationPlan(format="pieces", files=tuple(files), tensors=tuple(slots))


def expected_files(tensors: list[Tensor], destination: DestinationPlan) -> dict[str, bytes]:
    """Returns what every file must hold, made in the plainest way."""
    contents = [bytearray(file.size) for file in destination.files]
    for tensor, slots in zip(tensors, destination.tensors, strict=True):
        for box, file, at in zip(tensor.boxes, slots.file.tolist(), slots.at.tolist(), strict=True):
            with np.errstate(all="ignore"):
                values = np.ascontiguousarray(tensor.values[as_slices(box)]).astype(numpy_dtype(tensor.written))
            raw = values.tobytes()
            contents[file][at : at + len(raw)] = raw
    for number, file in enumerate(destination.files):
        for literal in file.literals:
            contents[number][literal.at : literal.at + len(literal.content)] = literal.content
        for checksum in file.checksums:
            value = zlib.crc32(contents[number][checksum.start : checksum.stop])
            for place in checksum.places:
                contents[number][place : place + 4] = value.to_bytes(4, "little")
    return {file.path: bytes(content) for file, content in zip(destination.files, contents, strict=True)}


# --- random ones --------------------------------------------------------------------------------------------------


@st.composite
def tilings(draw: Any, shape: tuple[int, ...], most: int = 8) -> list[Box]:
    """Draws boxes that tile a shape: cut somewhere, again and again, in no regular way."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        number = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[number]
        dims = [d for d, size in enumerate(sizes) if size > 1]
        if not dims:
            continue
        d = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, sizes[d] - 1))
        left = tuple(cut if i == d else n for i, n in enumerate(sizes))
        right = tuple(n - cut if i == d else n for i, n in enumerate(sizes))
        moved = tuple(a + cut if i == d else a for i, a in enumerate(offsets))
        boxes[number : number + 1] = [(offsets, left), (moved, right)]
    return boxes


@st.composite
def tensor_lists(draw: Any) -> list[Tensor]:
    """Draws tensors of one to three dimensions (or none), stored and cut at random, replicas on both sides included."""
    tensors: list[Tensor] = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = parse_dtype(draw(st.sampled_from(["float32", "bfloat16", "int16", "uint8", "float64"])))
        written = parse_dtype(draw(st.sampled_from(["bfloat16", "float32"]))) if dtype.kind == "float" else dtype
        written = written if draw(st.booleans()) else dtype
        count = int(np.prod(shape))
        values = (np.arange(count) * 1.37 + number).reshape(shape).astype(numpy_dtype(dtype))
        pieces, boxes = draw(tilings(shape)), draw(tilings(shape))
        if draw(st.booleans()):
            pieces.append(pieces[0])
            boxes.append(boxes[-1])
        ways = st.sampled_from(["rows", "rows", "columns", "swapped", "wide", "made"])
        stored = [draw(ways) for _ in pieces]
        tensors.append(Tensor(f"param:t{number}", values, dtype, pieces, boxes, stored, written))
    return tensors

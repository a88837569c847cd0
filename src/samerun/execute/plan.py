"""A conversion as a value: every copy from a source file into a destination file, before any byte moves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DTYPES, DType
from samerun.core.written import DestinationPlan
from samerun.errors import Problem
from samerun.stores.remote import original_name

Ints = npt.NDArray[np.int64]

MADE = -1  # the source file of a copy whose values the reader makes: they lie in no file as they are wanted
DTYPE_LIST: tuple[DType, ...] = tuple(DTYPES.values())
DTYPE_INDEX: dict[str, int] = {dtype.name: i for i, dtype in enumerate(DTYPE_LIST)}


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Every box of every tensor of the destination, as columns; dimensions are right-aligned, missing ones are 1.

    Shapes: `offsets` and `sizes` `(slots, ndim)` in elements; the others `(slots,)`. `tensor` counts into the plan's
    keys, `file` into its files, `at` is the byte of the first value, `itemsize` bytes per value.
    """

    tensor: Ints
    file: Ints
    at: Ints
    offsets: Ints
    sizes: Ints
    itemsize: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_bytes(self) -> Ints:
        """Bytes of each slot."""
        return np.prod(self.sizes, axis=1) * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Boxes that move, as columns. Row i puts a box of source values at `origin` (elements) inside slot `slot`.

    `source` counts into the plan's sources (`MADE`: the values are read through the checkpoint), `offset` is the byte
    of the box's first value there, `strides` `(copies, ndim)` its steps in bytes. `stored` is the element type in the
    file (an index into `DTYPE_LIST`), `swapped` says that it is big-endian; `divisor` is what values are divided by.
    `crc` is the CRC32 of exactly these bytes as the source records it, -1 where it records none or is not trusted.
    """

    slot: Ints
    source: Ints
    offset: Ints
    strides: Ints
    origin: Ints
    sizes: Ints
    stored: Ints
    swapped: npt.NDArray[np.bool_]
    divisor: npt.NDArray[np.float64]
    crc: Ints

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversionPlan:
    """What an executor needs, and all that it knows. `keys[t]`, `shapes[t]` and `dtypes[t]` describe tensor t.

    `sources` are absolute paths; `source_fingerprint` is the digest of the whole source tree, modification times
    included. `embedded` are keys whose values the writer put into literals. `peak_memory_bytes` estimates anonymous
    memory of the copying itself, from the budget that it is given.
    """

    destination: DestinationPlan
    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    sources: tuple[str, ...]
    source_fingerprint: str
    slots: Slots
    copies: Copies
    embedded: frozenset[str] = frozenset()
    peak_memory_bytes: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The sources by the names that they keep: URLs of what lies in a store."""
        return tuple(original_name(source) for source in self.sources)

    @property
    def written(self) -> Ints:
        """The element type that each copy is written in, as an index into `DTYPE_LIST`."""
        kinds = np.array([DTYPE_INDEX[dtype.name] for dtype in self.dtypes], np.int64)
        return kinds[self.slots.tensor[self.copies.slot]]

    @property
    def cast(self) -> npt.NDArray[np.bool_]:
        """Which copies change their values' form: another type, byte order or scale."""
        copies = self.copies
        return (copies.stored != self.written) | copies.swapped | (copies.divisor != 1.0)

    @property
    def bytes_written(self) -> int:
        """Bytes of all destination files."""
        return self.destination.num_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes of values that are read to be copied, each as often as it is copied."""
        itemsizes = np.array([dtype.num_bytes for dtype in DTYPE_LIST], np.int64)
        return int((np.prod(self.copies.sizes, axis=1) * itemsizes[self.copies.stored]).sum())

    @property
    def hash(self) -> str:
        """Returns `sha256:...` over everything that decides which byte goes where."""
        body = hashlib.sha256()
        for part in _header(self):
            body.update(part)
        for columns in (self.slots, self.copies):
            for name in columns.__slots__:
                column = np.ascontiguousarray(getattr(columns, name))
                body.update(f"{name} {column.dtype.str} {column.shape}\n".encode())
                body.update(column.tobytes())
        return f"sha256:{body.hexdigest()}"

    def to_json(self, *, copies: bool = False) -> dict[str, Any]:
        """Returns the body of the `samerun/convert-plan/1` document; `copies` adds every single one."""
        destination = self.destination
        body: dict[str, Any] = {
            "format": destination.format,
            "hash": self.hash,
            "source_fingerprint": self.source_fingerprint,
            "sources": list(self.names),
            "files": [
                {
                    "path": file.path,
                    "bytes": file.size,
                    "literal_bytes": sum(len(literal.content) for literal in file.literals),
                    "padding_bytes": sum(fill.size for fill in file.fills),
                    "checksums": len(file.checksums),
                }
                for file in destination.files
            ],
            "tensors": len(self.keys),
            "copies": len(self.copies),
            "casts": int(self.cast.sum()),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "peak_memory_bytes": self.peak_memory_bytes,
            "dropped": dict(destination.dropped),
            "problems": [problem.to_json() for problem in self.problems],
        }
        if copies:
            body["copy_list"] = list(self.copy_list())
        return body

    def copy_list(self) -> Iterator[dict[str, Any]]:
        """Yields every copy in readable form, in the order of the destination's tensors."""
        kinds, names = self.written.tolist(), self.names
        for i in range(len(self.copies)):
            slot = int(self.copies.slot[i])
            source = int(self.copies.source[i])
            yield {
                "tensor": self.keys[int(self.slots.tensor[slot])],
                "source": names[source] if source != MADE else None,
                "offset": int(self.copies.offset[i]),
                "strides": self.copies.strides[i].tolist(),
                "sizes": self.copies.sizes[i].tolist(),
                "dtype": DTYPE_LIST[int(self.copies.stored[i])].name,
                "file": self.destination.files[int(self.slots.file[slot])].path,
                "at": int(self.slots.at[slot]),
                "slot": self.slots.sizes[slot].tolist(),
                "origin": self.copies.origin[i].tolist(),
                "as": DTYPE_LIST[kinds[i]].name,
            }


def _header(plan: ConversionPlan) -> Iterator[bytes]:
    destination = plan.destination
    facts = [destination.format, destination.single_file, plan.source_fingerprint, plan.names, plan.keys, plan.shapes]
    yield json.dumps([*facts, [dtype.name for dtype in plan.dtypes], sorted(destination.dropped.items())]).encode()
    for file in destination.files:
        fills = [(fill.at, fill.size) for fill in file.fills]
        sums = [(checksum.start, checksum.stop, checksum.places) for checksum in file.checksums]
        yield json.dumps([file.path, file.size, fills, sums]).encode()
        for literal in file.literals:
            yield f"{literal.at} {len(literal.content)} {hashlib.sha256(literal.content).hexdigest()}\n".encode()

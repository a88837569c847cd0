"""What a destination will look like, byte for byte, before anything is written: a value that a writer returns.

A writer knows a format; it reads no tensor and opens no file. It says which files there will be, which of their bytes
are known already (headers, pickles: literals), which are values of a tensor (slots: a box of it in row-major order,
from a byte offset on), which are padding (fills: zeros), and where checksums of other bytes belong. How the values
come from the source is the planner's business, and copying them the executor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DType
from samerun.errors import Problem


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known before any value is read, from byte `at` of the file on."""

    at: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Fill:
    """`size` zero bytes from byte `at` of the file on: padding that the format asks for."""

    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC32 of bytes `start` to `stop` (half-open) of the file, little-endian, to be put at each of `places`.

    The places lie inside literals, which hold zeros there, and outside `start` to `stop`.
    """

    start: int
    stop: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One file of the destination. `path` is relative to the destination, with `/` between components.

    Literals, fills and the slots that name this file tile its `size` bytes exactly.
    """

    path: str
    size: int
    literals: tuple[Literal, ...] = ()
    fills: tuple[Fill, ...] = ()
    checksums: tuple[Checksum, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlots:
    """Where the boxes of one tensor go. Row i of each column is one box.

    `key` is the tensor's key in the state that is written; `dtype` is what is written (where it differs from the
    state's, values are cast, round to nearest even). Shapes: `offsets` and `sizes` `(boxes, ndim)` int64, in elements;
    `file` `(boxes,)` int64, an index into the plan's files; `at` `(boxes,)` int64, the byte where the box's first value
    goes; its values follow densely in row-major order. Boxes may repeat (replicas) or cover a tensor partly only if the
    rest is in `DestinationPlan.dropped`.
    """

    key: str
    dtype: DType
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    file: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        boxes = len(self.file)
        if self.offsets.ndim != 2 or self.offsets.shape != self.sizes.shape:
            raise ValueError(f"offsets {self.offsets.shape} and sizes {self.sizes.shape} must be equal and 2-d")
        if len(self.offsets) != boxes or self.at.shape != (boxes,) or self.file.shape != (boxes,):
            raise ValueError(f"{len(self.offsets)} boxes, {self.file.shape} files and {self.at.shape} places")

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DestinationPlan:
    """A whole destination: a directory, or one file (then `single_file`, and `files` has one entry).

    `dropped` names every tensor, group, object or section of the state that this format does not hold, with why; what
    is neither in `tensors` nor there has been forgotten, which `check_destination` reports. `problems` are the
    decisions that the user must make (severity error: refused unless allowed by code) and the notes that they see.
    A destination that serves several frameworks is also read back as each of the formats in `read_as`.
    """

    format: str
    files: tuple[FilePlan, ...]
    tensors: tuple[TensorSlots, ...]
    single_file: bool = False
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])
    problems: tuple[Problem, ...] = ()
    read_as: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

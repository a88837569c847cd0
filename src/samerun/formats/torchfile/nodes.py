"""What stands for tensors and objects in a value that is to be pickled: placeholders, made of names and numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from samerun.core.dtype import DTYPES, DType
from samerun.formats.base import Array


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the tensor `key` of the state, in row-major order, from element `start` of a storage on."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0

    @property
    def num_elements(self) -> int:
        """Number of values in the box."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The flat values behind one or several tensors: boxes of the state's tensors, or bytes that are known already.

    Elements in no part are zero. Two tensors share values if they are given the same object.
    """

    dtype: DType
    num_elements: int
    parts: tuple[Part, ...] = ()
    content: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.num_elements * self.dtype.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor as a view of a storage. Offset and strides are in elements; dense where no strides are given."""

    storage: Storage
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar int64 tensor of the state that becomes a Python integer: its 8 bytes lie in the pickle itself."""

    key: str


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that the pickle names, such as `collections.OrderedDict`."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a function returns: REDUCE, and BUILD where a state follows."""

    function: Named
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class with its attributes: NEWOBJ and BUILD."""

    kind: Named
    state: Any = None


def whole(
    key: str, dtype: DType, shape: tuple[int, ...], offsets: tuple[int, ...] | None = None, *, start: int = 0
) -> Tensor:
    """Returns a tensor of its own storage that holds the box of `key` from `offsets` (the origin) on."""
    origin = offsets if offsets is not None else (0,) * len(shape)
    return Tensor(Storage(dtype, start + math.prod(shape), (Part(key, origin, shape, start),)), shape, start)


def known(array: Array) -> Tensor:
    """Returns a tensor whose values are known: those of an array of one of torch's element types.

    Raises:
        ValueError: if torch has no such element type.
    """
    name = array.dtype.name
    if name not in DTYPES:
        raise ValueError(f"torch has no element type {name}")
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    return Tensor(Storage(DTYPES[name], array.size, content=little.tobytes()), array.shape)


def size(values: tuple[int, ...]) -> Call:
    """Returns a `torch.Size`."""
    return Call(Named("torch", "Size"), (values,))


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a row-major tensor, as torch counts: an empty dimension counts as 1."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))

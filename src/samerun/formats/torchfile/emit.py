"""Writes pickles as `torch.save` does (protocol 2), from plain data and placeholders of tensors; pickles nothing.

No class is looked up and nothing is called: a name in the pickle is a `Named` that the caller wrote down. The bytes
depend on the value alone. Where a tensor stands, only its description goes into the pickle; its values go into a
storage, and the storages come back beside the bytes, numbered as torch does it (`torch/serialization.py`, 2.13).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.formats.torchfile.nodes import (
    Call,
    Instance,
    Named,
    Number,
    Part,
    Storage,
    Tensor,
    dense_strides,
    known,
    size,
    whole,
)

__all__ = [
    "Call",
    "Emitted",
    "Instance",
    "Named",
    "Number",
    "Part",
    "Storage",
    "Tensor",
    "emit_pickle",
    "known",
    "size",
    "whole",
]

_UINT16, _UINT32, _INT32 = struct.Struct("<H").pack, struct.Struct("<I").pack, struct.Struct("<i").pack
_BATCH = 1000  # items per SETITEMS or APPENDS, as CPython's pickler has it


@dataclass(frozen=True, slots=True)
class Emitted:
    """A pickle, its storages in order, and the places in it (byte, key) of integers that are values of the state."""

    pickle: bytes
    storages: tuple[Storage, ...]
    numbers: tuple[tuple[int, str], ...]


def emit_pickle(value: Any, *, compact: bool = False) -> Emitted:
    """Writes a value: None, numbers, text, bytes, lists, tuples, sets, mappings, arrays, and the placeholders above.

    Arrays become NumPy's. With `compact`, only names, text and objects are remembered for reuse, so that large tables
    are smaller; otherwise the bytes are those of torch.save.

    Raises:
        TypeError: for anything else, an `Inert` record among it; the message says where it lies.
    """
    return _Emitter(compact).emit(value)


_STORAGES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "complex128": "ComplexDouble",
    "complex64": "ComplexFloat",
}  # fmt: skip
_REBUILD = Named("torch._utils", "_rebuild_tensor_v2")
_REBUILD_UNTYPED = Named("torch._utils", "_rebuild_tensor_v3")
_UNTYPED = Named("torch.storage", "UntypedStorage")
_ORDERED = Named("collections", "OrderedDict")
_ENCODE = Named("_codecs", "encode")
_RECONSTRUCT = Named("numpy.core.multiarray", "_reconstruct")


class _Unwritable(TypeError):
    """A value that cannot be written. `path` is where it lies, innermost first, filled on the way out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[Any] = []


class _Emitter:
    def __init__(self, compact: bool) -> None:
        self._compact = compact
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[Any, bytes] = {}  # what was written before, and the bytes that refer to it
        self._kept: list[Any] = []  # what the memo knows by identity must stay alive
        self._storages: dict[int, int] = {}
        self._order: list[Storage] = []
        self._numbers: list[tuple[int, str]] = []

    def emit(self, value: Any) -> Emitted:
        try:
            self._save(value)
        except _Unwritable as error:
            place = ".".join(str(step) for step in reversed(error.path)) or "the value itself"
            raise TypeError(f"cannot write {error} at {place}") from None
        self._out += b"."
        return Emitted(bytes(self._out), tuple(self._order), tuple(self._numbers))

    def _save(self, value: Any) -> None:
        kind = type(value)
        plain = _PLAIN.get(kind)
        if plain is not None:
            plain(self, value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, np.generic):
            self._save(value.item())
        elif isinstance(value, OrderedDict):
            self._ordered(value)
        elif isinstance(value, Mapping):
            self._dict(value)
        else:
            raise _Unwritable(_describe(value))

    def _put(self, value: Any) -> None:
        """Remembers the value on top of the stack, by value if it is text or a name, otherwise by identity."""
        key = value if isinstance(value, str | Named) else id(value)
        number = len(self._memo)
        where = bytes((number,)) if number < 256 else _UINT32(number)
        self._memo[key] = (b"h" if number < 256 else b"j") + where
        self._kept.append(value)
        self._out += (b"q" if number < 256 else b"r") + where

    def _put_container(self, value: Any) -> None:
        if not self._compact:
            self._put(value)

    def _get(self, key: Any) -> bool:
        """Writes a reference to what was written before; False if it was not."""
        reference = self._memo.get(key)
        if reference is None:
            return False
        self._out += reference
        return True

    def _none(self, value: None) -> None:
        self._out += b"N"

    def _bool(self, value: bool) -> None:
        self._out += b"\x88" if value else b"\x89"

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self._out += b"K" + bytes((value,))
        elif 0 <= value < 65_536:
            self._out += b"M" + _UINT16(value)
        elif -(1 << 31) <= value < 1 << 31:
            self._out += b"J" + _INT32(value)
        else:
            data = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
            if value < 0 and len(data) > 1 and data[-1] == 0xFF and data[-2] & 0x80:
                data = data[:-1]
            self._out += b"\x8a" + bytes((len(data),)) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))
            self._out += data

    def _number(self, value: Number) -> None:
        self._out += b"\x8a\x08"
        self._numbers.append((len(self._out), value.key))
        self._out += bytes(8)

    def _float(self, value: float) -> None:
        self._out += b"G" + struct.pack(">d", value)

    def _text(self, value: str) -> None:
        if not self._get(value):
            data = value.encode("utf-8", "surrogatepass")
            self._out += b"X" + struct.pack("<I", len(data)) + data
            self._put(value)

    def _named(self, value: Named) -> None:
        if not self._get(value):
            self._out += b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
            self._put(value)

    def _bytes(self, value: bytes) -> None:
        if self._get(id(value)):
            return
        if value:
            self._reduce(_ENCODE, (value.decode("latin-1"), "latin1"))
        else:
            self._reduce(Named("__builtin__", "bytes"), ())
        self._put(value)

    def _complex(self, value: complex) -> None:
        self._reduce(Named("__builtin__", "complex"), (value.real, value.imag))
        self._put_container(value)

    def _set(self, value: set[Any] | frozenset[Any]) -> None:
        members = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
        self._reduce(Named("__builtin__", type(value).__name__), (members,))
        self._put_container(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self._out += b")"
            return
        if self._get(id(value)):
            return
        if len(value) > 3:
            self._out += b"("
        for item in value:
            self._save(item)
        self._out += (b"t", b"\x85", b"\x86", b"\x87")[len(value) if len(value) < 4 else 0]
        self._put_container(value)

    def _list(self, value: list[Any]) -> None:
        if self._get(id(value)):
            return
        self._out += b"]"
        self._put_container(value)
        items = iter(enumerate(value))
        while batch := list(islice(items, _BATCH)):
            self._out += b"(" if len(batch) > 1 else b""
            for number, item in batch:
                self._inside(number, item)
            self._out += b"e" if len(batch) > 1 else b"a"

    def _dict(self, value: Mapping[Any, Any]) -> None:
        if self._get(id(value)):
            return
        self._out += b"}"
        self._put_container(value)
        self._items(value)

    def _ordered(self, value: OrderedDict[Any, Any]) -> None:
        if self._get(id(value)):
            return
        self._reduce(_ORDERED, ())
        self._put_container(value)
        self._items(value)

    def _items(self, value: Mapping[Any, Any]) -> None:
        items, memo = iter(value.items()), self._memo
        while batch := list(islice(items, _BATCH)):
            self._out += b"(" if len(batch) > 1 else b""
            for key, item in batch:
                reference = memo.get(key) if type(key) is str else None
                if reference is not None:
                    self._out += reference
                else:
                    self._save(key)
                self._inside(key, item)
            self._out += b"u" if len(batch) > 1 else b"s"

    def _inside(self, name: Any, item: Any) -> None:
        try:
            self._save(item)
        except _Unwritable as error:
            error.path.append(name)
            raise

    def _reduce(self, function: Named, args: tuple[Any, ...]) -> None:
        self._named(function)
        self._tuple(args)
        self._out += b"R"

    def _call(self, value: Call) -> None:
        if self._get(id(value)):
            return
        self._reduce(value.function, value.args)
        self._put(value)
        self._build(value.state)

    def _instance(self, value: Instance) -> None:
        if self._get(id(value)):
            return
        self._named(value.kind)
        self._out += b")\x81"
        self._put(value)
        self._build(value.state)

    def _build(self, state: Any) -> None:
        if state is not None:
            self._save(state)
            self._out += b"b"

    def _tensor(self, value: Tensor) -> None:
        """The call that rebuilds a tensor (`_reduce_ex_internal`); types without a storage of their own come last."""
        if self._get(id(value)):
            return
        typed = _STORAGES.get(value.storage.dtype.name)
        self._named(_REBUILD if typed else _REBUILD_UNTYPED)
        self._out += b"("
        self._storage(value.storage, typed)
        self._int(value.offset)
        self._tuple(value.shape)
        self._tuple(value.strides if value.strides is not None else dense_strides(value.shape))
        self._out += b"\x89"
        self._ordered(OrderedDict())
        if not typed:
            self._named(Named("torch", value.storage.dtype.name))
        self._out += b"t"
        self._put_container(object())
        self._out += b"R"
        self._put(value)

    def _storage(self, storage: Storage, typed: str | None) -> None:
        number = self._storages.setdefault(id(storage), len(self._storages))
        if number == len(self._order):
            self._order.append(storage)
        count = storage.num_elements if typed else storage.num_bytes
        kind = Named("torch", f"{typed}Storage") if typed else _UNTYPED
        self._tuple(("storage", kind, str(number), "cpu", count))
        self._out += b"Q"

    def _array(self, value: npt.NDArray[Any]) -> None:
        """An array as NumPy pickles it, under the name that releases before and after 2.0 know."""
        if value.dtype.hasobject or value.dtype.kind not in "biufc":
            raise _Unwritable(f"an array of {value.dtype}")
        little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<")).reshape(value.shape)
        code = little.dtype.str[1:]
        order = "<" if little.dtype.itemsize > 1 else "|"
        dtype = Call(Named("numpy", "dtype"), (code, False, True), (3, order, None, None, None, -1, -1, 0))
        state = (1, value.shape, dtype, False, little.tobytes())
        self._call(Call(_RECONSTRUCT, (Named("numpy", "ndarray"), (0,), b"b"), state))


_PLAIN: dict[type, Any] = {
    type(None): _Emitter._none, bool: _Emitter._bool, int: _Emitter._int, float: _Emitter._float, str: _Emitter._text,
    bytes: _Emitter._bytes, complex: _Emitter._complex, set: _Emitter._set, frozenset: _Emitter._set,
    tuple: _Emitter._tuple, list: _Emitter._list, dict: _Emitter._dict, Named: _Emitter._named, Call: _Emitter._call,
    Instance: _Emitter._instance, Tensor: _Emitter._tensor, Number: _Emitter._number,
}  # fmt: skip


def _describe(value: Any) -> str:
    name = getattr(value, "name", None)
    return f"a record of {name}" if isinstance(name, str) and hasattr(value, "state") else f"a {type(value).__name__}"

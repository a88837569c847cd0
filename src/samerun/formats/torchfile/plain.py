"""Plain data of stubs: those of known classes by what the class is, every other as a record of its name and state."""

from __future__ import annotations

from typing import Any

from samerun.core.dtype import DTYPES, DType
from samerun.formats.torchfile.known import KNOWN, RECORDS, is_size
from samerun.formats.torchfile.stubs import Locked, Persistent, Stub
from samerun.formats.torchfile.values import BACKWARD, Inert, TensorRef

# How many values a decoded pickle may amount to when written out in full, or a few per byte where that is more. A few
# bytes can refer to one list twice, to that list of two twice, and so on: every later step that visits or prints the
# values would take for ever.
MAX_VALUES = 5_000_000
_VALUES_PER_BYTE = 4


class Converter:
    """Turns stubs into plain data. Shared values are converted once; a value inside itself is a record there."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.unknown: set[str] = set()
        self._limit = max(MAX_VALUES, _VALUES_PER_BYTE * num_bytes)
        self._done: dict[int, Any] = {}
        self._amounts: dict[int, int] = {}
        self._amount = 0
        self._open: set[int] = set()
        self._kept: list[Any] = []

    def plain(self, value: Any) -> Any:
        self._amount += 1
        if value is None or type(value) in _SCALARS:
            return value
        identity = id(value)
        if identity in self._done:
            self._amount += self._amounts[identity]
        elif identity in self._open:
            self.meet(BACKWARD)
            return Inert(BACKWARD)
        else:
            before = self._amount
            self._open.add(identity)
            self._done[identity] = self._convert(value)
            self._open.discard(identity)
            self._amounts[identity] = self._amount - before
            self._kept.append(value)
        if self._amount > self._limit:
            raise ValueError(f"its values amount to more than {self._limit} when written out")
        return self._done[identity]

    def _convert(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.key(name): self.plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.plain(item) for item in value]
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, Persistent):
            return self._bare_storage(value)
        if isinstance(value, Locked):
            return self._reference(value)
        if isinstance(value, Stub):
            return self._stub(value)
        raise TypeError(f"cannot make plain data of {type(value).__name__}")

    def key(self, value: Any) -> Any:
        """Returns a mapping's key: itself when it is a scalar, its text otherwise."""
        if value is None or type(value) in _SCALARS:
            return value
        return str(self.plain(value))

    def _reference(self, stub: Any) -> Any:
        name = str(stub.qualified_name)
        if name.removeprefix("torch.") in DTYPES:
            return name
        self.meet(name)
        return Inert(name)

    def meet(self, name: str) -> None:
        """Remembers a class that is unknown, unless its records are understood."""
        if name not in RECORDS:
            self.unknown.add(name)

    def _stub(self, stub: Stub) -> Any:
        made = vars(stub)
        name = type(stub).qualified_name
        build = KNOWN.get(name)
        if build is not None:
            return build(self, made)
        self.meet(name)
        args = tuple(self.plain(arg) for arg in made["args"])
        items = [*made["items"], *(list(pair) for pair in made["pairs"])]
        return Inert(name, args, self.plain(made["state"]), tuple(self.plain(item) for item in items))

    def _bare_storage(self, value: Persistent) -> Any:
        """Returns a storage that stands alone as a tensor of one dimension, or a record of it if it is none."""
        try:
            key, dtype, count = self.storage(value)
        except ValueError:
            return Inert("torch storage", tuple(self.plain(part) for part in _parts(value.identity)))
        return TensorRef(key, dtype, 0, (count,), (1,), count)

    def storage(self, value: Any) -> tuple[str, DType, int]:
        """Returns a storage's key, element type and number of elements."""
        if not isinstance(value, Persistent):
            raise TypeError("a tensor does not refer to a storage")
        identity = value.identity
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise ValueError("a persistent reference is not a storage")
        _, kind, key, _, count = identity[:5]
        dtype = _STORAGE_DTYPES.get(getattr(kind, "qualified_name", "")) if isinstance(kind, Locked) else None
        if dtype is None or not isinstance(key, str | int) or not is_size(count):
            raise ValueError(f"unknown storage {getattr(kind, 'qualified_name', kind)!r}")
        return str(key), dtype, count


_SCALARS = frozenset({bool, int, float, complex, str, bytes})

_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexDouble": "complex128", "ComplexFloat": "complex64",
}  # fmt: skip
_STORAGE_DTYPES: dict[str, DType] = {
    **{f"torch.{name}Storage": DTYPES[dtype] for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": DTYPES["uint8"],
    "torch.UntypedStorage": DTYPES["uint8"],
}


def _parts(identity: Any) -> tuple[Any, ...]:
    return identity if isinstance(identity, tuple) else (identity,)

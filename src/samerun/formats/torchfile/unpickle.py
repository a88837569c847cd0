"""The restricted unpickler: builds values from a pickle without ever calling what the pickle names.

Decoding has two steps. Python's own decoder runs first, but every name in the pickle resolves to a stub that only
remembers what was done to it. Then `plain` turns the stubs of known classes into plain data and every other into an
`Inert` record. Neither step imports anything, and nothing that the pickle says is executed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from samerun.core.dtype import DTYPES, DType
from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.torchfile.scan import scan_pickle

# Everything that decoding a damaged pickle raises. MemoryError is among them: a scanned pickle is bounded by its file,
# but a file may be larger than memory.
DECODING_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Inert:
    """A value of a class that samerun does not know: its name and whatever it was built from, as plain data."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: tuple[Any, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the record as a mapping that JSON can hold if its parts can."""
        return {"class": self.name, "args": list(self.args), "state": self.state, "items": list(self.items)}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor inside a torch.save file: which storage, and which view of it. Offsets and strides in elements."""

    storage: str
    dtype: DType
    offset_elements: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_elements: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded pickle: the plain value, and the names of classes that were not known."""

    value: Any
    unknown: tuple[str, ...] = field(default=())


class Locked(type):
    """Metaclass of stubs. A pickle may ask to set attributes on anything it can name; on a class it must not."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError("a stub's class cannot be changed")

    def __delattr__(cls, name: str) -> None:
        raise TypeError("a stub's class cannot be changed")


class Stub(metaclass=Locked):
    """Remembers how a value was built. Its class stands for the name; calling the class is what REDUCE does."""

    qualified_name = ""

    def __new__(cls, *args: Any, **named: Any) -> Stub:
        stub = object.__new__(cls)
        vars(stub).update(args=args, named=named, state=None, items=[], pairs=[])
        return stub

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state

    def append(self, item: Any) -> None:
        vars(self)["items"].append(item)

    add = append

    def extend(self, items: Any) -> None:
        vars(self)["items"].extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self)["pairs"].append((key, value))


class _Persistent:
    """A reference that the file resolves itself: a storage."""

    __slots__ = ("identity",)

    def __init__(self, identity: Any) -> None:
        self.identity = identity


class RestrictedUnpickler(pickle.Unpickler):
    """Resolves every name to a stub class; subclasses may add cheaper stubs of their own for known names."""

    def __init__(self, file: Any, known: dict[tuple[str, str], Any] | None = None) -> None:
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._stubs: dict[tuple[str, str], Any] = dict(known or {})

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = (module_name, global_name)
        found = self._stubs.get(name)
        if found is None:
            found = self._nested if name in _GETATTR else _shared_stub(name) or _new_stub(name)
            self._stubs[name] = found
        return found

    def _nested(self, owner: Any, inner: Any) -> Any:
        """Stands in for `getattr`, by which a pickle names a class inside a class. Returns that class's stub."""
        outer = str(getattr(owner, "qualified_name", "")) if isinstance(owner, Locked) else ""
        if not outer or not isinstance(inner, str) or not inner.isidentifier() or ":" in outer:
            raise ValueError("a pickle reads an attribute of something that is no class")
        return self._stubs.setdefault((outer, inner), _new_stub((f"{outer}:", inner)))

    def persistent_load(self, pid: Any, /) -> Any:
        return _Persistent(pid)


_GETATTR = frozenset({("builtins", "getattr"), ("__builtin__", "getattr")})


def _new_stub(name: tuple[str, str]) -> type[Stub]:
    module = "builtins" if name[0] == "__builtin__" else name[0]  # protocols 0 to 2 keep Python 2's name
    return Locked("Stub", (Stub,), {"qualified_name": f"{module}.{name[1]}"})  # pyright: ignore[reportReturnType]


_shared: dict[tuple[str, str], type[Stub]] = {}


def _shared_stub(name: tuple[str, str]) -> type[Stub] | None:
    """Returns the one stub class of a name that torch.save files use again and again, made on first use."""
    if name[0] not in _COMMON_MODULES or (name not in _shared and len(_shared) > 500):
        return None
    return _shared.setdefault(name, _new_stub(name)) if name not in _shared else _shared[name]


_COMMON_MODULES = frozenset({"torch", "torch._utils", "collections", "numpy", "numpy.core.multiarray", "builtins"})


def decode_pickle(data: bytes, name: str) -> Decoded:
    """Scans and decodes a pickle into plain data. `name` says where it lies, for messages.

    Plain means numbers, strings, bytes, None, lists (tuples and sets become lists), dicts, `numpy.ndarray`,
    `TensorRef` and `Inert`.

    Raises:
        CorruptCheckpoint: if it is malformed or hostile.
    """
    known = _decoded.get(data)
    if known is not None:
        return known
    end = scan_pickle(data, name)
    try:
        stream = io.BufferedReader(io.BytesIO(data[:end]))  # pyright: ignore[reportArgumentType]
        raw = RestrictedUnpickler(stream).load()
        converter = Converter(len(data))
        decoded = Decoded(converter.plain(raw), tuple(sorted(converter.unknown)))
    except DECODING_ERRORS as error:
        raise broken_pickle(name, error) from None
    if len(data) <= _KEPT_BYTES and isinstance(decoded.value, TensorRef | bool | int | float | str | None):
        if len(_decoded) > _KEPT:
            _decoded.clear()
        _decoded[data] = decoded
    return decoded


# A checkpoint repeats the same few small pickles for thousands of items: equal shapes, equal hyperparameters. Only
# immutable values are kept.
_decoded: dict[bytes, Decoded] = {}
_KEPT, _KEPT_BYTES = 4_096, 512


def broken_pickle(name: str, error: BaseException) -> CorruptCheckpoint:
    """Returns the exception for a pickle that the decoder gave up on."""
    detail = str(error).split("\n")[0][:200]
    return CorruptCheckpoint(
        Problem(
            "SR-PKL-BROKEN",
            f"the pickle cannot be decoded: {type(error).__name__}{f' ({detail})' if detail else ''}",
            where={"file": name},
            hint="the file is damaged; restore it from the source",
        )
    )


# How many values a decoded pickle may amount to when written out in full, or a few per byte where that is more. A few
# bytes can refer to one list twice, to that list of two twice, and so on: every later step that visits or prints the
# values would take for ever.
MAX_VALUES = 5_000_000
_VALUES_PER_BYTE = 4


class Converter:
    """Turns stubs into plain data. Shared values are converted once; a value inside itself is refused."""

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
            raise ValueError("a value contains itself")
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
        if isinstance(value, _Persistent):
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
        build = _KNOWN.get(name)
        if build is not None:
            return build(self, made)
        self.meet(name)
        args = tuple(self.plain(arg) for arg in made["args"])
        items = [*made["items"], *(list(pair) for pair in made["pairs"])]
        return Inert(name, args, self.plain(made["state"]), tuple(self.plain(item) for item in items))

    def _bare_storage(self, value: _Persistent) -> Any:
        """Returns a storage that stands alone as a tensor of one dimension, or a record of it if it is none."""
        try:
            key, dtype, count = self.storage(value)
        except ValueError:
            return Inert("torch storage", tuple(self.plain(part) for part in _parts(value.identity)))
        return TensorRef(key, dtype, 0, (count,), (1,), count)

    def storage(self, value: Any) -> tuple[str, DType, int]:
        """Returns a storage's key, element type and number of elements."""
        if not isinstance(value, _Persistent):
            raise TypeError("a tensor does not refer to a storage")
        identity = value.identity
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise ValueError("a persistent reference is not a storage")
        _, kind, key, _, count = identity[:5]
        dtype = _STORAGE_DTYPES.get(getattr(kind, "qualified_name", "")) if isinstance(kind, Locked) else None
        if dtype is None or not isinstance(key, str | int) or not _is_size(count):
            raise ValueError(f"unknown storage {getattr(kind, 'qualified_name', kind)!r}")
        return str(key), dtype, count


# Classes that stay records and are understood by the readers that meet them: the pickled forms of distributed tensors.
_SHARDED = "torch.distributed._shard"
_DTENSOR = "torch.distributed.tensor"
RECORDS = frozenset({
    "torch.serialization._get_layout",
    "torch.distributed.remote_device._remote_device",
    f"{_SHARDED}.metadata.ShardMetadata",
    f"{_SHARDED}.sharded_tensor.api.ShardedTensor",
    f"{_SHARDED}.sharded_tensor.api.ShardedTensor:.ProcessGroupState",
    f"{_SHARDED}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_SHARDED}.sharded_tensor.metadata.ShardedTensorMetadata",
    f"{_SHARDED}.sharded_tensor.metadata.TensorProperties",
    f"{_SHARDED}.sharded_tensor.shard.Shard",
    f"{_SHARDED}.sharding_spec.api.EnumerableShardingSpec",
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed._mesh_layout._FlatLayout",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed._tensor.placement_types.DTensorSpec",
    "torch.distributed._tensor.placement_types.TensorMeta",
    *(f"torch.distributed._tensor.placement_types.{name}" for name in ("Shard", "Replicate", "Partial", "_Partial")),
    f"{_DTENSOR}.DTensor",
    f"{_DTENSOR}._dtensor_spec.DTensorSpec",
    f"{_DTENSOR}._dtensor_spec.ShardOrderEntry",
    f"{_DTENSOR}._dtensor_spec.TensorMeta",
    *(f"{_DTENSOR}.placement_types.{name}" for name in ("Shard", "_StridedShard", "Replicate", "Partial")),
})  # fmt: skip

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


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Stub) and type(value).qualified_name == "torch.Size":
        value = vars(value)["args"][0]
    if not isinstance(value, tuple) or len(value) > 64 or not all(_is_size(item) for item in value):
        raise ValueError("a tensor's shape or strides are not sizes")
    return value


def _tensor(converter: Converter, storage: Any, offset: Any, shape: Any, strides: Any, dtype: str = "") -> TensorRef:
    key, kind, count = converter.storage(storage)
    sizes, steps = _sizes(shape), _sizes(strides)
    if len(sizes) != len(steps) or not _is_size(offset):
        raise ValueError("a tensor's shape and strides do not match")
    if dtype:  # an untyped storage counts bytes
        bytes_per_element = DTYPES[dtype].num_bytes
        return TensorRef(key, DTYPES[dtype], offset, sizes, steps, count * kind.num_bytes // bytes_per_element)
    return TensorRef(key, kind, offset, sizes, steps, count)


def _tensor_v2(converter: Converter, made: dict[str, Any]) -> TensorRef:
    return _tensor(converter, *made["args"][:4])


def _tensor_v3(converter: Converter, made: dict[str, Any]) -> Any:
    name = made["args"][6].qualified_name.removeprefix("torch.")
    if name not in DTYPES:
        converter.meet(f"tensor of torch.{name}")
        return Inert(f"tensor of torch.{name}", tuple(converter.plain(arg) for arg in made["args"][:4]))
    return _tensor(converter, *made["args"][:4], dtype=name)


def _parameter(converter: Converter, made: dict[str, Any]) -> Any:
    return converter.plain(made["args"][0])


def _from_type(converter: Converter, made: dict[str, Any]) -> Any:
    """Unwraps a tensor subclass that is rebuilt like a tensor; one that wraps others becomes a record of its parts."""
    rebuild, kind, args, *state = made["args"]
    build = _KNOWN.get(getattr(rebuild, "qualified_name", ""))
    if not isinstance(args, tuple):
        raise ValueError(f"a tensor subclass {kind!r} is rebuilt in an unknown way")
    if build is not None:
        return build(converter, {"args": args})
    name = str(getattr(kind, "qualified_name", "tensor subclass"))
    converter.meet(name)
    return Inert(name, tuple(converter.plain(arg) for arg in args), converter.plain(state[0] if state else None))


def _mapping(converter: Converter, made: dict[str, Any]) -> dict[Any, Any]:
    pairs: list[Any] = []
    for arg in made["args"]:
        if isinstance(arg, dict):
            pairs.extend(arg.items())
        elif isinstance(arg, list | tuple):
            pairs.extend(arg)
    pairs.extend(made["pairs"])
    return {converter.key(name): converter.plain(item) for name, item in pairs}


def _sequence(converter: Converter, made: dict[str, Any]) -> list[Any]:
    first = made["args"][0] if made["args"] else []
    return [converter.plain(item) for item in [*first, *made["items"]]]


def _text(converter: Converter, made: dict[str, Any]) -> str:
    return str(converter.plain(made["args"][0])) if made["args"] else ""


def _path(converter: Converter, made: dict[str, Any]) -> str:
    parts = [str(part) for part in made["args"]]
    return "/".join(part for part in parts if part != "/") if parts[:1] != ["/"] else "/" + "/".join(parts[1:])


def _namespace(converter: Converter, made: dict[str, Any]) -> Any:
    return converter.plain(made["state"] if made["state"] is not None else made["named"])


def _encoded(converter: Converter, made: dict[str, Any]) -> bytes:
    text, encoding = made["args"][:2]
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are written in the unusual encoding {encoding!r}")
    return text.encode("latin-1")


def _bytes(converter: Converter, made: dict[str, Any]) -> bytes:
    first = converter.plain(made["args"][0]) if made["args"] else b""
    if isinstance(first, bytes):
        return first
    if isinstance(first, str) and len(made["args"]) > 1:
        return first.encode("latin-1")
    raise ValueError("bytes are built from something that is not bytes")


def _complex(converter: Converter, made: dict[str, Any]) -> complex:
    real, imaginary = made["args"]
    return complex(float(real), float(imaginary))


def _array_type(value: Any) -> Any:
    """Returns the NumPy dtype that a stub of `numpy.dtype` describes. Objects and structures are refused."""
    import numpy as np

    if not isinstance(value, Stub) or type(value).qualified_name != "numpy.dtype":
        raise ValueError("an array has no element type")
    made = vars(value)
    kind = np.dtype(made["args"][0]) if isinstance(made["args"][0], str) else np.dtype("O")
    if kind.hasobject or kind.fields is not None or kind.subdtype is not None:
        raise ValueError(f"arrays of {kind} are not read")
    state = made["state"]
    return kind.newbyteorder(state[1]) if isinstance(state, tuple) and len(state) > 1 and state[1] in "<>" else kind


def _array_bytes(converter: Converter, value: Any) -> bytes:
    """Returns an array's raw data: bytes, a bytearray, or the latin-1 call that protocol 2 writes instead."""
    data = converter.plain(value)
    if not isinstance(data, bytes):
        raise ValueError("an array's data are not bytes")
    return data


def _array(converter: Converter, made: dict[str, Any]) -> Any:
    import numpy as np

    _, shape, kind, fortran, data = made["state"]
    array = np.frombuffer(_array_bytes(converter, data), _array_type(kind))
    return array.reshape(_sizes(shape), order="F" if fortran else "C").astype(array.dtype.newbyteorder("="))


def _array_from_buffer(converter: Converter, made: dict[str, Any]) -> Any:
    import numpy as np

    data, kind, shape, order = made["args"][:4]
    array = np.frombuffer(_array_bytes(converter, data), _array_type(kind))
    return array.reshape(_sizes(shape), order="F" if order == "F" else "C").astype(array.dtype.newbyteorder("="))


def _array_scalar(converter: Converter, made: dict[str, Any]) -> Any:
    import numpy as np

    kind, data = made["args"][:2]
    found = np.frombuffer(_array_bytes(converter, data), _array_type(kind))
    if found.size != 1:
        raise ValueError("a NumPy scalar does not hold one value")
    return found[0].item()


def _device(converter: Converter, made: dict[str, Any]) -> str:
    return ":".join(str(converter.plain(arg)) for arg in made["args"])


_KNOWN: dict[str, Callable[[Converter, dict[str, Any]], Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": lambda converter, made: _mapping(converter, {**made, "args": made["args"][1:]}),
    "collections.Counter": _mapping,
    "collections.deque": _sequence,
    "builtins.set": _sequence,
    "builtins.frozenset": _sequence,
    "builtins.list": _sequence,
    "builtins.tuple": _sequence,
    "builtins.dict": _mapping,
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encoded,
    "pathlib.PosixPath": _path,
    "pathlib.WindowsPath": _path,
    "pathlib.PurePosixPath": _path,
    "pathlib._local.PosixPath": _path,
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _namespace,
    "torch.Size": _sequence,
    "torch.device": _device,
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.torch_version.TorchVersion": _text,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _array_scalar,
    "numpy._core.multiarray.scalar": _array_scalar,
    "numpy.core.numeric._frombuffer": _array_from_buffer,
    "numpy._core.numeric._frombuffer": _array_from_buffer,
    "numpy.dtype": lambda converter, made: str(converter.plain(made["args"][0])),
}

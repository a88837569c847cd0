"""Classes that torch.save files name, and the plain data that each stands for. Nothing of a pickle is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from samerun.core.dtype import DTYPES
from samerun.formats.torchfile.stubs import Stub
from samerun.formats.torchfile.values import PICKLED_TENSOR, Inert, TensorRef

if TYPE_CHECKING:
    from samerun.formats.torchfile.plain import Converter

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


def is_size(value: Any) -> bool:
    """Returns whether a value of a pickle can be a size in elements."""
    return type(value) is int and 0 <= value < 1 << 62


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Stub) and type(value).qualified_name == "torch.Size":
        value = vars(value)["args"][0]
    if not isinstance(value, tuple) or len(value) > 64 or not all(is_size(item) for item in value):
        raise ValueError("a tensor's shape or strides are not sizes")
    return value


def _tensor(converter: Converter, storage: Any, offset: Any, shape: Any, strides: Any, dtype: str = "") -> TensorRef:
    key, kind, count = converter.storage(storage)
    sizes, steps = _sizes(shape), _sizes(strides)
    if len(sizes) != len(steps) or not is_size(offset):
        raise ValueError("a tensor's shape and strides do not match")
    if dtype:  # an untyped storage counts bytes
        bytes_per_element = DTYPES[dtype].num_bytes
        return TensorRef(key, DTYPES[dtype], offset, sizes, steps, count * kind.num_bytes // bytes_per_element)
    return TensorRef(key, kind, offset, sizes, steps, count)


def _tensor_v2(converter: Converter, made: dict[str, Any]) -> Any:
    storage = made["args"][0]
    if isinstance(storage, Stub) and type(storage).qualified_name == "torch.storage._load_from_bytes":
        converter.meet(PICKLED_TENSOR)
        return Inert(PICKLED_TENSOR, tuple(converter.plain(arg) for arg in made["args"][1:3]))
    return _as_is(converter, _tensor(converter, *made["args"][:4]), made["args"][6:])


def _tensor_v3(converter: Converter, made: dict[str, Any]) -> Any:
    name = made["args"][6].qualified_name.removeprefix("torch.")
    if name not in DTYPES:
        converter.meet(f"tensor of torch.{name}")
        return Inert(f"tensor of torch.{name}", tuple(converter.plain(arg) for arg in made["args"][:4]))
    return _as_is(converter, _tensor(converter, *made["args"][:4], dtype=name), made["args"][7:])


def _as_is(converter: Converter, tensor: TensorRef, metadata: tuple[Any, ...]) -> Any:
    """Returns a tensor whose values are the stored ones; a record of one that is their conjugate or negative.

    torch keeps `conj()` and the imaginary part of a conjugate as views with a bit, which `torch.save` (2.0 to 2.13)
    writes beside the storage: {"conj": True} or {"neg": True}.
    """
    marks = metadata[0] if metadata and isinstance(metadata[0], dict) else {}
    names = [said for bit, said in (("conj", "conjugate"), ("neg", "negative")) if marks.get(bit)]
    if not names:
        return tensor
    kind = f"the {' and '.join(names)} of the stored tensor"
    converter.meet(kind)
    return Inert(kind, (tensor,))


def _parameter(converter: Converter, made: dict[str, Any]) -> Any:
    return converter.plain(made["args"][0])


def _from_type(converter: Converter, made: dict[str, Any]) -> Any:
    """Unwraps a tensor subclass that is rebuilt like a tensor; one that wraps others becomes a record of its parts."""
    rebuild, kind, args, *state = made["args"]
    build = KNOWN.get(getattr(rebuild, "qualified_name", ""))
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


_PLAIN_KINDS = "biufcSU"  # of NumPy's kinds of elements: no objects, structures, times or types of other packages


def _array_type(value: Any) -> Any:
    """Returns the NumPy dtype that a stub of `numpy.dtype` describes, None for one that is no plain number or text."""
    import numpy as np

    if not isinstance(value, Stub) or type(value).qualified_name != "numpy.dtype":
        raise ValueError("an array has no element type")
    made = vars(value)
    kind = np.dtype(made["args"][0]) if isinstance(made["args"][0], str) else np.dtype("O")
    if kind.kind not in _PLAIN_KINDS or kind.type in (np.longdouble, np.clongdouble):
        return None
    state = made["state"]
    return kind.newbyteorder(state[1]) if isinstance(state, tuple) and len(state) > 1 and state[1] in "<>" else kind


def _array_bytes(converter: Converter, value: Any) -> bytes:
    """Returns an array's raw data: bytes, a bytearray, or the latin-1 call that protocol 2 writes instead."""
    data = converter.plain(value)
    if not isinstance(data, bytes):
        raise ValueError("an array's data are not bytes")
    return data


def _unread_array(converter: Converter, kind: Any, *parts: Any) -> Inert:
    """Returns the record of an array whose elements are not read: its element type, and what it was built from."""
    name = f"numpy.ndarray of {converter.plain(kind)}"
    converter.meet(name)
    return Inert(name, tuple(converter.plain(part) for part in parts))


def _array(converter: Converter, made: dict[str, Any]) -> Any:
    import numpy as np

    _, shape, kind, fortran, data = made["state"]
    found = _array_type(kind)
    if found is None:
        return _unread_array(converter, kind, shape, data)
    array = np.frombuffer(_array_bytes(converter, data), found)
    return array.reshape(_sizes(shape), order="F" if fortran else "C").astype(array.dtype.newbyteorder("="))


def _array_from_buffer(converter: Converter, made: dict[str, Any]) -> Any:
    import numpy as np

    data, kind, shape, order = made["args"][:4]
    found = _array_type(kind)
    if found is None:
        return _unread_array(converter, kind, shape, data)
    array = np.frombuffer(_array_bytes(converter, data), found)
    return array.reshape(_sizes(shape), order="F" if order == "F" else "C").astype(array.dtype.newbyteorder("="))


def _array_scalar(converter: Converter, made: dict[str, Any]) -> Any:
    import numpy as np

    kind, data = made["args"][:2]
    element = _array_type(kind)
    if element is None:
        return _unread_array(converter, kind, (), data)
    found = np.frombuffer(_array_bytes(converter, data), element)
    if found.size != 1:
        raise ValueError("a NumPy scalar does not hold one value")
    return found[0].item()


def _device(converter: Converter, made: dict[str, Any]) -> str:
    return ":".join(str(converter.plain(arg)) for arg in made["args"])


KNOWN: dict[str, Callable[[Converter, dict[str, Any]], Any]] = {
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

"""Any saved object as plain, comparable data: the form in which a job's objects meet a checkpoint's."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Any, cast

import numpy as np

from samerun.core.digest import digest_array

# Returns the NumPy form of a foreign array (a torch tensor), or None if the value is no array.
ArrayReader = Callable[[Any], "np.ndarray[Any, Any] | None"]


def plain(value: Any, path: str = "", read_array: ArrayReader | None = None) -> Any:
    """Returns `value` as JSON-able data in which equal things are equal whatever container held them.

    Arrays become their dtype, shape and digest (and value, if they hold one number); non-finite floats become strings;
    tuples and sets become lists; functions and foreign objects become the name of what they are, which
    `is_opaque` recognises. `path` names the place inside the object and ties digests to it.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value, path, read_array)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, np.ndarray):
        return _plain_array(value, path)
    if isinstance(value, bytes | bytearray):
        return {"bytes": len(value), "digest": blake2b(value, digest_size=8).hexdigest()}
    if isinstance(value, Mapping | list | tuple | AbstractSet):
        return _plain_container(value, path, read_array)
    if read_array is not None and (array := read_array(value)) is not None:
        return _plain_array(array, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain(fields, path, read_array)
    return _opaque(value)


def is_blank(value: Any) -> bool:
    """Whether a value says nothing: None, or an empty text or container, or a container of nothing else."""
    if isinstance(value, Mapping):
        return all(is_blank(item) for item in cast("Mapping[Any, Any]", value).values())
    if isinstance(value, list | tuple):
        return all(is_blank(item) for item in value)
    return value is None or (isinstance(value, str | bytes) and not value)


def _plain_container(value: Any, path: str, read_array: ArrayReader | None) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        texts = {str(name) for name in items}
        names = {name: str(name) if len(texts) == len(items) else repr(name) for name in items}  # 1 beside "1"
        return {
            names[name]: plain(item, f"{path}.{names[name]}" if path else names[name], read_array)
            for name, item in items.items()
        }
    ordered = sorted(value, key=repr) if isinstance(value, AbstractSet) else value
    return [plain(item, f"{path}.{number}", read_array) for number, item in enumerate(ordered)]


def _plain_array(array: np.ndarray[Any, Any], path: str) -> Any:
    if (
        array.dtype.kind in "OUSV"
        and array.dtype.name not in ("bfloat16",)
        and not array.dtype.name.startswith("float8")
    ):
        return plain(array.tolist(), path)
    body: dict[str, Any] = {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "digest": digest_array(f"object:{path}", array),
    }
    if array.size == 1:
        body["value"] = plain(array.reshape(-1)[0].item(), path)
    return body


def _opaque(value: Any) -> dict[str, str]:
    kind = value if isinstance(value, type) or callable(value) else type(value)
    name = getattr(kind, "__qualname__", type(value).__qualname__)
    return {"opaque": f"{getattr(kind, '__module__', '')}.{name}"}


def is_opaque(value: Any) -> bool:
    """Returns whether plain data stands for something whose value cannot be compared, only its type."""
    return isinstance(value, Mapping) and set(cast("Mapping[str, Any]", value)) == {"opaque"}


def same_plain(a: Any, b: Any) -> bool:
    """Returns whether two pieces of plain data are equal; 12 and 12.0 are, True and 1 are not.

    A one-element array equals the number that it holds, because formats differ in which of the two they keep.
    """
    a, b = unbox(a), unbox(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        left, right = cast("Mapping[str, Any]", a), cast("Mapping[str, Any]", b)
        return left.keys() == right.keys() and all(same_plain(left[name], right[name]) for name in left)
    if isinstance(a, list) and isinstance(b, list):
        first, second = cast("list[Any]", a), cast("list[Any]", b)
        return len(first) == len(second) and all(same_plain(x, y) for x, y in zip(first, second, strict=True))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def unbox(value: Any) -> Any:
    """Returns the number in a one-element array's plain form; anything else as it is."""
    if isinstance(value, Mapping) and {"dtype", "shape", "value"} <= set(cast("Mapping[str, Any]", value)):
        return cast("Mapping[str, Any]", value)["value"]
    return cast("Any", value)


def differing_paths(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Returns (path, value in a, value in b) for each leaf at which two pieces of plain data disagree.

    A side that lacks the path altogether is given as `MISSING`.
    """
    a, b = unbox(a), unbox(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping) and not (_is_leaf(a) or _is_leaf(b)):
        left, right = cast("Mapping[str, Any]", a), cast("Mapping[str, Any]", b)
        names = [*left, *(name for name in right if name not in left)]
        return [
            difference
            for name in names
            for difference in differing_paths(
                left.get(name, MISSING), right.get(name, MISSING), f"{path}.{name}" if path else name
            )
        ]
    if isinstance(a, list) and isinstance(b, list) and len(cast("list[Any]", a)) == len(cast("list[Any]", b)):
        pairs = zip(cast("list[Any]", a), cast("list[Any]", b), strict=True)
        return [d for number, (x, y) in enumerate(pairs) for d in differing_paths(x, y, f"{path}.{number}")]
    return [] if same_plain(a, b) else [(path, a, b)]


def _is_leaf(value: Any) -> bool:
    return is_opaque(value) or "digest" in value


MISSING = "(absent)"

"""What samerun's own export keeps as JSON beside its tensors: groups, progress, scheduler, RNG, data, objects, ties.

A document of schema `samerun/state/1`. Values that JSON has no form for are written as mappings with one key that
begins with `$`: `$array` (dtype, shape, base64 of little-endian values), `$bytes` (base64), `$float` (nan, inf, -inf),
`$complex`, `$record` (class, args, state, items) and `$mapping` (pairs, where a key is not text).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, RecordedProgress, Topology
from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.torchfile.values import Inert

SCHEMA = "samerun/state/1"


@dataclass(frozen=True, slots=True, eq=False)
class Sidecar:
    """The parts of a logical state that are no tensors. `aliases` are by tensor key."""

    groups: tuple[ParamGroup, ...] = ()
    progress: RecordedProgress = field(default_factory=RecordedProgress)
    scheduler: Mapping[str, Any] | None = None
    rng: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    topology: Topology = field(default_factory=Topology)
    written_by: Mapping[str, str] = field(default_factory=dict[str, str])
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def dump_sidecar(state: LogicalState) -> str:
    """Returns the document that `parse_sidecar` reads back."""
    topology = state.topology
    body = {
        "schema": SCHEMA,
        "groups": [
            {"params": list(group.params), "hyperparameters": encode(dict(group.hyperparameters))}
            for group in state.groups
        ],
        "progress": {name: getattr(state.progress, name) for name in ("update", "samples", "tokens", "epoch")},
        "scheduler": encode(state.scheduler),
        "rng": encode(state.rng),
        "data": encode(state.data),
        "objects": encode(state.objects),
        "topology": {
            "world_size": topology.world_size,
            "layout": topology.layout.to_dict() if topology.layout else None,
            "inferred": topology.inferred,
        },
        "written_by": dict(state.written_by),
        "aliases": {key: list(entry.aliases) for key, entry in state.tensors.items() if entry.aliases},
    }
    return json.dumps(body, indent=1, sort_keys=True, allow_nan=False)


def parse_sidecar(text: str | bytes, name: str) -> Sidecar:
    """Reads the document back. `name` says where it lies, for messages.

    Raises:
        CorruptCheckpoint: if it is not such a document.
    """
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return _sidecar(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            Problem(
                "SR-META-SIDECAR",
                f"the state beside the tensors cannot be read: {error}",
                where={"file": name},
                hint="export the checkpoint again; the tensors themselves are not affected",
            )
        ) from None


def _sidecar(body: Mapping[str, Any]) -> Sidecar:
    topology = body.get("topology") or {}
    layout = topology.get("layout")
    return Sidecar(
        groups=tuple(
            ParamGroup(tuple(map(str, group["params"])), decode(group["hyperparameters"])) for group in body["groups"]
        ),
        progress=RecordedProgress(**body["progress"]),
        scheduler=decode(body.get("scheduler")),
        rng=decode(body.get("rng", {})),
        data=decode(body.get("data", {})),
        objects=decode(body.get("objects", {})),
        topology=Topology(
            world_size=topology.get("world_size"),
            layout=Layout.from_dict(layout) if layout else None,
            inferred=topology.get("inferred"),
        ),
        written_by={str(key): str(value) for key, value in body.get("written_by", {}).items()},
        aliases={str(key): tuple(map(str, names)) for key, names in body.get("aliases", {}).items()},
    )


def encode(value: Any) -> Any:
    """Returns a plain value in the form that JSON can hold.

    >>> encode({"a": b"xy", "b": [1, float("inf")]})
    {'a': {'$bytes': 'eHk='}, 'b': [1, {'$float': 'inf'}]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        return _encode_mapping(value)
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"))
        kind = value.dtype.str[1:] if value.dtype.kind in "US" else value.dtype.name  # text of so many letters: U3
        return {"$array": [kind, list(value.shape), base64.b64encode(data.tobytes()).decode("ascii")]}
    if isinstance(value, Inert):
        parts = [value.name, list(value.args), value.state, list(value.items)]
        return {"$record": [encode(part) for part in parts]}
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _encode_mapping(value: Mapping[Any, Any]) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item) for key, item in value.items()}
    return {"$mapping": [[encode(key), encode(item)] for key, item in value.items()]}


def decode(value: Any) -> Any:
    """Returns the plain value that `encode` wrote. Raises ValueError or TypeError for a malformed one.

    >>> decode({"a": {"$bytes": "eHk="}, "b": [1, {"$float": "inf"}]})
    {'a': b'xy', 'b': [1, inf]}
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        kind, body = next(iter(value.items()))
        if kind in _DECODERS:
            return _DECODERS[kind](body)
    return {key: decode(item) for key, item in value.items()}


def _decode_array(body: Any) -> Any:
    name, shape, data = body
    if name == "bfloat16" or str(name).startswith("float8"):
        import ml_dtypes

        kind = np.dtype(getattr(ml_dtypes, str(name)))
    else:
        kind = np.dtype(str(name))
    if kind.hasobject:
        raise ValueError("an array of objects")
    array = np.frombuffer(base64.b64decode(data, validate=True), kind.newbyteorder("<")).reshape(shape)
    return array.astype(kind)


def _decode_bytes(body: Any) -> bytes:
    return base64.b64decode(body, validate=True)


def _decode_complex(body: Any) -> complex:
    return complex(decode(body[0]), decode(body[1]))


def _decode_record(body: Any) -> Inert:
    return Inert(str(body[0]), tuple(decode(body[1])), decode(body[2]), tuple(decode(body[3])))


def _decode_pairs(body: Any) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in body}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$array": _decode_array,
    "$bytes": _decode_bytes,
    "$float": float,
    "$complex": _decode_complex,
    "$record": _decode_record,
    "$mapping": _decode_pairs,
}

"""The pickle of `.metadata`: which tensors and objects a directory holds, and where each chunk lies.

What torch 2.13 writes (`torch/distributed/checkpoint/metadata.py`, `filesystem.py`); every release since 2.0 reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.dtype import DType
from samerun.formats.torchfile.emit import emit_pickle
from samerun.formats.torchfile.nodes import Call, Instance, Named, size

_MODULE = "torch.distributed.checkpoint.metadata"
_BYTES = Named(_MODULE, "BytesStorageMetadata")
_CHUNK = Named(_MODULE, "ChunkStorageMetadata")
_METADATA = Named(_MODULE, "Metadata")
_INDEX = Named(_MODULE, "MetadataIndex")
_ABOUT = Named(_MODULE, "StorageMeta")
_PROPERTIES = Named(_MODULE, "TensorProperties")
_TENSOR = Named(_MODULE, "TensorStorageMetadata")
_PLACE = Named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_LAYOUT = Call(Named("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Named(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box of a tensor and where its item lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One named item: a tensor with its chunks, or an object (no dtype) with the one place where it lies."""

    path: tuple[str | int, ...]
    chunks: Sequence[Chunk]
    shape: tuple[int, ...] = ()
    dtype: DType | None = None

    @property
    def name(self) -> str:
        """The flat name: the path joined by dots."""
        return ".".join(map(str, self.path))


def emit_metadata(items: Sequence[Stored]) -> bytes:
    """Returns the content of `.metadata`."""
    sizes = _Sizes()
    properties: dict[str, Instance] = {}
    described: dict[str, Any] = {}
    places: dict[Instance, Instance] = {}
    for item in items:
        described[item.name] = _describe(item, sizes, properties)
        for number, chunk in enumerate(item.chunks):
            key: dict[str, Any] = {"fqn": item.name, "index": None if item.dtype is None else number}
            if item.dtype is not None:
                key["offset"] = sizes.of(chunk.offsets)
            place = {"relative_path": chunk.file, "offset": chunk.at, "length": chunk.length}
            places[Instance(_INDEX, key)] = Instance(_PLACE, place)
    summary = repr([(item.name, item.shape, len(item.chunks)) for item in items])
    identity = hashlib.sha256(summary.encode()).hexdigest()
    save_id = "-".join((identity[:8], identity[8:12], identity[12:16], identity[16:20], identity[20:32]))
    about = {"checkpoint_id": None, "save_id": save_id, "load_id": None, "modules": []}
    fields = {
        "state_dict_metadata": described,
        "planner_data": {item.name: item.path for item in items},
        "storage_data": places,
        "storage_meta": Instance(_ABOUT, about),
        "version": "1.0.0",
    }
    return emit_pickle(Instance(_METADATA, fields), compact=True).pickle


class _Sizes:
    """Each size is written once and referred to afterwards: most offsets are equal."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Call] = {}

    def of(self, values: tuple[int, ...]) -> Call:
        found = self._known.get(values)
        if found is None:
            found = self._known[values] = size(values)
        return found


def _describe(item: Stored, sizes: _Sizes, properties: dict[str, Instance]) -> Instance:
    if item.dtype is None:
        return Instance(_BYTES, {})
    known = properties.get(item.dtype.name)
    if known is None:
        state = (Named("torch", item.dtype.name), _LAYOUT, False, _CONTIGUOUS, False)
        known = properties[item.dtype.name] = Instance(_PROPERTIES, state)
    chunks = [
        Instance(_CHUNK, {"offsets": sizes.of(chunk.offsets), "sizes": sizes.of(chunk.sizes)}) for chunk in item.chunks
    ]
    fields = {"properties": known, "size": sizes.of(item.shape), "chunks": chunks}
    return Instance(_TENSOR, fields)

"""Lays out tensors as safetensors files, alone or in numbered parts with an index, as Hugging Face's loaders read them.

The files are as the `safetensors` library (0.8) writes them: tensors by falling element size, then by name, behind a
header padded to eight bytes, so that every tensor is aligned to its elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samerun.core.state import TensorEntry
from samerun.core.written import FilePlan, Literal, TensorSlots
from samerun.errors import Problem
from samerun.formats.statedict.safefile import STORED_NAMES

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    """A tensor of the state and the name that the file gives it."""

    name: str
    entry: TensorEntry


@dataclass(frozen=True, slots=True, eq=False)
class SafeFiles:
    """The files, an index last if there are several parts, and where each tensor goes."""

    files: tuple[FilePlan, ...]
    tensors: tuple[TensorSlots, ...]


def has_type(entry: TensorEntry) -> bool:
    """Whether safetensors has the tensor's element type."""
    return entry.dtype.name in STORED_NAMES


def lay_out_weights(
    stem: str,
    tensors: Sequence[NamedTensor],
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    first_file: int = 0,
) -> SafeFiles:
    """Lays out `stem.safetensors`, or `stem-00001-of-0000N.safetensors` with `stem.safetensors.index.json`.

    Args:
        stem: what the files' names begin with.
        tensors: whole tensors, each of a type that safetensors has. Parts are filled in this order.
        max_shard_bytes: the most that one part holds, unless a single tensor is larger; one file by default.
        metadata: what the header says beside `format: pt`.
        first_file: the number of the first file among those of the whole destination.
    """
    parts = _deal(tensors, max_shard_bytes)
    names = [f"{stem}-{n + 1:05d}-of-{len(parts):05d}.safetensors" for n in range(len(parts))]
    names = names if len(parts) > 1 else [f"{stem}.safetensors"]
    files: list[FilePlan] = []
    slots: list[TensorSlots] = []
    for name, part in zip(names, parts, strict=True):
        inside = {tensor.name for tensor in part}
        kept = {alias: owner for alias, owner in (metadata or {}).items() if owner in inside}
        file, placed = _lay_out_file(name, first_file + len(files), part, kept)
        files.append(file)
        slots += placed
    if len(parts) > 1:
        files.append(text_file(f"{stem}.safetensors.index.json", _index(names, parts)))
    return SafeFiles(tuple(files), tuple(slots))


def text_file(name: str, text: str) -> FilePlan:
    """Returns a file whose whole content is known."""
    content = text.encode()
    return FilePlan(path=name, size=len(content), literals=(Literal(0, content),) if content else ())


def report_type(entry: TensorEntry) -> Problem:
    """Returns the finding about a tensor for whose type there is no name here."""
    return Problem(
        "SR-CONVERT-TYPE",
        f"safetensors has no element type {entry.dtype.name}: the tensor would be left out",
        where={"tensor": str(entry.key)},
        hint="convert to dcp or torch, or give it another type with --dtype",
    )


def _deal(tensors: Sequence[NamedTensor], max_bytes: int | None) -> list[list[NamedTensor]]:
    parts: list[list[NamedTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if max_bytes is not None and parts[-1] and held + tensor.entry.num_bytes > max_bytes:
            parts.append([])
            held = 0
        parts[-1].append(tensor)
        held += tensor.entry.num_bytes
    return parts


def _lay_out_file(
    path: str, number: int, tensors: Sequence[NamedTensor], metadata: Mapping[str, str]
) -> tuple[FilePlan, list[TensorSlots]]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    ordered = sorted(tensors, key=lambda tensor: (-tensor.entry.dtype.num_bytes, tensor.name))
    starts: list[int] = []
    at = 0
    for tensor in ordered:
        entry = tensor.entry
        stored = STORED_NAMES[entry.dtype.name]
        places = [at, at + entry.num_bytes]
        header[tensor.name] = {"dtype": stored, "shape": list(entry.shape), "data_offsets": places}
        starts.append(at)
        at += entry.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    slots = [_slot(tensor.entry, number, len(head) + start) for tensor, start in zip(ordered, starts, strict=True)]
    return FilePlan(path=path, size=len(head) + at, literals=(Literal(0, head),)), slots


def _slot(entry: TensorEntry, file: int, at: int) -> TensorSlots:
    ndim = len(entry.shape)
    return TensorSlots(
        str(entry.key),
        entry.dtype,
        np.zeros((1, ndim), np.int64),
        np.array([entry.shape], np.int64).reshape(1, ndim),
        np.array([file], np.int64),
        np.array([at], np.int64),
    )


def _index(names: Sequence[str], parts: Sequence[Sequence[NamedTensor]]) -> str:
    weight_map = {tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part}
    total = sum(tensor.entry.num_bytes for part in parts for tensor in part)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)

"""Lays out samerun's own export: every tensor under its key in safetensors files, the rest of the state as JSON.

A directory with `state.safetensors` and `state.json` (`sidecar.py`). Above a size, the tensors are spread over
`state-00001-of-0000N.safetensors` with `state.safetensors.index.json`, as Hugging Face's loaders read them. The files
are as the `safetensors` library writes them: tensors by falling element size, then by name, behind a header padded to
eight bytes, so that every tensor is aligned to its elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, TensorEntry
from samerun.core.written import DestinationPlan, FilePlan, Literal, TensorSlots
from samerun.errors import Problem
from samerun.formats.base import WriteSource
from samerun.formats.safetensors.sidecar import dump_sidecar, encode
from samerun.formats.statedict.safefile import STORED_NAMES

_STEM = "state"
_ALIGNMENT = 8
_SECTIONS = ("rng", "data", "objects")


def lay_out(
    source: WriteSource, layout: Layout | None = None, *, max_shard_bytes: int | None = None
) -> DestinationPlan:
    """Returns the export of a state. `layout` does not matter: tensors are written whole.

    Args:
        source: the state to be written.
        layout: ignored.
        max_shard_bytes: the most that one file holds, unless a single tensor is larger; one file by default.
    """
    state, dropped, problems = _with_json_form(source.state)
    kept = [entry for entry in state.tensors.values() if entry.dtype.name in STORED_NAMES]
    for entry in state.tensors.values():
        if entry.dtype.name not in STORED_NAMES:
            problems.append(_no_type(entry))
            dropped[str(entry.key)] = f"safetensors has no element type {entry.dtype.name}"
    shards = _deal(sorted(kept, key=_order), max_shard_bytes)
    names = [f"{_STEM}-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    names = names if len(shards) > 1 else [f"{_STEM}.safetensors"]
    files: list[FilePlan] = []
    tensors: list[TensorSlots] = []
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        file, slots = _lay_out_file(name, number, shard)
        files.append(file)
        tensors += slots
    if len(shards) > 1:
        files.append(_literal_file(f"{_STEM}.safetensors.index.json", _index(names, shards)))
    files.append(_literal_file(f"{_STEM}.json", dump_sidecar(state)))
    return DestinationPlan(
        format="safetensors",
        files=tuple(files),
        tensors=tuple(tensors),
        dropped=dropped,
        problems=tuple(problems),
    )


def _order(entry: TensorEntry) -> tuple[int, str]:
    return -entry.dtype.num_bytes, str(entry.key)


def _deal(entries: list[TensorEntry], max_bytes: int | None) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    held = 0
    for entry in entries:
        if max_bytes is not None and shards[-1] and held + entry.num_bytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += entry.num_bytes
    return shards


def _lay_out_file(name: str, number: int, entries: list[TensorEntry]) -> tuple[FilePlan, list[TensorSlots]]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        places = [at, at + entry.num_bytes]
        stored = STORED_NAMES[entry.dtype.name]
        header[str(entry.key)] = {"dtype": stored, "shape": list(entry.shape), "data_offsets": places}
        at += entry.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    slots = [_slot(entry, number, len(head) + header[str(entry.key)]["data_offsets"][0]) for entry in entries]
    return FilePlan(path=name, size=len(head) + at, literals=(Literal(0, head),)), slots


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


def _literal_file(name: str, text: str) -> FilePlan:
    content = text.encode()
    return FilePlan(path=name, size=len(content), literals=(Literal(0, content),) if content else ())


def _index(names: list[str], shards: list[list[TensorEntry]]) -> str:
    weight_map = {str(entry.key): name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for shard in shards for entry in shard)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)


def _with_json_form(state: LogicalState) -> tuple[LogicalState, dict[str, str], list[Problem]]:
    """Returns the state without objects that JSON cannot hold, what was left out and why, and a finding for each."""
    dropped: dict[str, str] = {}
    problems: list[Problem] = []
    sections: dict[str, Any] = {}
    for section in _SECTIONS:
        values: Mapping[str, Any] = getattr(state, section)
        sections[section] = {}
        for name, value in values.items():
            try:
                encode(value)
            except TypeError as error:
                dropped[f"{section}.{name}"] = str(error)
                problems.append(_no_form(f"{section}.{name}", str(error)))
            else:
                sections[section][name] = value
    return replace(state, **sections), dropped, problems


def _no_type(entry: TensorEntry) -> Problem:
    return Problem(
        "SR-CONVERT-TYPE",
        f"safetensors has no element type {entry.dtype.name}: the tensor would be left out",
        where={"tensor": str(entry.key)},
        hint="convert to dcp or torch, or give it another type with --dtype",
    )


def _no_form(name: str, why: str) -> Problem:
    return Problem(
        "SR-CONVERT-OBJECT",
        f"an object cannot be written as JSON and would be left out: {why}",
        where={"key": name},
        hint="convert to dcp or torch, which hold it; --allow SR-CONVERT-OBJECT leaves it out",
    )

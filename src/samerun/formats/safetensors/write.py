"""Lays out samerun's own export: every tensor under its key in safetensors files, the rest of the state as JSON.

A directory with `state.safetensors` and `state.json` (`sidecar.py`). Above a size, the tensors are spread over
`state-00001-of-0000N.safetensors` with `state.safetensors.index.json`, as Hugging Face's loaders read them
(`statedict/safewrite.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, TensorEntry
from samerun.core.written import DestinationPlan
from samerun.errors import Problem
from samerun.formats.base import WriteSource
from samerun.formats.safetensors.sidecar import dump_sidecar, encode
from samerun.formats.statedict.safewrite import NamedTensor, has_type, lay_out_weights, report_type, text_file

_STEM = "state"
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
    kept = [entry for entry in state.tensors.values() if has_type(entry)]
    for entry in state.tensors.values():
        if not has_type(entry):
            problems.append(report_type(entry))
            dropped[str(entry.key)] = f"safetensors has no element type {entry.dtype.name}"
    named = [NamedTensor(str(entry.key), entry) for entry in sorted(kept, key=_order)]
    weights = lay_out_weights(_STEM, named, max_shard_bytes=max_shard_bytes)
    return DestinationPlan(
        format="safetensors",
        files=(*weights.files, text_file(f"{_STEM}.json", dump_sidecar(state))),
        tensors=weights.tensors,
        dropped=dropped,
        problems=tuple(problems),
    )


def _order(entry: TensorEntry) -> tuple[int, str]:
    return -entry.dtype.num_bytes, str(entry.key)


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


def _no_form(name: str, why: str) -> Problem:
    return Problem(
        "SR-CONVERT-OBJECT",
        f"an object cannot be written as JSON and would be left out: {why}",
        where={"key": name},
        hint="convert to dcp or torch, which hold it; --allow SR-CONVERT-OBJECT leaves it out",
    )

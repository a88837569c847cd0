"""Layers that a checkpoint keeps as one tensor, taken apart: Megatron's `decoder.layers.mlp...` has a row per layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from samerun.core.state import LogicalState, TensorEntry, TensorKey, Tiling

_LAYERS = "layers"


def unstack_layers(state: LogicalState) -> LogicalState:
    """Returns the state with one tensor per layer where a Megatron checkpoint has them stacked, pieces left out.

    Names get the number of the layer, as in checkpoints that do not stack. Other states are returned as they are.
    """
    stacked = {
        entry.key.fqn: entry.shape[0]
        for entry in state.tensors.values()
        if entry.shape and _is_stacked(entry.key.fqn) and state.format.startswith("megatron")
    }
    if not stacked:
        return state
    tensors = {
        str(one.key): one for entry in state.tensors.values() for one in _layers(entry, stacked.get(entry.key.fqn))
    }
    groups = tuple(
        replace(group, params=tuple(name for fqn in group.params for name in _names(fqn, stacked.get(fqn))))
        for group in state.groups
    )
    return replace(state, tensors=tensors, groups=groups)


def _is_stacked(fqn: str) -> bool:
    parts = fqn.split(".")
    return any(part == _LAYERS and not after.isdecimal() for part, after in pairwise(parts))


def _layers(entry: TensorEntry, count: int | None) -> Iterator[TensorEntry]:
    if count is None:
        yield entry
        return
    shape = entry.shape[1:] if entry.shape[:1] == (count,) else entry.shape  # a step is one number for all
    for name in _names(entry.key.fqn, count):
        key = TensorKey(entry.key.role, name, entry.key.slot)
        yield replace(entry, key=key, shape=shape, tiling=Tiling.whole(shape))


def _names(fqn: str, count: int | None) -> list[str]:
    if count is None:
        return [fqn]
    before, _, after = fqn.partition(f"{_LAYERS}.")
    return [f"{before}{_LAYERS}.{number}.{after}" for number in range(count)]

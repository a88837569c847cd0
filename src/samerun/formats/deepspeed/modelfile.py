"""The model file's own part: tensors of the model, what is flattened in which order, ties and frozen parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from samerun.core.state import TensorEntry
from samerun.formats.deepspeed.experts import expert_of
from samerun.formats.deepspeed.flat import parts_of
from samerun.formats.deepspeed.training import Held, Trained, Training
from samerun.formats.torchfile.emit import Storage, Tensor, size, whole


def write_tensor(entry: TensorEntry) -> Tensor:
    """Returns a whole tensor of the model, in its own element type."""
    return whole(str(entry.key), entry.dtype, entry.shape)


def whole_module(training: Training) -> dict[str, Any]:
    """Returns a model's state dict with every tensor whole, without experts. Tied names share one storage."""
    held = (*training.frozen, *_trained(training), *training.buffers)
    module = {one.name: write_tensor(one.entry) for one in held if expert_of(one.name) is None}
    module |= {alias: Tensor(module[name].storage, module[name].shape) for alias, name in training.shared.items()}
    return module


def expert_modules(training: Training) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields each expert: the number of its layer, its own, and its tensors under their global names."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for held in (*training.frozen, *_trained(training), *training.buffers):
        place = expert_of(held.name)
        if place is not None:
            found.setdefault(place[:2], {})[held.name] = write_tensor(held.entry)
    for layer, (prefix, count) in enumerate(training.layers.items()):
        for number in range(count):
            yield layer, number, found.get((prefix, number), {})


def empty_module(training: Training) -> dict[str, Any]:
    """Returns a model's state dict as stage 3 has it: parameters are named and empty, buffers whole."""
    held = [*training.frozen, *_trained(training)]
    module: dict[str, Any] = {one.name: _empty(one.entry) for one in held}
    entries = {one.name: one.entry for one in held}
    module |= {alias: _empty(entries[name]) for alias, name in training.shared.items()}
    return module | {buffer.name: write_tensor(buffer.entry) for buffer in training.buffers}


def untrained_module(training: Training) -> dict[str, Any]:
    """Returns what no optimizer trains: buffers and frozen parameters."""
    return {held.name: write_tensor(held.entry) for held in (*training.frozen, *training.buffers)}


def _trained(training: Training) -> Iterable[Held]:
    return (Held(member.name, member.weights) for group in training.groups for member in group.members)


def _empty(entry: TensorEntry) -> Tensor:
    return Tensor(Storage(entry.dtype, 0), (0,))


def write_shapes(flattened: Sequence[Sequence[Trained]]) -> list[dict[str, Any]]:
    """Returns `param_shapes`: by group or sub-group, names and shapes in flattened order."""
    return [{member.name: size(member.shape) for member in members} for members in flattened]


def frozen_shapes(training: Training) -> dict[str, Any]:
    """Returns `frozen_param_shapes`."""
    return {held.name: size(held.entry.shape) for held in training.frozen}


def frozen_fragment(entry: TensorEntry, ranks: int, rank: int) -> Tensor:
    """Returns a rank's part of a frozen parameter at stage 3: `ceil(elements / ranks)`, the last ones padded."""
    total = math.prod(entry.shape)
    part = -(-total // ranks)
    first = min(rank * part, total)
    parts = tuple(parts_of(entry, first, min(part, total - first), 0))
    return Tensor(Storage(entry.dtype, part, parts), (part,))

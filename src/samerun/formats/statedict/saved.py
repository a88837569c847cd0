"""A saved state sorted into its parts, before names, roles and slots are settled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.core.plain import is_blank
from samerun.core.state import RecordedProgress, Topology
from samerun.errors import Problem
from samerun.formats.statedict.recognise import (
    EXTRA_STATE,
    is_average_list,
    is_averaged_model,
    is_loader,
    is_module,
    is_optimizer,
    is_pickled_optimizer,
    is_scaler,
    is_scheduler,
    is_state_dict,
    looks_averaged,
    looks_like_model,
    looks_other,
    looks_random,
    split_average_and_model,
    split_average_list,
)
from samerun.formats.statedict.records import unread_tensor
from samerun.formats.statedict.stored import Stored
from samerun.formats.statedict.swapped import swap_back
from samerun.formats.torchfile.values import Inert

_DEPTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class SavedModel:
    """The tensors of one model by saved name. `name` is where it lay in the saved state.

    `ordered` says whether the mapping is in the order in which the modules registered their tensors: torch.save keeps
    it, safetensors sorts. `buffers` are those known to be buffers, None where the file does not say.
    """

    name: str
    tensors: Mapping[str, Stored]
    ordered: bool = True
    average: bool = False
    buffers: frozenset[str] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True, eq=False)
class SavedState:
    """The parts of a checkpoint. Names are dotted and as saved; values may hold `Stored` tensors.

    `averages` are those of a model that were saved as lists, without names; `unread` are tensors that no reader
    understands, with their kind.
    """

    models: list[SavedModel] = field(default_factory=list[SavedModel])
    optimizers: list[tuple[str, Mapping[Any, Any]]] = field(default_factory=list[tuple[str, Mapping[Any, Any]]])
    averages: list[tuple[str, list[Stored]]] = field(default_factory=list[tuple[str, list[Stored]]])
    schedulers: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    rng: dict[str, Any] = field(default_factory=dict[str, Any])
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    objects: dict[str, Any] = field(default_factory=dict[str, Any])
    progress: RecordedProgress | None = None
    topology: Topology = field(default_factory=Topology)
    written_by: dict[str, str] = field(default_factory=dict[str, str])
    unknown: set[str] = field(default_factory=set[str])
    unread: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])
    files: list[Path] = field(default_factory=list[Path])


def sort_tree(tree: Any, saved: SavedState, prefix: str = "") -> None:
    """Sorts a nested value into the parts of `saved`. A value that is a state dict as a whole is the model."""
    tree, swapped = swap_back(tree)
    if swapped is not None:
        saved.problems.append(swapped)
    if is_module(tree):
        saved.models.append(_module(prefix, tree))
    elif is_state_dict(tree) and not is_loader("", tree):
        _add_model(saved, prefix, tree)
    else:
        _sort(tree, saved, prefix, prefix.rpartition(".")[2], 0)


def _sort(node: Any, saved: SavedState, name: str, last: str, depth: int) -> None:
    if is_optimizer(node):
        saved.optimizers.append((name, node))
    elif is_average_list(node):
        tensors, beside = split_average_list(node)
        saved.averages.append((name or "average", tensors))
        saved.objects |= {f"{name}.{key}" if name else str(key): item for key, item in beside.items()}
    elif is_scheduler(last, node):
        saved.schedulers.append((name, node))
    elif is_scaler(last, node):
        saved.objects[name] = node
    elif name and looks_random(last) and not _is_seed(node) and not is_blank(node):
        saved.rng[name] = node
    elif is_loader(last, node):
        saved.data[name or "dataloader"] = node
    elif is_module(node):
        saved.models.append(_module(name, node))
    elif depth and not looks_other(last) and is_state_dict(node, nested=_may_nest(last, node)):
        _add_model(saved, name, node)
    elif isinstance(node, dict) and depth < _DEPTH and node and not _is_table(node):
        for key, item in node.items():
            _sort(item, saved, f"{name}.{key}" if name else str(key), str(key), depth + 1)
    elif isinstance(node, list) and depth < _DEPTH and any(_is_part(last, item) for item in node):
        for number, item in enumerate(node):
            _sort(item, saved, f"{name}.{number}", last, depth + 1)
    else:
        saved.objects[name] = node
        if isinstance(node, Inert) and is_pickled_optimizer(node):
            saved.unread[name] = f"the state inside a pickled {node.name}"


def _is_seed(node: Any) -> bool:
    """Whether a value that is called like a generator's is a plain one: a seed is no state."""
    return isinstance(node, int | float | str)


def _may_nest(last: str, node: Any) -> bool:
    """Whether a state dict of this name may be of several modules. An average beside its settings is not nested."""
    if looks_averaged(last):
        return isinstance(node, dict) and sum(isinstance(item, Mapping) for item in node.values()) > 1
    return looks_like_model(last)


def _is_table(node: dict[Any, Any]) -> bool:
    """Whether this is data under keys other than text, which a dotted name would make text of."""
    return not all(isinstance(key, str) for key in node) and not any(_holds_part(item) for item in node.values())


def _holds_part(node: Any) -> bool:
    """Whether some part of a training state is in a value, or a record of which nothing is known."""
    if isinstance(node, Inert) or _is_part("", node):
        return True
    inside = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return any(_holds_part(item) for item in inside)


def _is_part(last: str, item: Any) -> bool:
    return is_optimizer(item) or is_scheduler(last, item) or is_module(item) or is_state_dict(item)


def _add_model(saved: SavedState, name: str, node: Mapping[str, Any]) -> None:
    if (split := split_average_and_model(node)) is not None:
        average, model, beside = split
        saved.objects |= {f"{name}.{key}" if name else key: item for key, item in beside.items()}
        saved.models.append(SavedModel(name or "ema_model", dict(_tensors(average)), average=True))
        if model:
            saved.models.append(SavedModel(f"{name}.online_model".lstrip("."), dict(_tensors(model))))
        return
    tensors = dict(_tensors(node))
    averaged = is_averaged_model(node)
    if averaged:
        saved.objects[f"{name}.n_averaged" if name else "n_averaged"] = tensors.pop("n_averaged")
    saved.models.append(SavedModel(name, tensors, average=averaged or looks_averaged(name)))
    for key, item in _beside(node):
        full = f"{name}.{key}" if name else key
        saved.objects[full] = item
        kind = None if key.endswith(EXTRA_STATE) else unread_tensor(item)
        if kind is not None:
            saved.unread[full] = kind


def _tensors(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Stored]]:
    for key, item in node.items():
        if isinstance(item, Stored):
            yield prefix + key, item
        elif isinstance(item, Mapping):
            yield from _tensors(item, f"{prefix}{key}.")


def _beside(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what a model's state dict holds beside tensors, under its names in the model."""
    for key, item in node.items():
        if isinstance(item, Mapping):
            yield from _beside(item, f"{prefix}{key}.")
        elif not isinstance(item, Stored) and item is not None:
            yield prefix + key, item


def _module(name: str, node: Inert) -> SavedModel:
    """Collects the tensors of a pickled module, as its `state_dict()` would give them."""
    tensors: dict[str, Stored] = {}
    buffers: set[str] = set()
    _collect(node, "", tensors, buffers)
    return SavedModel(name, tensors, average=looks_averaged(name), buffers=frozenset(buffers))


def _collect(node: Inert, prefix: str, tensors: dict[str, Stored], buffers: set[str]) -> None:
    passing: Any = node.state.get("_non_persistent_buffers_set") or ()
    for key, item in node.state["_parameters"].items():
        if isinstance(item, Stored):
            tensors[f"{prefix}{key}"] = item
    for key, item in node.state["_buffers"].items():
        if isinstance(item, Stored) and key not in passing:
            tensors[f"{prefix}{key}"] = item
            buffers.add(f"{prefix}{key}")
    for key, item in node.state["_modules"].items():
        if is_module(item):
            _collect(item, f"{prefix}{key}.", tensors, buffers)

"""FSDP1's local state dicts: every rank saves its part of each flat parameter.

A flat parameter is the concatenation of the parameters of one wrapped module. With `use_orig_params=False` only it is
saved, as a ShardedTensor of one dimension, and nothing says where one parameter ends and the next begins. With
`use_orig_params=True` each parameter is saved too, as a view of this rank's part of the flat one: its place and number
of elements are then known exactly, its shape is not. Optimizer state is by position and local in both
(`torch/distributed/fsdp/_state_dict_utils.py`, `_flat_param.py`, 2.13). Where optimizer state with names and shapes
lies beside it, as Accelerate writes it, `unflatten` gives parameters back what they lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from samerun.errors import Problem
from samerun.formats.statedict.ranks import Plain, replicate
from samerun.formats.statedict.recognise import is_optimizer
from samerun.formats.statedict.stored import Stored, store_boxes
from samerun.formats.statedict.tree import Tree
from samerun.formats.statedict.unflatten import Known, shape_rows, split_flats

_FLAT = ("_flat_param", "flat_param")


@dataclass(frozen=True, slots=True, eq=False)
class FlatParameter:
    """One flat parameter: its path in the saved state, the whole of it, and where each rank's part begins."""

    path: tuple[str, ...]
    whole: Stored


def is_flat(name: str) -> bool:
    """Whether a saved name is a flat parameter's."""
    return name.rpartition(".")[2] in _FLAT or name.rpartition(".")[2].startswith("_flat_param_")


def find_flat(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[FlatParameter]:
    """Yields the flat parameters of a merged state, in saved order."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            if isinstance(item, Stored) and is_flat(str(key)):
                yield FlatParameter((*path, str(key)), item)
            else:
                yield from find_flat(item, (*path, str(key)))


def views_of(plains: list[Plain], flats: list[FlatParameter]) -> list[Plain]:
    """Returns the tensors that are views of a flat parameter's parts: parameters, with `use_orig_params=True`."""
    storages = {
        (extent.file, extent.storage_offset_bytes, extent.storage_bytes)
        for flat in flats
        for extent in flat.whole.extents
    }
    return [plain for plain in plains if any(_storage(part) in storages for part in plain.parts.values())]


def _storage(part: Stored) -> tuple[object, ...] | None:
    if not part.extents or part.num_elements == 0:
        return None
    extent = part.extents[0]
    return (extent.file, extent.storage_offset_bytes, extent.storage_bytes)


def join(plain: Plain) -> Stored:
    """Returns the tensor of one dimension whose parts, in rank order, the ranks hold."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = []
    start = 0
    for part in plain.parts.values():
        if part.num_elements and part.extents:
            boxes.append(((start,), (part.num_elements,), part.extents[0]))
        start += part.num_elements
    return store_boxes((start,), _first(plain).dtype, boxes)


def join_padded(plain: Plain, flat: FlatParameter) -> Stored | None:
    """Returns an optimizer slot of a flat parameter: its parts are padded to equal length and cut back here.

    None if they are not of that length.
    """
    places = {extent.file: piece for piece, extent in enumerate(flat.whole.extents)}
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = []
    for part in plain.parts.values():
        piece = places.get(part.extents[0].file) if part.extents else None
        if piece is None:
            continue
        start, length = int(flat.whole.tiling.offsets[piece, 0]), int(flat.whole.tiling.sizes[piece, 0])
        if len(part.shape) != 1 or part.shape[0] < length:
            return None
        boxes.append(((start,), (length,), replace(part.extents[0], shape=(length,))))
    return store_boxes(flat.whole.shape, _first(plain).dtype, boxes)


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A local state dict put together: the tree, its tensors by path, names of parameters, replicas, and findings."""

    tree: Tree
    tensors: Mapping[tuple[str, ...], Stored]
    parameters: frozenset[str]
    replicas: tuple[Plain, ...]
    problems: tuple[Problem, ...]


def place_local(tree: Tree, plains: list[Plain], ranks: list[int], known: Known | None = None) -> Local:
    """Puts the parts of a local state dict together. `plains` are the ordinary tensors in the merged `tree`.

    A flat parameter whose parameters are saved by name too is left out of the tree, as is one that could be taken
    apart. `known` are the shapes of parameters by name, in their order, where some other file tells them.
    """
    flats = list(find_flat(tree))
    views = views_of(plains, flats)
    state = [plain for plain in plains if "state" in plain.path and _first(plain).shape]
    if views:
        rows, problems = shape_rows({plain.path: join(plain) for plain in views}, known or {}, len(ranks))
        placed = {plain.path: join(plain) for plain in state} | rows
        inside: dict[tuple[str, ...], dict[str, Stored]] = {flat.path: {} for flat in flats}
        parameters = frozenset(plain.path[-1] for plain in views)
    else:
        placed = _place_slots(state, flats)
        inside, problems = split_flats({flat.path: flat.whole for flat in flats}, known or {}, len(ranks))
        named = {name for parts in inside.values() for name in parts}
        parameters = frozenset({*named, *(flat.path[-1] for flat in flats if flat.path not in inside)})
    replicas = tuple(plain for plain in plains if plain.path not in placed)
    tensors = placed | {plain.path: replicate(plain.parts) for plain in replicas}
    return Local(_replace(tree, inside), tensors, parameters, replicas, tuple(problems))


def _place_slots(state: list[Plain], flats: list[FlatParameter]) -> dict[tuple[str, ...], Stored]:
    placed: dict[tuple[str, ...], Stored] = {}
    for plain in state:
        flat = _flat_of(plain, flats)
        slot = join_padded(plain, flat) if flat is not None else None
        if slot is not None:
            placed[plain.path] = slot
    return placed


def _first(plain: Plain) -> Stored:
    return next(iter(plain.parts.values()))


def _flat_of(plain: Plain, flats: list[FlatParameter]) -> FlatParameter | None:
    """Returns the flat parameter that an optimizer slot's position means: they are numbered in saved order."""
    position = plain.path[plain.path.index("state") + 1] if len(plain.path) > plain.path.index("state") + 1 else ""
    return flats[int(position)] if position.isdigit() and int(position) < len(flats) else None


def _replace(tree: Tree, made: Mapping[tuple[str, ...], Mapping[str, Stored]], path: tuple[str, ...] = ()) -> Tree:
    """Returns the tree with the tensors at some paths replaced by others (none, one or several) beside them."""
    if not isinstance(tree, dict):
        return tree
    result: dict[Any, Any] = {}
    for key, item in tree.items():
        inside = made.get((*path, str(key)))
        if inside is None:
            result[key] = _replace(item, made, (*path, str(key)))
        else:
            result |= inside
    return result


def has_flat(tree: Tree) -> bool:
    """Whether a value saved by a rank has flat parameters: whether it is a local state dict."""
    if not isinstance(tree, Mapping):
        return False
    return any(is_flat(str(key)) or (not is_optimizer(item) and has_flat(item)) for key, item in tree.items())

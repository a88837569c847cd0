"""Which tensors of a model are parameters and which buffers, where the saved state does not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from samerun.core.state import Role
from samerun.formats.statedict.recognise import is_buffer_name, is_parameter_name
from samerun.formats.statedict.saved import SavedModel
from samerun.formats.statedict.stored import Stored


def assign_roles(
    model: SavedModel, tensors: Mapping[str, Stored], known: frozenset[str], *, groups: bool
) -> dict[str, tuple[Role, bool]]:
    """Returns by name the role of each of `tensors`, and whether it had to be inferred.

    What an optimizer knows (`known`) is a parameter. For the rest, unless the file says, these decide in turn: the name
    and the element type; the place among the tensors of its module, where the order of registration is kept, because
    `state_dict()` lists a module's parameters before its buffers; whether it was sharded, where most are, because only
    parameters are; membership in no group, where there are groups.
    """
    if model.average:
        return dict.fromkeys(tensors, (Role.EMA, False))
    usual = usual_pieces(tensors.values())
    roles: dict[str, tuple[Role, bool]] = {}
    open_names: list[str] = []
    for name, tensor in tensors.items():
        sure = _sure_role(model, name, tensor, known)
        if sure is None:
            open_names.append(name)
        else:
            roles[name] = sure
    placed = _by_place(tensors, roles) if model.ordered else {}
    for name in open_names:
        role = placed.get(name)
        if role is None and usual > 1 and tensors[name].shape:
            role = Role.PARAM if num_boxes(tensors[name]) > 1 else Role.BUFFER
        roles[name] = (role or (Role.BUFFER if groups else Role.PARAM), True)
    return roles


def _sure_role(model: SavedModel, name: str, tensor: Stored, known: frozenset[str]) -> tuple[Role, bool] | None:
    if name in known:
        return Role.PARAM, False
    if model.buffers is not None:
        return (Role.BUFFER if name in model.buffers else Role.PARAM), False
    if is_buffer_name(name) or (tensor.dtype.kind not in ("float", "complex") and not is_parameter_name(name)):
        return Role.BUFFER, True
    return (Role.PARAM, True) if is_parameter_name(name) else None


def _by_place(tensors: Mapping[str, Stored], roles: Mapping[str, tuple[Role, bool]]) -> dict[str, Role]:
    """Returns roles that follow from order: before a parameter of the same module, or after a buffer of it."""
    modules: dict[str, list[str]] = {}
    for name in tensors:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    found: dict[str, Role] = {}
    for names in modules.values():
        parameters = [i for i, name in enumerate(names) if roles.get(name, (None,))[0] is Role.PARAM]
        buffers = [i for i, name in enumerate(names) if roles.get(name, (None,))[0] is Role.BUFFER]
        last, first = max(parameters, default=-1), min(buffers, default=len(names))
        for i, name in enumerate(names):
            if i < last and i < first:
                found[name] = Role.PARAM
            elif i > first and i > last:
                found[name] = Role.BUFFER
    return found


def usual_pieces(tensors: Iterable[Stored]) -> int:
    """Returns into how many boxes most tensors of at least one dimension are cut, replicas counted once."""
    counts = Counter(num_boxes(tensor) for tensor in tensors if tensor.shape)
    return counts.most_common(1)[0][0] if counts else 1


def num_boxes(tensor: Stored) -> int:
    """Returns into how many different boxes a tensor is cut."""
    if len(tensor.tiling) < 2:
        return len(tensor.tiling)
    return len(np.unique(tensor.tiling.offsets, axis=0)) if tensor.shape else 1

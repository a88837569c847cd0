"""An optimizer's state dict as slots and groups, by parameter name or by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from samerun.errors import Problem
from samerun.formats.statedict.stored import Stored, place_of

MASTER_SLOTS = frozenset({"master_param", "master_weight", "fp32_param", "master"})

# Slots of torch.optim's and common other optimizers that have their parameter's shape.
_SAME_SHAPE = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "sum", "acc_delta",
    "grad_avg", "prev", "step_size", "ax", "z", "exp_avg_diff", "previous_grad", "variance", "state1",
    *sorted(MASTER_SLOTS),
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One parameter as an optimizer knows it: its key in the saved state (a name, or a position) and its slots."""

    key: str
    slots: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One parameter group: the keys of its members in order, their names where saved, and the hyperparameters."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """One optimizer. `positional` says that keys are positions; then `names` maps those that the file names."""

    name: str
    members: Mapping[str, Member]
    groups: tuple[Group, ...]
    positional: bool
    names: Mapping[str, str]

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key of a group or of the state, in order: groups first."""
        listed = [key for group in self.groups for key in group.keys]
        return tuple(dict.fromkeys([*listed, *self.members]))


def parse_optimizer(name: str, node: Mapping[Any, Any], known: frozenset[str] = frozenset()) -> Optimizer:
    """Reads a nested or flattened optimizer state dict. `known` are the model's names, which tell slots apart."""
    if isinstance(node.get("param_groups"), list) and isinstance(node.get("state"), dict):
        state, groups = node["state"], [group for group in node["param_groups"] if isinstance(group, dict)]
    else:
        state, groups = _unflatten(node, known)
    members = {str(key): Member(str(key), dict(_slots(slots))) for key, slots in state.items() if slots is not None}
    parsed = tuple(_group(group) for group in groups)
    listed = [key for group in parsed for key in group.keys]
    numbers = [key for key in (*members, *listed) if key.lstrip("-").isdigit()]
    positional = bool(numbers) and len(numbers) == len(members) + len(listed)
    names = {
        key: label
        for group in parsed
        if len(group.names) == len(group.keys)
        for key, label in zip(group.keys, group.names, strict=True)
    }
    return Optimizer(name, members, parsed, positional, names if positional else {})


def _slots(slots: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (slot, value). Slots inside slots get dotted names; a bare value is the slot `state`."""
    if not isinstance(slots, Mapping):
        yield prefix or "state", slots
        return
    for key, value in slots.items():
        inner = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _slots(value, inner)
        else:
            yield inner, value


def _group(group: Mapping[Any, Any]) -> Group:
    members, labels = group.get("params"), group.get("param_names")
    keys = tuple(str(key) for key in members) if isinstance(members, list) else ()
    names = tuple(str(label) for label in labels) if isinstance(labels, list) else ()
    settings = {str(key): value for key, value in group.items() if key not in ("params", "param_names")}
    return Group(keys, names, settings)


def _unflatten(node: Mapping[Any, Any], known: frozenset[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Rebuilds state and groups from `state.<fqn>.<slot>` and `param_groups.<fqn>.<hyperparameter>`."""
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for name, value in node.items():
        section, _, tail = str(name).partition(".")
        fqn, key = _split(tail, known)
        (state if section == "state" else settings).setdefault(fqn, {})[key] = value
    groups: dict[str, dict[str, Any]] = {}
    for fqn, values in settings.items():
        groups.setdefault(repr(sorted(values.items(), key=str)), {**values, "params": []})["params"].append(fqn)
    return state, list(groups.values())


def _split(tail: str, known: frozenset[str]) -> tuple[str, str]:
    at = tail.rfind(".")
    while at > 0:
        if tail[:at] in known:
            return tail[:at], tail[at + 1 :]
        at = tail.rfind(".", 0, at)
    fqn, _, key = tail.rpartition(".")
    return (fqn, key) if fqn else (tail, "state")


def shape_of(member: Member | None) -> tuple[int, ...] | None:
    """Returns the shape of a parameter as its slots show it, None if they do not (no state, or only counters)."""
    tensors = {slot: value for slot, value in (member.slots if member else {}).items() if isinstance(value, Stored)}
    for slot in _SAME_SHAPE:
        if slot in tensors:
            return tensors[slot].shape
    rows, columns = tensors.get("exp_avg_sq_row"), tensors.get("exp_avg_sq_col")
    if rows is not None and columns is not None and columns.shape:
        return (*rows.shape, columns.shape[-1])
    rows, columns = tensors.get("row_var"), tensors.get("col_var")  # torch's Adafactor keeps the reduced axis, as 1
    if rows is not None and columns is not None and rows.shape and columns.shape:
        return (*rows.shape[:-1], columns.shape[-1])
    shapes = {value.shape for slot, value in tensors.items() if slot != "step"}
    return shapes.pop() if len(shapes) == 1 and shapes != {()} else None


def has_state(member: Member | None) -> bool:
    """Whether anything is kept for a parameter that would be lost, or belong to another one, under a wrong name."""
    return member is not None and any(value is not None for value in member.slots.values())


def check_slots(optimizer: Optimizer) -> list[Problem]:
    """Checks that no two slots of a parameter are one and the same stored tensor."""
    found: list[tuple[str, str, str]] = []
    for key, member in optimizer.members.items():
        places: dict[object, str] = {}
        for slot, value in member.slots.items():
            place = place_of(value) if isinstance(value, Stored) and value.num_elements > 1 else None
            other = places.setdefault(place, slot) if place is not None else slot
            if other != slot:
                found.append((key, other, slot))
    if not found:
        return []
    key, first, second = found[0]
    return [
        Problem(
            "SR-OPT-SHARED",
            f"{first} and {second} of {len(found)} parameters are one and the same stored tensor: one of them is lost",
            where={"tensor": f"optim.{first}:{key}"},
            hint="FSDP1 does this when it gathers a full optimizer state on a CPU with offload_to_cpu=True (torch "
            "2.13): save it again with offload_to_cpu=False, or a sharded state dict",
        )
    ]

"""Finding optimizers in a DCP state dict: their slots per parameter, and their parameter groups.

Three encodings are in use. The state-dict API of torch nests by name (`optim.state.<fqn>.<slot>`, groups as a list with
`params`), or flattens (`optim.param_groups.<fqn>.<hyperparameter>`, as torchtitan and pipeline stages do), and a plain
`optimizer.state_dict()` nests by position (`optim.state.3.exp_avg`). The top-level name is the user's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samerun.core.state import ParamGroup, normalize_fqn

# Slots of torch.optim's optimizers (2.13) and of the common ones outside it, and whether a master copy hides in them.
KNOWN_SLOTS = frozenset({
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product", "momentum_buffer", "square_avg",
    "acc_delta", "grad_avg", "sum", "prev", "step_size", "ax", "eta", "mu", "row_var", "col_var", "variance",
    "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_diff", "previous_grad", "z", "n_averaged",
})  # fmt: skip
MASTER_SLOTS = frozenset({"master_param", "master_weight", "fp32_param", "master"})
_NAMES_OF_MEMBERS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class Slot:
    """One optimizer value: the stored item's name, the parameter it belongs to, and which slot it is."""

    item: str
    fqn: str
    slot: str


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer of the checkpoint. `positional` is set when parameters are known by number only."""

    root: str
    slots: tuple[Slot, ...]
    groups: tuple[ParamGroup, ...]
    claimed: frozenset[str]
    positional: bool = False
    flattened: bool = False
    unread: tuple[str, ...] = field(default=())

    @property
    def fqns(self) -> frozenset[str]:
        """Every parameter that has state or stands in a group."""
        return frozenset({slot.fqn for slot in self.slots} | {fqn for group in self.groups for fqn in group.params})


def find_roots(names: Iterable[str]) -> tuple[str, ...]:
    """Returns what stands before `.state.` or `.param_groups` in names that look like an optimizer's, in order.

    Groups are surer: a job may keep all it has in a mapping called `state`, its optimizers too, as Composer does.
    """
    every = [name.split(".") for name in names]
    roots = dict.fromkeys(".".join(parts[: parts.index("param_groups")]) for parts in every if "param_groups" in parts)
    stems = tuple(f"{root}.state." if root else "state." for root in roots)
    for parts in every:
        at = parts.index("state") if "state" in parts else len(parts)
        if at + 2 < len(parts) and parts[-1] in KNOWN_SLOTS and not ".".join(parts).startswith(stems):
            roots.setdefault(".".join(parts[:at]))
    return tuple(roots)


def read_optimizer(
    root: str,
    names: Iterable[str],
    model_fqns: frozenset[str],
    read: Callable[[str], Any],
    paths: Mapping[str, tuple[str | int, ...]],
) -> Optimizer:
    """Collects the slots and groups of the optimizer at `root`.

    `names` are all items of the checkpoint, `model_fqns` the normalised names of the model's tensors where known
    (empty otherwise), and `read` returns the plain value of a named item.
    """
    stem = f"{root}." if root else ""
    state_stem, group_stem = f"{stem}state.", f"{stem}param_groups"
    state_names = [name for name in names if name.startswith(state_stem)]
    group_names = [name for name in names if name == group_stem or name.startswith(f"{group_stem}.")]
    slots = [_slot(name, name[len(state_stem) :], paths.get(name, ()), model_fqns) for name in state_names]
    rest = [(name, name[len(group_stem) + 1 :]) for name in group_names]
    flattened = bool(rest) and not _is_nested(rest, paths)
    positional = bool(slots) and all(slot.fqn.isdigit() and slot.fqn not in model_fqns for slot in slots)
    numbered = _flattened_groups(rest, model_fqns, read) if flattened else _nested_groups(rest, read)
    groups, names_by_number = _name_groups(numbered)
    if positional:
        slots = [Slot(slot.item, names_by_number.get(slot.fqn, f"#{slot.fqn}"), slot.slot) for slot in slots]
    return Optimizer(
        root,
        tuple(slots),
        groups,
        frozenset({*state_names, *group_names}),
        positional and not names_by_number,
        flattened,
    )


def _is_nested(rest: list[tuple[str, str]], paths: Mapping[str, tuple[str | int, ...]]) -> bool:
    """Whether groups are a list. Names alone do not tell: parameters of a Sequential begin with a number too."""
    return any(
        not tail or re.match(r"\d+\.params(?:$|\.)", tail) or any(type(part) is int for part in paths.get(name, ()))
        for name, tail in rest
    )


def _slot(name: str, tail: str, path: tuple[str | int, ...], model_fqns: frozenset[str]) -> Slot:
    """Splits `layers.0.w.exp_avg` into parameter and slot: by the saved path, by known names, or at the last dot."""
    if len(path) >= 2 and path[-1] != tail:
        inner = [str(part) for part in path]
        for i in range(len(inner) - 1):
            if inner[i] == "state" and ".".join(inner[i + 1 :]) == tail and i + 2 < len(inner):
                return Slot(name, normalize_fqn(inner[i + 1]), ".".join(inner[i + 2 :]))
    fqn, slot = _split_known(tail, model_fqns)
    return Slot(name, fqn, slot)


def _split_known(tail: str, model_fqns: frozenset[str]) -> tuple[str, str]:
    """Splits at the last dot, or further left when only that makes the first part a parameter of the model."""
    cut = tail.rfind(".")
    at = cut
    while at > 0:
        fqn = normalize_fqn(tail[:at])
        if fqn in model_fqns:
            return fqn, tail[at + 1 :]
        at = tail.rfind(".", 0, at)
    return (normalize_fqn(tail[:cut]), tail[cut + 1 :]) if cut > 0 else (tail, "")


def _nested_groups(rest: list[tuple[str, str]], read: Callable[[str], Any]) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for name, tail in rest:
        if not tail:  # older releases keep the whole list as one object
            whole = read(name)
            members: list[Any] = whole if isinstance(whole, list) else []
            return [dict(group) for group in members if isinstance(group, dict)]
        number, _, key = tail.partition(".")
        _set(groups.setdefault(int(number), {}), key, read(name))
    return [groups[number] for number in sorted(groups)]


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Files a hyperparameter. Lists that were saved item by item (`params.0`, `betas.1`) are put together again."""
    head, _, index = key.partition(".")
    if not index.isdigit():
        group[key] = value
        return
    items = group.setdefault(head, [])
    if isinstance(items, list) and int(index) < 1_000_000:
        items.extend([None] * (int(index) + 1 - len(items)))
        items[int(index)] = value


def _flattened_groups(
    rest: list[tuple[str, str]], model_fqns: frozenset[str], read: Callable[[str], Any]
) -> list[dict[str, Any]]:
    """Rebuilds groups from hyperparameters kept per parameter: parameters whose hyperparameters are equal are one."""
    by_fqn: dict[str, dict[str, Any]] = {}
    for name, tail in rest:
        fqn, key = _split_known(tail, model_fqns)
        by_fqn.setdefault(fqn, {})[key] = read(name)
    groups: dict[str, dict[str, Any]] = {}
    for fqn, values in by_fqn.items():
        identity = repr(sorted(values.items()))
        groups.setdefault(identity, {**values, "params": []})["params"].append(fqn)
    return list(groups.values())


def _name_groups(numbered: list[dict[str, Any]]) -> tuple[tuple[ParamGroup, ...], dict[str, str]]:
    """Returns the groups with names where the checkpoint has them, and the name of each position that it names."""
    groups: list[ParamGroup] = []
    names: dict[str, str] = {}
    for values in numbered:
        members, labels = values.get("params"), values.get("param_names")
        listed: list[Any] = members if isinstance(members, list) else []
        if isinstance(labels, list) and len(labels) == len(listed):
            names |= {str(number): normalize_fqn(str(label)) for number, label in zip(listed, labels, strict=True)}
        params = tuple(
            names.get(str(member), f"#{member}") if isinstance(member, int) else normalize_fqn(str(member))
            for member in listed
        )
        settings = {key: value for key, value in values.items() if key not in _NAMES_OF_MEMBERS}
        groups.append(ParamGroup(params, settings))
    return tuple(groups), names

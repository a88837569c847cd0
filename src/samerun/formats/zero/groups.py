"""Parameter groups of stages 1 to 3, by name: what optimizer files list by number, over pipeline stages together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.plain import plain, same_plain
from samerun.core.state import ParamGroup, normalize_fqn
from samerun.formats.deepspeed.experts import global_name, local_experts
from samerun.formats.deepspeed.model import Shapes
from samerun.formats.deepspeed.shards import OptimStates
from samerun.formats.deepspeed.states import as_dict, plain_value
from samerun.formats.zero.optimizer_tensors import Flat, place_of, shapes_for
from samerun.formats.zero.source import Source, without_role

_LAYER = re.compile(r"(\d+)\.")
Settings = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Group:
    members: dict[str, None]
    settings: Settings


def read_groups(source: Source) -> list[tuple[list[str], Settings]]:
    """Returns the parameter groups: members in the optimizer's own order, and hyperparameters of the lowest rank."""
    merged: list[_Group] = []
    own: dict[int, list[_Group]] = {}
    for (mp, dp), optim in sorted(source.optims.items()):
        listed = optim.groups or ({},) * len(optim.members)
        if mp not in own:
            merged, own[mp] = _lay_over(merged, [_plain(source, optim, settings) for settings in listed])
        for number, settings in enumerate(listed[: len(own[mp])]):
            for name in _members(source, optim, number, settings, shapes_for(source, mp, dp) or ()):
                own[mp][number].members.setdefault(name)
    found = [(list(group.members), group.settings) for group in merged]
    plain_layers = source.layers and source.degrees.ep == 1
    if plain_layers and all(names == in_layers(names) for order in stage_orders(source) for names in order):
        return [(in_layers(names), settings) for names, settings in found]
    return found


def stage_orders(source: Source) -> list[list[list[str]]]:
    """Returns by model-parallel rank and group the FQNs in the order in which that rank's optimizer was given them."""
    orders: dict[int, list[list[str]]] = {}
    for (mp, dp), optim in sorted(source.optims.items()):
        shapes = shapes_for(source, mp, dp) or ()
        if mp not in orders:
            listed = optim.groups or ({},) * len(optim.members)
            orders[mp] = [_members(source, optim, number, group, shapes) for number, group in enumerate(listed)]
    return [orders[mp] for mp in sorted(orders)]


def in_layers(names: Sequence[str]) -> list[str]:
    """Returns names of a pipeline in the model's order: tied modules, which have no layer, then layer by layer."""
    return sorted(names, key=lambda name: int(match[1]) if (match := _LAYER.match(name)) else -1)


def _members(source: Source, optim: OptimStates, group: int, settings: Settings, shapes: Sequence[Shapes]) -> list[str]:
    found: list[str] = []
    for number in optim.members[group] if group < len(optim.members) else ():
        if number < len(shapes):
            place = place_of(source, optim, number, settings)
            counts = local_experts(name for name, _ in shapes[number])
            names = own_order(source, optim.name.mp, number, shapes[number])
            found += [normalize_fqn(global_name(name, counts, place.ep_rank)) for name in names]
    return found


def _lay_over(merged: list[_Group], settings: Sequence[Settings]) -> tuple[list[_Group], list[_Group]]:
    """Lays a rank's groups over those of earlier ranks; returns all groups, and the rank's own among them.

    DeepSpeed takes groups without parameters out of an optimizer, so a pipeline stage may lack some: where numbers do
    not fit, groups with equal settings are one, and the others go in where the rank has them.
    """
    same = [_equal(held, group) for held, group in zip(merged, settings, strict=False)]
    known = any(_equal(held, group) for held in merged for group in settings)
    if len(merged) == len(settings) and (any(same) or not known):
        return merged, merged
    found, own, at = list(merged), list[_Group](), 0
    for group in settings:
        place = next((n for n in range(at, len(found)) if _equal(found[n], group)), None)
        if place is None:
            place = at
            found.insert(place, _Group({}, group))
        own.append(found[place])
        at = place + 1
    return found, own


def _equal(held: _Group, settings: Settings) -> bool:
    return same_plain(plain(held.settings), plain(settings))


def own_order(source: Source, mp: int, number: int, shapes: Shapes) -> list[str]:
    """Returns a group's names in the order in which the optimizer was given them.

    Round-robin gradients shuffle the flattened order. DeepSpeed's maps, one rank's after the other, keep the old one;
    maps that follow the buffers, as samerun writes them, do not, and then the shuffle is undone.
    """
    listed = [name for name, _ in shapes]
    mapped: dict[str, None] = {}
    placed: dict[str, None] = {}
    ranks = 0
    for (rank, _), optim in sorted(source.optims.items()):
        if rank == mp and optim.mappings and number < len(optim.mappings):
            places = optim.mappings[number]
            mapped.update(dict.fromkeys(places))
            placed.update(dict.fromkeys(sorted(places, key=lambda name: places[name][0])))
            ranks = max(ranks, optim.partitions[number] if number < len(optim.partitions) else 0)
    shuffled = as_dict(source.config.get("zero_optimization")).get("round_robin_gradients") is True
    if shuffled and ranks and list(placed) == listed:
        order = [place for rank in range(ranks) for place in range(rank, len(listed), ranks)]
        return [name for _, name in sorted(zip(order, listed, strict=True))]
    return list(mapped) if set(mapped) == set(listed) else listed


def _plain(source: Source, optim: OptimStates, settings: Settings) -> dict[str, Any]:
    held = without_role(plain_value(dict(settings), optim.file, source.files))
    return {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in held.items()}


def groups_of(flat: Flat) -> tuple[ParamGroup, ...]:
    """Returns the groups as the logical state has them."""
    return tuple(ParamGroup(tuple(members), settings) for members, settings in flat.groups)

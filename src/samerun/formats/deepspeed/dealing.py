"""Experts of a run that is written: which rank holds which, under which number and in which order (DeepSpeed 0.19.8).

Experts of a layer are dealt in runs: with 6 experts, rank 1 of 2 holds 3 to 5 and calls them 0 to 2. All ranks flatten
theirs in one order, that of the model's parameters. A group that would be longer than `MOST_ELEMENTS` on a rank is cut
(`split_params_into_different_moe_groups_for_optimizer`), so the groups themselves depend on the degree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role
from samerun.errors import PlanError, Problem
from samerun.formats.deepspeed.carried import source_stage
from samerun.formats.deepspeed.experts import expert_of
from samerun.formats.deepspeed.training import OWN_FORMATS, Trained, TrainedGroup, Training, name_of

MOST_ELEMENTS = 178_956_971

Place = tuple[str, int, str]
"""A layer's prefix, a number of an expert, and a parameter's name inside it."""


@dataclass(frozen=True, slots=True)
class Share:
    """What of a group a rank holds a part of: part number `part` of `parts` equal ones of `members`."""

    members: tuple[Trained, ...]
    parts: int
    part: int


def share_of(group: TrainedGroup, rank: int, ranks: int, *, data_first: bool) -> Share:
    """Returns a rank's share: ranks with the same experts cut those between them, all ranks cut everything else.

    Neighbours hold different experts, or with `data_first` (`use_data_before_expert_parallelism`) the same ones.
    """
    if not group.dealt:
        return Share(group.members, ranks, rank)
    parts = ranks // len(group.dealt)
    owner, part = divmod(rank, parts) if data_first else divmod(rank, len(group.dealt))[::-1]
    return Share(group.dealt[owner], parts, part)


def destination_ep(state: LogicalState, layout: Layout | None) -> int:
    """Returns over how many ranks experts are dealt: as the layout says, else as in the source."""
    chosen = layout or (state.topology.layout if state.format in OWN_FORMATS else None)
    return chosen.ep if chosen is not None else 1


def expert_layers(state: LogicalState, training: Training) -> dict[str, int]:
    """Returns the layers' numbers of experts, by what their names begin with, in the model's order.

    Raises:
        PlanError: if a layer lacks experts.
    """
    entries = [entry for entry in state.tensors.values() if entry.key.role is Role.PARAM]
    names = [name_of(state, entry) for entry in entries]
    if state.format not in OWN_FORMATS:  # other formats may keep tensors by name; groups keep the model's order
        names = [*(member.name for group in training.groups for member in group.members), *names]
    numbers: dict[str, set[int]] = {}
    for prefix, number, _ in _places(names):
        numbers.setdefault(prefix, set()).add(number)
    for prefix, found in numbers.items():
        if found != set(range(len(found))):
            raise PlanError(_refused(f"of the experts {prefix}* there are {sorted(found)[:8]} only"))
    return {prefix: len(found) for prefix, found in numbers.items()}


def deal_experts(state: LogicalState, training: Training, ep: int) -> None:
    """Deals the experts' groups of a run to `ep` ranks. Nothing happens to a run without experts.

    Raises:
        PlanError: if they cannot be dealt so that a job of that degree has the same groups.
    """
    training.layers, training.ep = expert_layers(state, training), ep
    if not training.layers:
        return
    if problems := list(_check(training, ep)):
        raise PlanError(problems)
    layers = training.layers
    chosen = [group for group in training.groups if _is_of_experts(group)]
    sequences = [list(_places(member.name for member in group.members)) for group in chosen]
    held = _held_degree(state, sequences, layers)
    orders = [_first_rank(sequence, layers, held) for sequence in sequences]
    if held != ep:
        chosen, orders = _joined(chosen, orders)
        orders = [_redealt(order, layers, held, ep) for order in orders]
    dealt = [part for group, order in zip(chosen, orders, strict=True) for part in _dealt(group, order, training, held)]
    first = next((number for number, group in enumerate(training.groups) if _is_of_experts(group)), 0)
    plain = [group for group in training.groups if not _is_of_experts(group)]
    training.groups[:] = [*plain[:first], *dealt, *plain[first:]]


def _check(training: Training, ep: int) -> Iterator[Problem]:
    for prefix, count in training.layers.items():
        if count % ep:
            yield _refused(f"{count} experts {prefix}* cannot be dealt to ep={ep} ranks")
            break
    mixed = [number for number, group in enumerate(training.groups) if _is_of_experts(group) is None]
    if mixed:
        yield _refused(f"group {mixed[0]} holds experts beside other parameters; DeepSpeed trains experts in their own")
    tied = [name for pair in training.shared.items() for name in pair if expert_of(name) is not None]
    if tied:
        yield _refused(f"{tied[0]} is tied to another parameter")


def _is_of_experts(group: TrainedGroup) -> bool | None:
    """Whether a group holds experts; None if it holds experts and others."""
    found = {expert_of(member.name) is not None for member in group.members}
    return None if len(found) > 1 else found == {True}


def _places(names: Iterable[str]) -> Iterator[Place]:
    return (place for name in names if (place := expert_of(name)) is not None)


def _held_degree(state: LogicalState, sequences: Sequence[Sequence[Place]], layers: Mapping[str, int]) -> int:
    """Returns over how many ranks the source dealt its experts: recorded with flat buffers, else seen in the order."""
    layout = state.topology.layout if state.format in OWN_FORMATS else None
    flat = (source_stage(state) or 0) > 0 and state.format == "zero"
    recorded = layout.ep if layout is not None and (layout.ep > 1 or flat) else None
    most = math.gcd(*layers.values())
    for degree in [recorded] if recorded else range(most, 0, -1):
        if most % degree == 0 and all(_fits(sequence, layers, degree) for sequence in sequences):
            return degree
    raise PlanError(_refused("the groups do not hold the same parameters of every rank's experts in the same order"))


def _fits(sequence: Sequence[Place], layers: Mapping[str, int], degree: int) -> bool:
    first = _first_rank(sequence, layers, degree)
    wanted = [
        (prefix, number + rank * (layers[prefix] // degree), inner)
        for rank in range(degree)
        for prefix, number, inner in first
    ]
    return wanted == list(sequence)


def _first_rank(sequence: Sequence[Place], layers: Mapping[str, int], degree: int) -> list[Place]:
    """Returns the first rank's part of a sequence, in its order."""
    return [place for place in sequence if place[1] < layers[place[0]] // degree]


def _joined(
    groups: Sequence[TrainedGroup], orders: Sequence[list[Place]]
) -> tuple[list[TrainedGroup], list[list[Place]]]:
    """Joins groups that were cut for their length alone: equal settings, and the next parameter would be too much."""
    found: list[tuple[TrainedGroup, list[Place], int]] = []
    for group, order in zip(groups, orders, strict=True):
        sizes = _sizes(group)
        held = sum(sizes[place] for place in order)
        if found and found[-1][0].settings == group.settings and found[-1][2] + sizes[order[0]] > MOST_ELEMENTS:
            last, before, _ = found[-1]
            both = replace(last, members=(*last.members, *group.members), slots={**last.slots, **group.slots})
            found[-1] = (both, [*before, *order], held)
        else:
            found.append((group, order, held))
    return [group for group, _, _ in found], [order for _, order, _ in found]


def _sizes(group: TrainedGroup) -> dict[Place, int]:
    places = _places(member.name for member in group.members)
    return dict(zip(places, (math.prod(member.shape) for member in group.members), strict=True))


def _redealt(order: Sequence[Place], layers: Mapping[str, int], held: int, ep: int) -> list[Place]:
    """Returns the first rank's order at another degree: layer by layer, expert by expert, as modules list them."""
    inner: dict[str, dict[str, None]] = {}
    for prefix, _, name in order:
        inner.setdefault(prefix, {})[name] = None

    def at(degree: int) -> list[Place]:
        return [
            (prefix, number, name)
            for prefix, names in inner.items()
            for number in range(layers[prefix] // degree)
            for name in names
        ]

    if at(held) != list(order):
        raise PlanError(
            _refused("a group's experts are not in the model's order, so theirs at another ep is not known")
        )
    return at(ep)


def _dealt(group: TrainedGroup, order: Sequence[Place], training: Training, held: int) -> Iterator[TrainedGroup]:
    """Yields the group as a job of the degree has it: cut where it is too long, unless the source's cuts are kept."""
    members = dict(zip(_places(member.name for member in group.members), group.members, strict=True))
    settings = {**group.settings, "name": f"ep_size_{training.ep}", "moe": True}
    parts = _cut(order, _sizes(group)) if held != training.ep else [list(order)]
    for part in parts:
        ranks = tuple(
            tuple(
                replace(members[(prefix, number + rank * (training.layers[prefix] // training.ep), inner)],
                        name=f"{prefix}{number}{inner}")
                for prefix, number, inner in part
            )
            for rank in range(training.ep)
        )  # fmt: skip
        whole = tuple(
            members[(prefix, number + rank * (training.layers[prefix] // training.ep), inner)]
            for rank in range(training.ep)
            for prefix, number, inner in part
        )
        yield replace(group, members=whole, settings=settings, dealt=ranks)


def _cut(order: Sequence[Place], sizes: Mapping[Place, int]) -> list[list[Place]]:
    found: list[list[Place]] = [[]]
    held = 0
    for place in order:
        if found[-1] and held + sizes[place] > MOST_ELEMENTS:
            found.append([])
            held = 0
        found[-1].append(place)
        held += sizes[place]
    return found


def _refused(what: str) -> Problem:
    return Problem(
        "SR-DSW-EXPERTS",
        f"{what}; no file of DeepSpeed's for a job of that degree holds the same run",
        hint="give a degree that divides every layer's experts (--layout dp_shard=4,ep=2), or convert to dcp or "
        "safetensors, which hold every expert whole under its name",
    )

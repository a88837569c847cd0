"""Which position of an optimizer is which parameter, told from the order of registration and from shapes.

`optimizer.state_dict()` numbers parameters group by group. Scripts build groups by walking the model, so each group
holds its parameters in the order in which the model registered them. Given the model's tensors in that order, every
assignment of positions is a way to deal them to the groups (or to none: buffers, and parameters that the optimizer
was not given) so that shapes agree. If all ways agree on a position, it is certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
_MAX_STATES = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor of the model that an optimizer may hold. `unlikely` marks one that has a buffer's name."""

    name: str
    shape: Shape
    unlikely: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a group: the optimizer's key, and the parameter's shape where its state shows it."""

    key: str
    shape: Shape | None


@dataclass(frozen=True, slots=True)
class Matching:
    """Parameter names by key. `open` are keys for which other names would fit as well."""

    names: dict[str, str]
    open: frozenset[str]


@dataclass(slots=True)
class _Step:
    """How one state of the walk was reached: its cost, and the group dealt to (-1: to none)."""

    cost: int
    before: tuple[int, ...] | None
    group: int


def match_order(candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]) -> Matching | None:
    """Deals candidates, in order, to the groups. Returns None if no way fits.

    Of several ways the one is taken that deals to likelier candidates and to earlier groups.
    """
    layers = _walk(candidates, groups)
    end = tuple(len(group) for group in groups)
    if len(layers) <= len(candidates) or end not in layers[-1]:
        return None
    return _trace(candidates, groups, layers, end)


def count_matched(candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]) -> int:
    """Returns how many candidates can be dealt, from the first on, before no way fits. A measure of how wrong an order
    is."""
    return len(_walk(candidates, groups)) - 1


def _walk(candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]) -> list[dict[tuple[int, ...], _Step]]:
    """Returns, after each candidate, every state that can be reached: how many places of each group are filled."""
    total = sum(len(group) for group in groups)
    spare = len(candidates) - total
    flat = [_is_flat(group) for group in groups]
    layers: list[dict[tuple[int, ...], _Step]] = [{(0,) * len(groups): _Step(0, None, -1)}]
    for number, candidate in enumerate(candidates):
        after: dict[tuple[int, ...], _Step] = {}
        for filled, step in layers[-1].items():
            for group, cost in _options(candidate, filled, groups, flat):
                _reach(after, filled, group, step.cost + cost)
            if number - sum(filled) < spare:
                _reach(after, filled, -1, step.cost + (0 if candidate.unlikely else 2))
        if not after:
            break
        if len(after) > _MAX_STATES:
            best = sorted(after, key=lambda filled: after[filled].cost)[:_MAX_STATES]
            after = {filled: after[filled] for filled in best}
        layers.append(after)
    return layers


def _is_flat(group: Sequence[Position]) -> bool:
    """Whether a group holds biases and norms only, as far as known: the usual group without weight decay."""
    known = [position.shape for position in group if position.shape is not None]
    return bool(known) and all(len(shape) <= 1 for shape in known)


def _options(
    candidate: Candidate, filled: tuple[int, ...], groups: Sequence[Sequence[Position]], flat: Sequence[bool]
) -> list[tuple[int, int]]:
    """Returns (group, cost) for each group whose next place the candidate fits."""
    found: list[tuple[int, int]] = []
    for number, group in enumerate(groups):
        if filled[number] == len(group):
            continue
        shape = group[filled[number]].shape
        penalty = 4 if candidate.unlikely else 0
        if shape == candidate.shape:
            found.append((number, penalty))
        elif shape is None:
            found.append((number, penalty + 1 + (flat[number] != (len(candidate.shape) <= 1))))
    return found


def _reach(after: dict[tuple[int, ...], _Step], filled: tuple[int, ...], group: int, cost: int) -> None:
    state = filled if group < 0 else (*filled[:group], filled[group] + 1, *filled[group + 1 :])
    known = after.get(state)
    if known is None or (cost, group) < (known.cost, known.group):
        after[state] = _Step(cost, filled, group)


def _trace(
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[Position]],
    layers: Sequence[dict[tuple[int, ...], _Step]],
    end: tuple[int, ...],
) -> Matching:
    """Walks back: the best way gives the names, all ways that reach the end give what else each place could be."""
    names: dict[str, str] = {}
    state: tuple[int, ...] | None = end
    for number in range(len(candidates), 0, -1):
        step = layers[number][state] if state is not None else _Step(0, None, -1)
        if step.group >= 0 and state is not None:
            names[groups[step.group][state[step.group] - 1].key] = candidates[number - 1].name
        state = step.before
    fits = _all_fits(candidates, groups, layers, end)
    return Matching(names, frozenset(key for key, others in fits.items() if len(others) > 1))


def _all_fits(
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[Position]],
    layers: Sequence[dict[tuple[int, ...], _Step]],
    end: tuple[int, ...],
) -> dict[str, set[str]]:
    fits: dict[str, set[str]] = {}
    alive = {end}
    for number in range(len(candidates), 0, -1):
        candidate = candidates[number - 1]
        before: set[tuple[int, ...]] = set()
        for state in alive:
            if state in layers[number - 1]:
                before.add(state)
            for group in range(len(groups)):
                if state[group] == 0:
                    continue
                earlier = (*state[:group], state[group] - 1, *state[group + 1 :])
                place = groups[group][earlier[group]]
                if earlier in layers[number - 1] and place.shape in (None, candidate.shape):
                    before.add(earlier)
                    fits.setdefault(place.key, set()).add(candidate.name)
        alive = before
    return fits


def match_shapes(candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]) -> Matching:
    """Names only the positions whose shape one candidate and one position alone have. For when no order fits."""
    places = [place for group in groups for place in group]
    names: dict[str, str] = {}
    for place in places:
        fitting = [candidate.name for candidate in candidates if candidate.shape == place.shape]
        if len(fitting) == 1 and sum(other.shape == place.shape for other in places) == 1:
            names[place.key] = fitting[0]
    return Matching(names, frozenset())

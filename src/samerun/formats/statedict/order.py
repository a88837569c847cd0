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
# How many states of the walk are kept after each candidate: fewer the more candidates there are.
_STATES_IN_ALL = 40_000
_FEWEST_STATES = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor of the model that an optimizer may hold."""

    name: str
    shape: Shape


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


State = tuple[int, ...]  # how many places of each group are filled
Layer = dict[State, int]  # every state that can be reached, with what the cheapest way there cost


def match_order(candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]) -> Matching | None:
    """Deals candidates, in order, to the groups. Returns None if no way fits.

    Of several ways the one is taken that gives places without a shape what their group usually holds, and that deals
    each candidate, the first one first, to the earliest group.
    """
    dealer = Dealer.of(len(candidates), groups)
    layers = [dealer.start()]
    for number, candidate in enumerate(candidates):
        layers.append(dealer.deal(layers[-1], number, candidate))
        if not layers[-1]:
            return None
    return _trace(dealer, candidates, layers) if dealer.done(layers[-1]) else None


@dataclass(frozen=True, slots=True)
class Dealer:
    """The groups to be filled, how many candidates may be left over, and how many states are kept at most."""

    groups: Sequence[Sequence[Position]]
    flat: tuple[bool, ...]
    spare: int
    most: int

    @classmethod
    def of(cls, num_candidates: int, groups: Sequence[Sequence[Position]]) -> Dealer:
        """Returns the dealer for this many candidates; `spare` is negative if they are too few."""
        spare = num_candidates - sum(len(group) for group in groups)
        most = max(_FEWEST_STATES, _STATES_IN_ALL // max(1, num_candidates))
        return cls(groups, tuple(_is_flat(group) for group in groups), spare, most)

    @property
    def end(self) -> State:
        """The state in which every place is filled."""
        return tuple(len(group) for group in self.groups)

    def start(self) -> Layer:
        """Returns what is reached before the first candidate."""
        return {(0,) * len(self.groups): 0}

    def done(self, layer: Layer) -> bool:
        """Whether every place of every group can be filled."""
        return self.end in layer

    def options(self, filled: State, number: int, candidate: Candidate) -> list[tuple[State, int, int]]:
        """Returns (state after, group, cost) for each way to deal candidate `number`; group -1 leaves it over."""
        found: list[tuple[State, int, int]] = []
        for group, places in enumerate(self.groups):
            at = filled[group]
            if at < len(places) and places[at].shape in (None, candidate.shape):
                after = (*filled[:group], at + 1, *filled[group + 1 :])
                unusual = self.flat[group] != (len(candidate.shape) <= 1)
                found.append((after, group, 1 + unusual if places[at].shape is None else 0))
        if number - sum(filled) < self.spare:
            found.append((filled, -1, 2))
        return found

    def deal(self, layer: Layer, number: int, candidate: Candidate) -> Layer:
        """Returns every state that can be reached by dealing candidate `number`; nothing if it fits nowhere."""
        after: Layer = {}
        for filled, spent in layer.items():
            for state, _, cost in self.options(filled, number, candidate):
                after[state] = min(spent + cost, after.get(state, spent + cost))
        if len(after) <= self.most:
            return after
        best = sorted(after, key=lambda filled: after[filled])[: self.most]
        return {filled: after[filled] for filled in best}


def _is_flat(group: Sequence[Position]) -> bool:
    """Whether a group holds biases and norms only, as far as known: the usual group without weight decay."""
    known = [position.shape for position in group if position.shape is not None]
    return bool(known) and all(len(shape) <= 1 for shape in known)


def _trace(dealer: Dealer, candidates: Sequence[Candidate], layers: Sequence[Layer]) -> Matching:
    """Finds, from the end, what each way still costs; then takes the cheapest. All ways give what else would fit."""
    ahead: list[Layer] = [{dealer.end: 0}]
    fits: dict[str, set[str]] = {}
    for number in range(len(candidates) - 1, -1, -1):
        here: Layer = {}
        for filled in layers[number]:
            for after, group, cost in dealer.options(filled, number, candidates[number]):
                if after in ahead[-1]:
                    total = cost + ahead[-1][after]
                    here[filled] = min(total, here.get(filled, total))
                    if group >= 0:
                        key = dealer.groups[group][filled[group]].key
                        fits.setdefault(key, set()).add(candidates[number].name)
        ahead.append(here)
    ahead.reverse()
    names: dict[str, str] = {}
    filled = next(iter(dealer.start()))
    for number, candidate in enumerate(candidates):
        ways = [way for way in dealer.options(filled, number, candidate) if way[0] in ahead[number + 1]]
        after, group, _ = min(ways, key=lambda way: way[2] + ahead[number + 1][way[0]])
        if group >= 0:
            names[dealer.groups[group][filled[group]].key] = candidate.name
        filled = after
    cut_short = any(len(layer) >= dealer.most for layer in layers)  # so many ways that some were not followed
    return Matching(names, frozenset(key for key in names if cut_short or len(fits[key]) > 1))


def match_shapes(candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]) -> Matching:
    """Names only the positions whose shape one candidate and one position alone have. For when no order fits."""
    places = [place for group in groups for place in group]
    names: dict[str, str] = {}
    for place in places:
        fitting = [candidate.name for candidate in candidates if candidate.shape == place.shape]
        if len(fitting) == 1 and sum(other.shape == place.shape for other in places) == 1:
            names[place.key] = fitting[0]
    return Matching(names, frozenset())

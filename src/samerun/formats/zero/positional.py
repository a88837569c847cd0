"""Names for an optimizer that knows its parameters by number only: stage 0 saves torch's own state dict.

Numbers run through the groups in order, and a group's members keep the model's order unless the training script
shuffled them. So each group is a subsequence of the model's parameters, by shape; usually only one way of laying the
groups over the model exists, and then every number has its name. Where several exist, the numbers that differ between
them have none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

Token = TypeVar("Token", bound=Hashable)

_MOST_STATES = 200_000


def match_groups(
    candidates: Sequence[Token], groups: Sequence[Sequence[Token | None]]
) -> list[list[int | None]] | None:
    """Returns, for each member of each group, the number of the candidate it must be; None if it could be several.

    Candidates and members are compared by equality (shapes); a member that is None could be any. Each candidate is used
    at most once, and the members of a group follow each other in the candidates' order. Returns None if the groups
    cannot be laid over the candidates, or if trying would take too long.

    >>> match_groups(["a", "b", "a", "c"], [["b"], ["a", "c"]])
    [[1], [None, 3]]
    """
    start = (0,) * len(groups)
    layers: list[dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]] = []
    reached: set[tuple[int, ...]] = {start}
    visited = 0
    needed = sum(map(len, groups))
    for number, token in enumerate(candidates):
        steps: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
        spare = len(candidates) - number - 1
        for state in reached:
            for group, following in _moves(state, token, groups):
                if needed - sum(following) <= spare:
                    steps.setdefault(following, []).append((group, state))
        visited += len(steps)
        if visited > _MOST_STATES:
            return None
        layers.append(steps)
        reached = set(steps)
    goal = tuple(map(len, groups))
    return _trace(layers, goal, groups) if goal in reached else None


def match_unique(candidates: Sequence[Token], groups: Sequence[Sequence[Token | None]]) -> list[list[int | None]]:
    """Returns what `match_groups` does, for members that are the only one of their kind on both sides, in any order.

    >>> match_unique(["a", "b", "a"], [["a"], ["a", "b"]])
    [[None], [None, 1]]
    """
    members = [member for group in groups for member in group]
    tokens = {member for member in members if member is not None} if None not in members else set[Token]()
    only = {token for token in tokens if members.count(token) == 1 and candidates.count(token) == 1}
    return [
        [candidates.index(member) if member is not None and member in only else None for member in group]
        for group in groups
    ]


def _moves(
    state: tuple[int, ...], token: Token, groups: Sequence[Sequence[Token | None]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns what a candidate can be in a state: nobody's (-1), or the next member of a group it equals."""
    moves = [(-1, state)]
    for group, members in enumerate(groups):
        at = state[group]
        if at < len(members) and members[at] in (token, None):
            moves.append((group, (*state[:group], at + 1, *state[group + 1 :])))
    return moves


def _trace(
    layers: Sequence[dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]],
    goal: tuple[int, ...],
    groups: Sequence[Sequence[Token | None]],
) -> list[list[int | None]]:
    """Walks back from the goal over every way, and keeps the members that are the same candidate in all of them."""
    found: list[list[set[int]]] = [[set() for _ in members] for members in groups]
    states = {goal}
    for number in range(len(layers) - 1, -1, -1):
        before: set[tuple[int, ...]] = set()
        for state in states:
            for group, earlier in layers[number][state]:
                before.add(earlier)
                if group >= 0:
                    found[group][earlier[group]].add(number)
        states = before
    return [[min(options) if len(options) == 1 else None for options in members] for members in found]

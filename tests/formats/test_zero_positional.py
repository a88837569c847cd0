"""Names for numbered optimizer state, against trying every way."""

from __future__ import annotations

from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from samerun.formats.zero.positional import match_groups, match_unique

tokens = st.lists(st.sampled_from("ab"), max_size=6)


def every_way(candidates: list[str], groups: list[list[str]]) -> list[list[tuple[int, ...]]]:
    """Every choice of places for the groups: increasing inside a group, none used twice, equal to the members."""
    ways: list[list[tuple[int, ...]]] = [[]]
    for group in groups:
        ways = [
            [*way, places]
            for way in ways
            for places in combinations([i for i in range(len(candidates)) if all(i not in p for p in way)], len(group))
            if [candidates[i] for i in places] == group
        ]
    return ways


@given(tokens, st.lists(st.lists(st.sampled_from("ab"), max_size=3), min_size=1, max_size=2))
def test_a_member_has_a_name_exactly_when_every_way_agrees(candidates: list[str], groups: list[list[str]]):
    ways = every_way(candidates, groups)
    found = match_groups(candidates, groups)
    if not ways:
        assert found is None
        return
    expected = [
        [places.pop() if len(places := {way[g][m] for way in ways}) == 1 else None for m in range(len(group))]
        for g, group in enumerate(groups)
    ]
    assert found == expected


@given(st.permutations("aab"), st.permutations("aab"))
def test_only_unique_members_are_named_without_order(candidates: list[str], members: list[str]):
    found = match_unique(candidates, [members])[0]
    assert [place is not None for place in found] == [member == "b" for member in members]
    assert all(candidates[place] == "b" for place in found if place is not None)


def test_a_member_of_unknown_shape_is_placed_by_its_neighbours():
    assert match_groups(["a", "b", "c"], [["a", None, "c"]]) == [[0, 1, 2]]
    assert match_groups(["a", "b", "c"], [[None, "c"]]) == [[None, 2]]


def test_too_many_ways_are_not_tried():
    assert match_groups(["a"] * 400, [["a"] * 100, ["a"] * 100, ["a"] * 100]) is None
    assert len(list(permutations("ab"))) == 2

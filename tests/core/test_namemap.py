"""Name maps against plain NumPy: every step, compositions, the way back, and rules that cannot be followed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.dtype import DTYPES
from samerun.core.links import Link, compose, whole
from samerun.core.mapparse import STEPS, MapSyntaxError, parse_map, parse_settings
from samerun.core.mapsteps import (
    Concat,
    FuseQKV,
    Resize,
    RotaryHalves,
    RotaryPairs,
    Split,
    SplitQKV,
    Stack,
    Step,
    Transpose,
    Unstack,
)
from samerun.core.namemap import NameMap, Pattern, Rule
from samerun.core.state import LogicalState, ParamGroup, TensorEntry, TensorKey, Tiling

Arrays = list[np.ndarray[Any, Any]]


def follow(links: list[Link], arrays: Arrays, shapes: list[tuple[int, ...]]) -> Arrays:
    """The oracle's other half: moves values along links, element by element."""
    made = [np.full(shape, -1) for shape in shapes]
    for link in links:
        axes = dict(link.axes)
        for index in np.ndindex(*link.source_sizes()):
            source = tuple(a + n * m for a, n, m in zip(link.source_offsets, index, link.source_steps(), strict=True))
            target = list(link.target_offsets)
            for mine, theirs in axes.items():
                target[theirs] += index[mine] * link.target_steps()[theirs]
            assert made[link.target][tuple(target)] == -1, "written twice"
            made[link.target][tuple(target)] = arrays[link.source][source]
    return made


def numbered(*shapes: tuple[int, ...]) -> Arrays:
    made, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        made.append(np.arange(start, start + size).reshape(shape))
        start += size
    return made


def qkv(fused: np.ndarray[Any, Any], heads: int, groups: int) -> Arrays:
    """Megatron's layout taken apart by reshaping, as its own exporter does."""
    width = fused.shape[0] // (heads + 2 * groups)
    parts = fused.reshape(groups, heads // groups + 2, width, *fused.shape[1:])
    tails = fused.shape[1:]
    return [parts[:, :-2].reshape(-1, *tails), parts[:, -2].reshape(-1, *tails), parts[:, -1].reshape(-1, *tails)]


def halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Pairs of rows as halves of a head, by reshaping, as Hugging Face's converter does."""
    tails = rows.shape[1:]
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *tails).swapaxes(1, 2).reshape(rows.shape)


CASES: list[tuple[Step, Arrays, Any]] = [
    (Split(0, parts=3), numbered((6, 5)), lambda a: np.split(a[0], 3)),
    (Split(-1, sizes=(1, 4)), numbered((2, 5)), lambda a: [a[0][:, :1], a[0][:, 1:]]),
    (Concat(1, sizes=(2, 3)), numbered((4, 2), (4, 3)), lambda a: [np.concatenate(a, 1)]),
    (Concat(0, parts=2), numbered((3,), (3,)), lambda a: [np.concatenate(a)]),
    (Transpose(), numbered((3, 5)), lambda a: [a[0].T]),
    (Transpose((2, 0, 1)), numbered((2, 3, 5)), lambda a: [a[0].transpose(2, 0, 1)]),
    (Transpose(), numbered((7,)), lambda a: a),
    (SplitQKV(6, 2), numbered((30, 4)), lambda a: qkv(a[0], 6, 2)),
    (SplitQKV(4, 4), numbered((36,)), lambda a: qkv(a[0], 4, 4)),
    (RotaryHalves((3,)), numbered((12, 5)), lambda a: [halves(a[0], 3)]),
    (RotaryHalves((2,)), numbered((12,)), lambda a: [halves(a[0], 2)]),
    (RotaryPairs((2,)), numbered((12, 1)), lambda a: [a[0][[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]]]),
    (RotaryHalves((2, 1, 0)), numbered((8, 3), (4, 3), (5, 3)), lambda a: [halves(a[0], 2), halves(a[1], 1), a[2]]),
    (Resize(0, 5, 8), numbered((5, 2)), lambda a: [np.concatenate([a[0], np.full((3, 2), -1)])]),
    (Resize(1, 5, 3), numbered((2, 5)), lambda a: [a[0][:, :3]]),
    (Unstack("i"), numbered((3, 2, 4)), lambda a: list(a[0])),
    (Stack("i"), numbered((2, 4), (2, 4), (2, 4)), lambda a: [np.stack(a)]),
]


@pytest.mark.parametrize(
    ("step", "arrays", "oracle"), CASES, ids=[f"{number}-{type(case[0]).__name__}" for number, case in enumerate(CASES)]
)
def test_every_step_is_what_numpy_does_and_can_be_undone(step: Step, arrays: Arrays, oracle: Any) -> None:
    shapes, links = step.apply([array.shape for array in arrays])
    expected = oracle(arrays)
    found = follow(links, arrays, shapes)
    assert [array.tolist() for array in found] == [array.tolist() for array in expected]
    back_shapes, back = step.inverse().apply(shapes)
    assert back_shapes == [array.shape for array in arrays]
    again = follow(back, found, back_shapes)
    kept = [np.where(one == -1, two, one) for one, two in zip(again, arrays, strict=True)]  # what was cut off is gone
    assert [array.tolist() for array in kept] == [array.tolist() for array in arrays]


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_steps_compose(layers: int, groups: int, per_group: int, width: int, turned: bool) -> None:
    heads = groups * per_group
    stacked = numbered((layers, (heads + 2 * groups) * width, 3))
    shapes, links = Unstack("i").apply([stacked[0].shape])
    for number in range(layers):
        one_shapes, one = SplitQKV(heads, groups).apply([shapes[number]])
        steps: list[Step] = [Concat(0)] + ([Transpose()] if turned else [])
        moved = compose([link for link in links if link.target == number], [Link(number, *_rest(link)) for link in one])
        for step in steps:
            one_shapes, following = step.apply(one_shapes)
            moved = compose(moved, following)
        (found,) = follow(moved, stacked, one_shapes)
        expected = np.concatenate(qkv(stacked[0][number], heads, groups))
        assert found.tolist() == (expected.T if turned else expected).tolist()


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.sampled_from("hpts"), max_size=4), st.data())
def test_strided_steps_compose(heads: int, half: int, chain: list[str], data: st.DataObject) -> None:
    """Halves of halves, pairs, transposes and cuts at any row: as many links as the steps need, the oracle's values."""
    rows = 2 * half * heads
    arrays = numbered((rows, 3))
    shapes, links = [arrays[0].shape], [whole(arrays[0].shape)]
    expected = arrays
    for kind in chain:
        if kind == "t":
            step: Step = Transpose()
            expected = [array.T for array in expected]
        elif kind == "s":
            step = Split(0, sizes=(cut := data.draw(st.integers(0, shapes[0][0])), shapes[0][0] - cut))
            both, joined = Concat(0, sizes=(cut, shapes[0][0] - cut)), step.apply(shapes)
            links, shapes, step = compose(links, joined[1]), joined[0], both
        else:
            if shapes[0][0] != rows:
                continue
            step = RotaryHalves((heads,)) if kind == "h" else RotaryPairs((heads,))
            expected = [(halves if kind == "h" else pairs)(array, heads) for array in expected]
        shapes, moved = step.apply(shapes)
        links = compose(links, moved)
    (found,) = follow(links, arrays, shapes)
    assert found.tolist() == expected[0].tolist()
    back = [link.reversed() for link in links]
    assert follow(back, [found], [arrays[0].shape])[0].tolist() == arrays[0].tolist()


def pairs(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Halves of a head as pairs of rows, by reshaping."""
    half, tails = rows.shape[0] // heads // 2, rows.shape[1:]
    return rows.reshape(heads, 2, half, *tails).swapaxes(1, 2).reshape(rows.shape)


def test_a_head_is_two_links_however_wide_it_is() -> None:
    for width in (4, 64, 1024):
        _, links = RotaryHalves((8, 2, 0)).apply([(8 * width, 5), (2 * width, 5), (7, 5)])
        assert len(links) == 2 * 8 + 2 * 2 + 1


def _rest(link: Link) -> tuple[Any, ...]:
    return link.target, link.source_offsets, link.target_offsets, link.axes, link.sizes


def test_a_tensor_is_itself() -> None:
    assert compose([whole((2, 3))], [whole((2, 3))]) == [whole((2, 3))]
    assert compose([whole(())], [whole(())]) == [whole(())]


@pytest.mark.parametrize(
    ("step", "shapes", "message"),
    [
        (Split(0, parts=4), [(6, 5)], "split of 6 into 4"),
        (Split(0, sizes=(2, 3)), [(6, 5)], "is 5, of 6"),
        (Split(2, parts=1), [(6, 5)], "axis 2"),
        (Split(0, parts=2), [(6,), (6,)], "takes one tensor, not 2"),
        (Concat(0), [(2, 3), (2, 4)], "of shapes"),
        (Concat(0, sizes=(2, 1)), [(2, 3), (2, 3)], "parts of"),
        (Transpose((0, 1)), [(2, 3, 4)], "transpose to order"),
        (SplitQKV(4, 3), [(10, 2)], "4 heads in 3 groups"),
        (SplitQKV(4, 2), [(9, 2)], "of a tensor of shape"),
        (FuseQKV(4, 2), [(8, 2), (4, 2)], "not 2 tensors"),
        (FuseQKV(4, 2), [(8, 2), (8, 2), (8, 2)], "expected"),
        (RotaryHalves((5,)), [(12, 2)], "rotary rows of 5 heads"),
        (RotaryHalves((12,)), [(12, 2)], "rotary rows of 12 heads"),
        (RotaryPairs((2, 2)), [(12, 2)], "of 2 tensors, not 1"),
        (Resize(0, 5, 8), [(6, 2)], "from 5, and it is 6"),
        (Unstack("i"), [()], "without axes"),
        (Stack("i"), [(2,), (3,)], "stack of tensors"),
    ],
)
def test_steps_that_cannot_be_taken_say_why(step: Step, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step.apply(shapes)


def test_patterns() -> None:
    assert Pattern("h.{i}.*").match("h.3.attn.w") == (("*", "attn.w"), ("i", "3"))
    assert Pattern("h.{i}.w").match("h.3.x.w") is None
    assert Pattern("{a}.{a}").match("x.y") is None
    assert Pattern("{a}.{a}").match("x.x") == (("a", "x"),)
    assert Pattern("a+b").match("aab") is None
    assert Pattern("out.{i}.*").fill((("*", "q.w"), ("i", "7"))) == "out.7.q.w"


def test_renaming() -> None:
    names = NameMap.of({"wte.w": "tok.w", "h.*.w": "blocks.*.w", "param:seen": "buffer:seen"})
    assert names.rename("wte.w") == ("tok.w",)
    assert names.rename("h.3.w") == ("blocks.3.w",)
    assert names.rename("other") == ("other",)
    assert names.inverse().rename("blocks.3.w") == ("h.3.w",)
    assert names.unused(["param:wte.w", "param:h.1.w"]) == ["param:seen"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"a.*": "b"}, "gets lost"),
        ({"a": "b.*"}, "nothing gives"),
        ({"a.*.*": "b.*.*"}, "at most one"),
        ({"param:a": "b"}, "on both sides"),
        ({"a.{i}": "b.{j}"}, "nothing gives j"),
    ],
)
def test_rules_that_cannot_be(rules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NameMap.of(rules)
    with pytest.raises(MapSyntaxError, match=message):
        parse_map(rules, {})


def test_what_cannot_be_undone_says_so() -> None:
    with pytest.raises(ValueError, match=r"a, b: concat without parts.*c: what was left out"):
        parse_map(
            {"samerun-map": 1, "rules": [{"from": ["a", "b"], "to": "ab", "do": "concat"}, {"drop": "c"}]}, {}
        ).inverse()


def test_the_written_form_reads_every_step() -> None:
    steps = [
        {"split": {"parts": 2}}, {"concat": {"axis": 1, "sizes": [1, "heads"]}}, "transpose", {"transpose": [1, 0, 2]},
        {"split-qkv": {"heads": "heads", "groups": 2}}, {"fuse-qkv": {"heads": 4, "groups": 2}}, {"stack": "{i}"},
        {"unstack": {"over": "j", "start": 1}}, {"resize": {"before": 5, "after": 8}},
        {"rotary-halves": {"heads": "heads"}}, {"rotary-pairs": {"heads": ["heads", 2, 0]}},
    ]  # fmt: skip
    assert {next(iter(step)) if isinstance(step, dict) else step for step in steps} == set(STEPS)
    document = {"samerun-map": 1, "rules": [{"from": "x.{i}", "to": "y.{j}", "do": steps}]}
    (rule,) = parse_map(document, {"heads": 4}).rules
    assert rule == Rule(
        (Pattern("x.{i}"),),
        (Pattern("y.{j}"),),
        (Split(0, 2), Concat(1, None, (1, 4)), Transpose(), Transpose((1, 0, 2)), SplitQKV(4, 2), FuseQKV(4, 2),
         Stack("i"), Unstack("j", 1), Resize(0, 5, 8), RotaryHalves((4,)), RotaryPairs((4, 2, 0))),
    )  # fmt: skip


def test_everything_that_is_wrong_with_a_document_is_listed() -> None:
    rules = [
        {"from": "a"},
        {"from": "a", "to": "b", "do": [{"splat": {}}, {"split-qkv": {"heads": "many"}}, {"resize": {"before": "x"}}]},
        {"from": 3, "to": "b"},
        {"from": ["a", "b"], "to": "c"},
        {"drop": "x", "optional": 1},
        "names",
        {"from": "a", "to": "b", "roles": ["optim", "weights"]},
    ]
    with pytest.raises(MapSyntaxError) as caught:
        parse_map({"samerun-map": 2, "rules": rules, "other": 1}, {})
    text = str(caught.value)
    for part in ("samerun-map is 2", "unknown: other", "rule 1: a rule has from and to", "rule 2: unknown step 'splat'",
                 "rule 2: split-qkv: settings are groups, heads; check groups", "check after", "rule 3: from is a name",
                 "rule 4: a, b: 2 names become 1", "rule 5: optional", "rule 6: 'names' is no rule",
                 "rule 7: roles are param, buffer, optim, master, ema, not 'weights'"):  # fmt: skip
        assert part in text, part
    for nothing in ([], {}, {"a": 1}, 3):
        with pytest.raises(MapSyntaxError, match="a name map is"):
            parse_map(nothing, {})
    with pytest.raises(MapSyntaxError, match=r"settings\.x: True"):
        parse_settings({"samerun-map": 1, "settings": {"x": True, "y": [1]}})


def test_rules_of_some_roles_and_groups_by_the_optimizer_s_names() -> None:
    """A model saved apart whose optimizer saw one fused tensor: torchtitan's."""
    document = {
        "samerun-map": 1,
        "rules": [
            {"from": "qkv", "to": ["q", "k", "v"], "do": [{"split": {"sizes": [4, 2, 2]}}], "roles": ["optim"]},
            {"from": "wq", "to": "q"}, {"from": "wk", "to": "k"}, {"from": "wv", "to": "v"},
        ],
    }  # fmt: skip
    shapes = {"param:wq": (4, 3), "param:wk": (2, 3), "param:wv": (2, 3), "optim.m:qkv": (8, 3), "optim.step:qkv": ()}
    state = state_of(shapes, ("qkv",))
    there = parse_map(document, {}).apply(state)
    assert not there.problems
    assert {str(tensor.key): tensor.shape for tensor in there.tensors} == {
        **{f"param:{name}": (rows, 3) for name, rows in (("q", 4), ("k", 2), ("v", 2))},
        **{f"optim.m:{name}": (rows, 3) for name, rows in (("q", 4), ("k", 2), ("v", 2))},
        **{f"optim.step:{name}": () for name in "qkv"},
    }
    assert there.names["qkv"] == ("q", "k", "v")
    back = (
        parse_map(document, {})
        .inverse()
        .apply(state_of({str(tensor.key): tensor.shape for tensor in there.tensors}, ("q", "k", "v")))
    )
    assert {str(tensor.key): tensor.shape for tensor in back.tensors} == shapes
    assert [back.names[name] for name in "qkv"] == [("qkv",)] * 3  # not wq, wk, wv: the optimizer has no such names


def state_of(shapes: dict[str, tuple[int, ...]], params: tuple[str, ...]) -> LogicalState:
    entries = {
        text: TensorEntry(key := TensorKey.parse(text), shape, DTYPES["float32"], Tiling.whole(shape), key.fqn)
        for text, shape in shapes.items()
    }
    return LogicalState(format="x", tensors=entries, groups=(ParamGroup(params, {}),))

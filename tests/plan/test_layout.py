"""What a layout does to tensors, from shapes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState
from samerun.errors import Severity
from samerun.plan.layout import check_layout
from support.states import adam_state

STATE = adam_state()


def codes(layout: Layout, state: LogicalState = STATE, source: Layout | None = None) -> dict[str, Severity]:
    return {problem.code: problem.severity for problem in check_layout(state, layout, source)}


def of(**shapes: tuple[int, ...]) -> LogicalState:
    return adam_state({name.replace("__", "."): shape for name, shape in shapes.items()})


def test_empty_and_uneven_shards_are_mentioned() -> None:
    assert codes(Layout(dp_shard=4)) == {"SR-PLAN-EMPTY-SHARDS": Severity.NOTE, "SR-PLAN-UNEVEN": Severity.NOTE}
    assert codes(Layout(dp_shard=3)) == {"SR-PLAN-UNEVEN": Severity.NOTE}
    assert codes(Layout(dp_shard=2, cp=2)) == codes(Layout(dp_shard=4))
    assert codes(Layout()) == {}


@given(st.integers(1, 40), st.integers(1, 12))
def test_empty_shards_are_those_that_chunking_leaves_empty(rows: int, shards: int) -> None:
    chunk = -(-rows // shards)
    held = [max(0, min(chunk, rows - index * chunk)) for index in range(shards)]
    found = codes(Layout(dp_shard=shards), of(w=(rows, 2)))
    assert ("SR-PLAN-EMPTY-SHARDS" in found) == (0 in held)
    assert ("SR-PLAN-UNEVEN" in found) == (0 not in held and len(set(held)) > 1)


def test_tensor_parallelism_that_divides_nothing_is_a_warning() -> None:
    assert "SR-PLAN-TP" not in codes(Layout(tp=2))
    (problem,) = check_layout(STATE, Layout(tp=4))
    assert problem.code == "SR-PLAN-TP"
    assert "embed.weight" in problem.message


def test_pipeline_stages_need_blocks() -> None:
    assert codes(Layout(pp=2)) == {}
    assert codes(Layout(pp=3)) == {"SR-PLAN-PP": Severity.ERROR}
    three = of(**{f"layers__{index}__w": (4, 4) for index in range(3)})
    assert codes(Layout(pp=2), three) == {"SR-PLAN-PP": Severity.WARNING}


def test_expert_parallelism_needs_experts_that_it_divides() -> None:
    assert codes(Layout(dp_shard=2, ep=2))["SR-PLAN-EP"] == Severity.ERROR
    numbered = of(**{f"layers__0__experts__{index}__w": (4, 4) for index in range(6)})
    stacked = of(layers__0__experts__w1=(6, 4, 4))
    for state in (numbered, stacked):
        assert "SR-PLAN-EP" not in codes(Layout(dp_shard=2, ep=2), state)
        assert codes(Layout(dp_shard=4, ep=4), state)["SR-PLAN-EP"] == Severity.ERROR


def test_the_same_layout_is_mentioned() -> None:
    assert codes(Layout(dp_shard=3), source=Layout(dp_shard=3))["SR-PLAN-SAME-LAYOUT"] == Severity.NOTE
    assert "SR-PLAN-SAME-LAYOUT" not in codes(Layout(dp_shard=3), source=Layout(dp_shard=4))

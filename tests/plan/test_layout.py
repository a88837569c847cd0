"""What a layout does to tensors, from shapes; and what the cuts of a checkpoint say about its source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Tiling, Topology
from samerun.errors import Severity
from samerun.plan.layout import check_layout, count_row_shards, likely_source
from support.states import adam_state, tensor

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


@pytest.mark.parametrize("shards", [2, 3, 4, 7])
def test_row_chunks_are_recognised(shards: int) -> None:
    assert count_row_shards(adam_state(shards=shards)) == shards
    state = adam_state(shards=shards, topology=Topology(world_size=2 * shards))
    assert likely_source(state) == Layout(dp_replicate=2, dp_shard=shards)
    assert likely_source(replace(state, topology=Topology(world_size=2 * shards + 1))) is None
    assert likely_source(replace(state, topology=Topology())) is None


def test_other_cuts_are_not_concluded_from() -> None:
    assert count_row_shards(adam_state(shards=1)) is None
    column = tensor("param:a.w", (4, 6))
    column = replace(column, tiling=Tiling(np.array([[0, 0], [0, 3]]), np.array([[4, 3], [4, 3]])))
    uneven = replace(column, tiling=Tiling(np.array([[0, 0], [1, 0]]), np.array([[1, 6], [3, 6]])))
    for entry in (column, uneven):
        assert count_row_shards(LogicalState(format="dcp", tensors={"param:a.w": entry})) is None


def test_empty_pieces_do_not_matter() -> None:
    tiling = Tiling(np.array([[0, 0], [1, 0], [2, 0], [3, 0]]), np.array([[1, 5], [1, 5], [1, 5], [0, 5]]))
    entry = replace(tensor("param:gate.w", (3, 5)), tiling=tiling)
    assert count_row_shards(LogicalState(format="dcp", tensors={"param:gate.w": entry})) == 4

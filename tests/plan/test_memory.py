"""The memory estimate against tensors that real ranks hold, and against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.dtype import DTYPES, parse_dtype
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, Role, Topology
from samerun.plan.memory import ROOT_UNIT, MemoryEstimate, estimate_memory, trainable_fqns, unit_of
from samerun.plan.migration import check_memory, plan_memory
from samerun.plan.sharding import destination_stage
from support.manifests import manifest
from support.states import SHAPES, adam_state, tensor, without


def by_hand(entries: list[Any], **changes: Any) -> LogicalState:
    parts: dict[str, Any] = {"format": "dcp", **changes}
    return LogicalState(tensors={str(entry.key): entry for entry in entries}, **parts)


def test_one_rank_holds_everything_once_and_gathers_nothing() -> None:
    state = adam_state(frozen=("gate.weight",))
    (rank,) = estimate_memory(state, Layout()).per_rank
    params = [entry for entry in state.tensors.values() if entry.key.role is Role.PARAM]
    slots = [entry for entry in state.tensors.values() if entry.key.role is Role.OPTIM]
    assert rank.parameters_bytes == sum(entry.num_bytes for entry in params)
    assert rank.gradients_bytes == rank.parameters_bytes - 3 * 30 * 4
    assert rank.optimizer_bytes == sum(entry.num_bytes for entry in slots)
    assert (rank.buffers_bytes, rank.gather_bytes, rank.gather_unit) == (28, 0, "")


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_optimizer_state_is_divided_and_never_lost(shards: int, sizes: list[int]) -> None:
    state = adam_state({f"layers.{index}.w": (rows, 3) for index, rows in enumerate(sizes)})
    ranks = estimate_memory(state, Layout(dp_shard=shards)).per_rank
    steps = 4 * len(sizes)
    assert sum(rank.optimizer_bytes - steps for rank in ranks) == sum(rows * 3 * 4 * 2 for rows in sizes)
    allocated = [rank.parameters_bytes for rank in ranks]
    assert len(set(allocated)) == 1
    assert sum(sizes) * 3 * 4 <= sum(allocated) < (sum(sizes) + shards * len(sizes)) * 3 * 4


def test_replicas_of_hsdp_hold_the_same() -> None:
    ranks = estimate_memory(adam_state(), Layout(dp_replicate=2, dp_shard=3)).per_rank
    assert [rank.total_bytes for rank in ranks[:3]] == [rank.total_bytes for rank in ranks[3:]]


def test_tensor_parallel_cuts_what_it_divides() -> None:
    state = by_hand(
        [tensor("param:a", (6, 5)), tensor("param:b", (5, 6)), tensor("param:c", (5, 5)), tensor("param:d", (6,))]
    )
    first, second = estimate_memory(state, Layout(tp=2)).per_rank
    assert first.parameters_bytes == second.parameters_bytes == 4 * (15 + 15 + 25 + 6)


def test_the_largest_unit_is_gathered_in_the_compute_type() -> None:
    state = by_hand(
        [tensor("param:layers.0.w", (4, 8)), tensor("param:layers.1.w", (5, 8)), tensor("param:head.w", (2, 8))]
    )
    rank = estimate_memory(state, Layout(dp_shard=2), compute_dtype=DTYPES["bfloat16"]).per_rank[0]
    assert (rank.gather_unit, rank.gather_bytes) == ("layers.1", 6 * 8 * 2)


def test_pipeline_stages_divide_blocks_and_both_ends_hold_a_tied_tensor() -> None:
    state = by_hand(
        [
            tensor("param:embed.w", (3, 10), aliases=["head.w"]),
            *(tensor(f"param:layers.{index}.w", (2, 10)) for index in range(4)),
            tensor("param:norm.w", (10,)),
        ]
    )
    first, last = estimate_memory(state, Layout(pp=2)).per_rank
    assert first.parameters_bytes == 4 * (30 + 40)
    assert last.parameters_bytes == 4 * (30 + 40 + 10)
    untied = replace(state.tensors["param:embed.w"], aliases=())
    first, last = estimate_memory(by_hand([untied, *[*state.tensors.values()][1:]]), Layout(pp=2)).per_rank
    assert last.parameters_bytes == 4 * (40 + 10)


def megatron_state(layers: int) -> LogicalState:
    """A dense layer and experts, all layers in one tensor each, as Megatron's torch_dist has them."""
    shapes = {
        "embedding.word_embeddings.weight": (8, 10),
        "decoder.layers.mlp.linear_fc1.weight": (layers, 6, 10),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (layers, 10),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": (layers, 4, 3, 10),
        "decoder.final_layernorm.weight": (10,),
    }
    entries = [tensor(f"{role}:{name}", shape) for name, shape in shapes.items() for role in ("param", "optim.exp_avg")]
    return by_hand([*entries, tensor("optim.step:decoder.layers.mlp.linear_fc1.weight", ())], format="megatron")


def test_stacked_layers_are_dealt_to_stages() -> None:
    first, last = estimate_memory(megatron_state(4), Layout(pp=2)).per_rank
    layer = 60 + 10 + 120
    assert (first.parameters_bytes, last.parameters_bytes) == (4 * (80 + 2 * layer), 4 * (2 * layer + 10))
    uneven = estimate_memory(megatron_state(5), Layout(pp=2)).per_rank
    assert sum(rank.parameters_bytes for rank in uneven) == 4 * (80 + 5 * layer + 10)
    alone = estimate_memory(megatron_state(4), Layout(dp_shard=2)).per_rank[0]
    assert (alone.gather_unit, alone.gather_bytes) == ("decoder.layers.0", 4 * layer)


def test_stacked_layers_are_cut_by_tensor_and_expert() -> None:
    rank = estimate_memory(megatron_state(3), Layout(tp=2)).per_rank[0]
    assert rank.parameters_bytes == 4 * (40 + 3 * (30 + 10 + 60) + 10)
    rank = estimate_memory(megatron_state(3), Layout(dp_shard=2, ep=2), stage=1).per_rank[0]
    assert rank.parameters_bytes == 4 * (80 + 3 * (60 + 10 + 60) + 10)


@pytest.mark.parametrize(
    ("state", "blocks"), [(megatron_state(4), 4), (adam_state({f"h.{i}.w": (2, 3) for i in range(3)}), 3)]
)
def test_more_stages_than_blocks_are_a_finding(state: LogicalState, blocks: int) -> None:
    assert check_memory(estimate_memory(state, Layout(pp=blocks))) == []
    (found,) = check_memory(estimate_memory(state, Layout(pp=100)))
    assert (found.code, found.found, found.expected) == ("SR-PLAN-STAGES", "pp=100", f"pp of at most {blocks}")


def test_stages_of_zero_divide_what_they_say() -> None:
    state = by_hand(
        [tensor("param:layers.0.w", (5, 3)), tensor("optim.exp_avg:layers.0.w", (5, 3)), tensor("param:f", (7,))]
    )
    found = [estimate_memory(state, Layout(dp_shard=2), stage=stage).per_rank[0] for stage in range(4)]
    parts = [(r.parameters_bytes, r.gradients_bytes, r.optimizer_bytes, r.masters_bytes, r.gather_bytes) for r in found]
    assert parts == [(88, 60, 60, 0, 0), (88, 60, 32, 32, 0), (88, 32, 32, 32, 0), (48, 32, 32, 32, 64)]


def test_experts_of_zero_are_whole_on_their_rank_until_a_stage_shards_them() -> None:
    name = "moe.deepspeed_moe.experts.deepspeed_experts.{}.w"
    both = [
        tensor(f"{role}:{name.format(number)}", (5, 3)) for number in range(2) for role in ("param", "optim.exp_avg")
    ]
    found = [estimate_memory(by_hand(both), Layout(dp_shard=4, ep=2), stage=stage).per_rank for stage in (0, 1, 2)]
    assert [[rank.parameters_bytes for rank in ranks] for ranks in found] == [[60] * 4] * 3
    assert [[rank.optimizer_bytes for rank in ranks] for ranks in found] == [
        [60] * 4,
        [32, 32, 28, 28],
        [32, 32, 28, 28],
    ]


def with_config(stage: object, **more: Any) -> LogicalState:
    objects = {} if stage is None else {"ds_config": {"zero_optimization": stage}}
    return replace(by_hand([tensor("param:w", (4,))]), objects=objects, **more)


STAGES: list[tuple[LogicalState, str, str, int | None, int | None]] = [
    (with_config(None), "pytorch", "dcp", None, None),
    (with_config({"stage": 3}), "pytorch", "dcp", None, None),  # what wrote it is not what loads it
    (with_config({"stage": 1}, format="zero"), "deepspeed", "zero", None, 1),
    (with_config({"stage": 3}, format="zero"), "deepspeed", "universal", None, 3),
    (with_config({"stage": 3}, format="zero"), "deepspeed", "zero", 2, 2),
    (with_config(True, format="zero"), "huggingface", "zero", None, 1),
    (with_config({"stage": 2}, format="huggingface"), "huggingface", "huggingface", None, 2),
    (with_config(None, format="huggingface"), "huggingface", "huggingface", None, None),
    (
        with_config(None, format="dcp", topology=Topology(world_size=2, layout=Layout(dp_shard=2))),
        "deepspeed",
        "zero",
        None,
        3,
    ),
    (with_config(None, format="torch"), "deepspeed", "zero", None, 2),
    (with_config(None, format="megatron"), "megatron", "megatron", None, 1),
    (with_config(None, format="dcp"), "pytorch", "dcp", 0, 0),
]


@pytest.mark.parametrize(("state", "framework", "written", "declared", "stage"), STAGES)
def test_a_plan_shards_as_the_job_that_loads_it(
    state: LogicalState, framework: str, written: str, declared: int | None, stage: int | None
) -> None:
    assert destination_stage(state, framework=framework, written=written, declared=declared) == stage


def test_a_plan_s_memory_is_that_of_its_stage() -> None:
    state = with_config({"stage": 2}, format="zero")
    layout = Layout(dp_shard=2)
    for changes, stage in (({}, 2), ({"convert": {"to": "universal"}}, 2), ({"destination__stage": 3}, 3)):
        said = manifest(run__framework="deepspeed", run__format="zero", **changes)
        assert plan_memory(said, state, layout) == estimate_memory(
            state, layout, stage=stage, compute_dtype=parse_dtype("float32")
        )
    away = manifest(run__framework="pytorch", run__format="zero", convert={"to": "dcp"})
    assert plan_memory(away, state, layout).stage is None


def test_experts_are_dealt_over_ep() -> None:
    numbered = by_hand([tensor(f"param:layers.0.experts.{index}.w", (4, 3)) for index in range(4)])
    stacked = by_hand([tensor("param:layers.0.experts.w1", (4, 4, 3))])
    for state in (numbered, stacked):
        ranks = estimate_memory(state, Layout(dp_shard=4, ep=2)).per_rank
        assert [rank.parameters_bytes for rank in ranks] == [4 * 4 * 3 * 4 // 4] * 4


def test_masters_and_averages_are_sharded_like_their_parameters() -> None:
    state = by_hand([tensor("param:w", (6, 4), "bfloat16"), tensor("master:w", (6, 4)), tensor("ema:w", (6, 4))])
    rank = estimate_memory(state, Layout(dp_shard=3)).per_rank[0]
    assert (rank.parameters_bytes, rank.masters_bytes, rank.ema_bytes) == (2 * 4 * 2, 2 * 4 * 4, 2 * 4 * 4)


def test_a_slot_of_another_shape_is_counted_whole() -> None:
    state = by_hand([tensor("param:w", (6, 4)), tensor("optim.row_var:w", (6,)), tensor("optim.col_var:w", (4,))])
    rank = estimate_memory(state, Layout(dp_shard=3)).per_rank[0]
    assert rank.optimizer_bytes == 4 * (2 + 4)


def test_the_host_needs_all_to_consolidate_and_one_piece_per_rank_to_load() -> None:
    state = adam_state(shards=4)
    host = estimate_memory(state, Layout(dp_shard=3)).host
    assert host.consolidate_bytes == sum(entry.num_bytes for entry in state.tensors.values())
    assert host.direct_bytes == 3 * 26 * 30 * 4


def test_which_parameters_have_gradients() -> None:
    state = adam_state(frozen=("gate.weight",))
    assert trainable_fqns(state) == set(SHAPES) - {"gate.weight"}
    plain_sgd = replace(without(state, Role.OPTIM), groups=(ParamGroup(("norm.weight",), {"lr": 1.0}),))
    assert trainable_fqns(plain_sgd) == {"norm.weight"}
    assert trainable_fqns(replace(plain_sgd, groups=())) == set(SHAPES)
    assert not estimate_memory(plain_sgd, Layout()).optimizer_known


@pytest.mark.parametrize(
    ("fqn", "unit"),
    [
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("layers.2.moe.experts.5.w1", "layers.2"),
        ("0.weight", "0"),
        ("lm_head.weight", ROOT_UNIT),
    ],
)
def test_units_are_named_by_the_first_number(fqn: str, unit: str) -> None:
    assert unit_of(fqn) == unit


def test_the_estimate_goes_through_json() -> None:
    estimate = estimate_memory(adam_state(), Layout(dp_shard=3, tp=2), device_memory_bytes=10**6)
    assert MemoryEstimate.from_json(estimate.to_json()) == estimate
    assert estimate.fits
    assert not replace(estimate, device_memory_bytes=10).fits
    assert replace(estimate, device_memory_bytes=None).fits is None


def test_a_thousand_ranks_and_ten_thousand_tensors_take_a_moment() -> None:
    state = adam_state({f"layers.{index}.w": (1000, 7) for index in range(2500)})
    assert len(estimate_memory(state, Layout(dp_replicate=2, dp_shard=512)).per_rank) == 1024

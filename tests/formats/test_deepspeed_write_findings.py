"""Every finding of the DeepSpeed writers: provoked, and silent where there is nothing to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.catalog import load_catalog
from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.core.dtype import parse_dtype
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, Role, TensorEntry, TensorKey, Tiling, Topology
from samerun.core.written import DestinationPlan
from samerun.errors import PlanError, UndecidedError
from samerun.formats.base import WriteSource
from samerun.formats.detect import open_checkpoint
from samerun.formats.universal.write import lay_out as lay_out_universal
from samerun.formats.zero.write import lay_out as lay_out_zero
from support.corpus import corpus, needs_corpus
from support.zero import codes

Tensors = dict[str, tuple[tuple[int, ...], str]]
SHAPES = {"a.weight": (6, 5), "b.weight": (4, 4), "c.bias": (9,)}
WRITERS = [lay_out_zero, lay_out_universal]


def tensors_of(dtype: str = "float32", **more: tuple[tuple[int, ...], str]) -> Tensors:
    found: Tensors = {f"param:{name}": (shape, dtype) for name, shape in SHAPES.items()}
    for name, shape in SHAPES.items():
        if dtype != "float32":
            found[f"master:{name}"] = (shape, "float32")
        found |= {f"optim.{slot}:{name}": (shape, "float32") for slot in ("exp_avg", "exp_avg_sq")}
        found[f"optim.step:{name}"] = ((), "float32")
    return found | more


def state_of(tensors: Mapping[str, tuple[tuple[int, ...], str]], **more: Any) -> LogicalState:
    entries = {}
    for text, (shape, dtype) in tensors.items():
        key = TensorKey.parse(text)
        entries[text] = TensorEntry(key, shape, parse_dtype(dtype), Tiling.whole(shape), key.fqn)
    groups = (
        ParamGroup(("a.weight", "b.weight"), {"lr": 0.1, "weight_decay": 0.1}),
        ParamGroup(("c.bias",), {"lr": 0.1, "weight_decay": 0.1}),
    )
    topology = Topology(world_size=2, layout=Layout(dp_shard=2))
    return LogicalState(**{"format": "dcp", "tensors": entries, "groups": groups, "topology": topology, **more})


def plan_of(lay_out: Any, state: LogicalState, layout: Layout | None = None, **steps: float) -> DestinationPlan:
    def scalar(key: str) -> Any:
        return np.array(steps.get(key.partition(":")[2].replace(".", "_"), 3.0), np.float32)

    return lay_out(WriteSource(state, scalar), layout)


def errors(plan: DestinationPlan) -> list[str]:
    return [problem.code for problem in plan.problems if problem.severity != "note"]


@pytest.mark.parametrize("lay_out", WRITERS)
def test_a_plain_run_is_written_without_a_word(lay_out: Any) -> None:
    found = errors(plan_of(lay_out, state_of(tensors_of()), Layout(dp_shard=2)))
    assert found == ([] if lay_out is lay_out_zero else ["SR-UNI-STEP3"])


@pytest.mark.parametrize("lay_out", WRITERS)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp_shard=2, ep=2)])
def test_destinations_that_cut_by_more_than_data_are_refused(lay_out: Any, layout: Layout) -> None:
    with pytest.raises(PlanError, match="SR-DSW-PARALLEL"):
        plan_of(lay_out, state_of(tensors_of()), layout)


@pytest.mark.parametrize("lay_out", WRITERS)
def test_experts_beside_tensor_parallelism_and_fused_ones_are_refused(lay_out: Any) -> None:
    experts = tensors_of(**{"param:moe.deepspeed_experts.0.w": ((2,), "float32")})
    cut = Topology(world_size=4, layout=Layout(dp_shard=2, tp=2))
    with pytest.raises(PlanError, match="SR-DSW-PARALLEL"):
        plan_of(lay_out, state_of(experts, format="zero", topology=cut), Layout(dp_shard=2))
    fused = Topology(world_size=4, layout=Layout(dp_shard=4, ep=2))
    with pytest.raises(PlanError, match="SR-DSW-PARALLEL"):
        plan_of(lay_out, state_of(tensors_of(), format="zero", topology=fused), Layout(dp_shard=2))


def test_a_pipeline_whose_layers_are_not_known_becomes_universal_only() -> None:
    layers = tensors_of(**{"param:0.weight": ((2,), "float32")})
    staged = state_of(layers, format="zero", topology=Topology(world_size=2, layout=Layout(pp=2)))
    with pytest.raises(PlanError, match="SR-DSW-PARALLEL"):
        plan_of(lay_out_zero, staged, Layout(dp_shard=2))
    for layout in (Layout(dp_shard=2), Layout(pp=2, dp_shard=3)):
        assert "SR-DSW-PARALLEL" not in codes(plan_of(lay_out_universal, staged, layout).problems)
    with pytest.raises(PlanError, match="SR-DSW-PARALLEL"):
        plan_of(lay_out_universal, staged, Layout(pp=2, tp=2))


@needs_corpus
@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        (Layout(pp=4), {}, "where 4 would begin"),
        (Layout(pp=2), {"parts": (0, 1, 2)}, "the layout has 2"),
        (Layout(pp=2), {"parts": (0, 0)}, "rise"),
        (Layout(pp=2), {"parts": (1, 2)}, "begin with layer 0"),
        (Layout(pp=3), {"parts": (0, 4, 5)}, "tied module emb"),
        (Layout(pp=2), {"stage": 2}, "stages 0 and 1 only"),
    ],
)
def test_a_division_that_is_not_known_is_refused(
    layout: Layout, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(corpus("deepspeed-special/pp2_ws2"))
    with pytest.raises(PlanError, match=r"SR-DSW-STAGES") as raised:
        prepare(checkpoint, tmp_path / "dest", to="zero", layout=layout, writer=partial(lay_out_zero, **options))
    assert said in str(raised.value)
    checkpoint.close()


@needs_corpus
@pytest.mark.parametrize(("pp", "parts"), [(2, None), (1, None), (3, (0, 2, 3))])
def test_a_pipeline_is_written_by_stage_and_layer(pp: int, parts: tuple[int, ...] | None, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(corpus("deepspeed-special/pp2_ws2"))
    layout = Layout(pp=pp, dp_shard=3)
    prepared = prepare(
        checkpoint, tmp_path / "dest", to="zero", layout=layout, writer=partial(lay_out_zero, parts=parts)
    )
    carry_out(prepared)
    moved = open_checkpoint(tmp_path / "dest")
    held = moved.state.topology.pipeline
    assert held is not None
    assert checkpoint.state.topology.pipeline is not None
    assert held.layers == checkpoint.state.topology.pipeline.layers
    assert len(held.stages) == pp
    assert "tied_modules.emb.weight" in held.stages[-1]
    assert moved.state.topology.layout == layout
    moved.close()
    checkpoint.close()


@needs_corpus
@pytest.mark.parametrize(("source", "to"), [("moe2_ws2", "universal")])
def test_no_decision_makes_an_engine_load_them(source: str, to: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(corpus(f"deepspeed-special/{source}"))
    layout = Layout(dp_shard=2, ep=2)
    with pytest.raises(PlanError, match=r"SR-DSW-(PARALLEL|EXPERTS)"):
        prepare(checkpoint, tmp_path / "dest", to=to, layout=layout, allow=load_catalog())
    checkpoint.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lay_out", WRITERS)
@pytest.mark.parametrize("groups", [(), (ParamGroup(("#0", "#1"), {}),)])
def test_groups_without_names_are_refused(lay_out: Any, groups: tuple[ParamGroup, ...]) -> None:
    assert "SR-DSW-GROUPS" in codes(plan_of(lay_out, state_of(tensors_of(), groups=groups)).problems)


@pytest.mark.parametrize("lay_out", WRITERS)
def test_members_without_any_state_are_taken_as_frozen(lay_out: Any) -> None:
    tensors = {key: value for key, value in tensors_of().items() if not (key.startswith("optim") and "b.weight" in key)}
    plan = plan_of(lay_out, state_of(tensors), Layout(dp_shard=2))
    found = [problem for problem in plan.problems if problem.code == "SR-DSW-STATELESS"]
    assert [problem.severity for problem in found] == ["error"]
    assert "b.weight" in found[0].message
    assert "param:b.weight" in {slots.key for slots in plan.tensors}
    assert "param:b.weight in a group" in plan.dropped  # what is read back has it in none


@pytest.mark.parametrize("lay_out", WRITERS)
def test_a_group_without_parameters_is_left_out_as_deepspeed_does(lay_out: Any) -> None:
    state = state_of(tensors_of())
    plan = plan_of(lay_out, replace(state, groups=(ParamGroup((), {"lr": 0.3}), *state.groups)), Layout(dp_shard=2))
    assert plan.dropped["group 0"] == "it has no parameters"
    assert plan.num_bytes == plan_of(lay_out, state, Layout(dp_shard=2)).num_bytes


def test_a_run_without_any_optimizer_state_keeps_its_groups() -> None:
    tensors = {key: value for key, value in tensors_of().items() if key.startswith("param")}
    assert errors(plan_of(lay_out_zero, state_of(tensors), Layout(dp_shard=2))) == []


def test_roles_that_the_source_does_not_say_are_the_user_s() -> None:
    state = state_of(tensors_of(**{"buffer:scale": ((3,), "float32"), "buffer:seen": ((), "int64")}))
    assert errors(plan_of(lay_out_zero, state, Layout(dp_shard=2))) == []
    unsure = {key: replace(entry, role_inferred=entry.key.role is Role.BUFFER) for key, entry in state.tensors.items()}
    plan = plan_of(lay_out_zero, replace(state, tensors=unsure), Layout(dp_shard=2))
    (found,) = [problem for problem in plan.problems if problem.code == "SR-DSW-ROLE"]
    assert found.severity == "error"
    assert "buffer:scale" in found.message
    assert "seen" not in found.message  # no parameter is an integer
    assert "SR-DSW-ROLE" not in errors(plan_of(lay_out_universal, replace(state, tensors=unsure)))


@pytest.mark.parametrize("lay_out", WRITERS)
def test_a_slot_that_one_parameter_lacks_is_zero(lay_out: Any) -> None:
    tensors = tensors_of()
    del tensors["optim.exp_avg_sq:b.weight"]
    plan = plan_of(lay_out, state_of(tensors), Layout(dp_shard=2))
    assert "SR-DSW-NOSTATE" in errors(plan)
    assert any(fill.size >= 4 * 8 for file in plan.files for fill in file.fills)


@pytest.mark.parametrize("lay_out", WRITERS)
def test_different_steps_in_one_group_are_refused_and_in_two_groups_kept(lay_out: Any) -> None:
    state = state_of(tensors_of())
    assert "SR-DSW-STEP" in errors(plan_of(lay_out, state, b_weight=2.0))
    assert "SR-DSW-STEP" not in errors(plan_of(lay_out, state, c_bias=2.0))


@pytest.mark.parametrize("lay_out", WRITERS)
def test_slots_of_another_shape_are_refused(lay_out: Any) -> None:
    tensors = tensors_of(**{"optim.row:a.weight": ((6,), "float32")})
    plan = plan_of(lay_out, state_of(tensors))
    assert "SR-DSW-SLOT" in errors(plan)
    assert "optim.row:a.weight" in plan.dropped


@pytest.mark.parametrize("lay_out", WRITERS)
def test_masters_that_the_source_lacks_are_a_decision(lay_out: Any) -> None:
    tensors = {key: value for key, value in tensors_of("bfloat16").items() if not key.startswith("master")}
    assert "SR-DSW-MASTERS" in errors(plan_of(lay_out, state_of(tensors), Layout(dp_shard=2)))
    assert "SR-DSW-MASTERS" not in errors(plan_of(lay_out, state_of(tensors_of("bfloat16")), Layout(dp_shard=2)))


@pytest.mark.parametrize("lay_out", WRITERS)
def test_parameters_of_two_types_are_refused(lay_out: Any) -> None:
    tensors = tensors_of("bfloat16") | {"param:c.bias": ((9,), "float32")}
    assert "SR-DSW-MIXED" in errors(plan_of(lay_out, state_of(tensors)))


@pytest.mark.parametrize("lay_out", WRITERS)
def test_averages_have_no_place(lay_out: Any) -> None:
    plan = plan_of(lay_out, state_of(tensors_of(**{"ema:a.weight": ((6, 5), "float32")})))
    assert "SR-DSW-DROPPED" in errors(plan)
    assert "ema:a.weight" in plan.dropped


@pytest.mark.parametrize("lay_out", WRITERS)
def test_state_of_ranks_that_differs_is_kept_apart(lay_out: Any) -> None:
    rng = {f"torch_rng.rank{rank}": np.full(4, rank, np.uint8) for rank in range(2)}
    config = {"zero_optimization": {"stage": 3}}
    state = state_of(tensors_of(), format="zero", rng=rng, objects={"ds_config": config})
    assert "SR-DSW-PERRANK" in errors(plan_of(lay_out, state, Layout(dp_shard=3)))
    equal = replace(state, rng={name: np.zeros(4, np.uint8) for name in rng})
    assert "SR-DSW-PERRANK" not in errors(plan_of(lay_out, equal, Layout(dp_shard=3)))


def test_the_configuration_that_native_files_assume_is_noted() -> None:
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True}}
    state = state_of(tensors_of("bfloat16"), format="zero", objects={"ds_config": config})
    found = [p for p in plan_of(lay_out_zero, state, Layout(dp_shard=4)).problems if p.code == "SR-DSW-ASSUMES"]
    assert len(found) == 1
    for words in ("stage 1 or 2", "4 data-parallel ranks", "bf16", "round_robin_gradients", "parameter_alignment"):
        assert words in found[0].message
    assert "SR-DSW-ASSUMES" not in codes(plan_of(lay_out_universal, state, Layout(dp_shard=4)).problems)


def test_half_precision_was_never_seen_running() -> None:
    assert "SR-ZERO-UNVERIFIED" in codes(plan_of(lay_out_zero, state_of(tensors_of("float16"))).problems)
    assert "SR-ZERO-UNVERIFIED" not in codes(plan_of(lay_out_zero, state_of(tensors_of("bfloat16"))).problems)


# --- what load_universal leaves undone ------------------------------------------------------------------------------


def test_buffers_and_frozen_parameters_need_the_lines() -> None:
    for extra in ("buffer:mean", "param:frozen"):
        found = errors(plan_of(lay_out_universal, state_of(tensors_of(**{extra: ((3,), "float32")})), Layout()))
        assert "SR-UNI-REMEDY" in found


def test_groups_that_differ_need_the_lines_at_stage_3() -> None:
    state = state_of(tensors_of())
    other = replace(state.groups[1], hyperparameters={"lr": 0.2, "weight_decay": 0.1})
    found = plan_of(lay_out_universal, replace(state, groups=(state.groups[0], other)))
    messages = [problem.message for problem in found.problems if problem.code == "SR-UNI-GROUPS3"]
    assert len(messages) == 1
    assert "not lr" in messages[0]
    assert "SR-UNI-GROUPS3" not in errors(plan_of(lay_out_universal, state))


def test_step_tensors_need_the_lines_at_stage_3() -> None:
    state = state_of(tensors_of())
    assert "SR-UNI-STEP3" in errors(plan_of(lay_out_universal, state))
    one = replace(state, groups=(ParamGroup(tuple(SHAPES), {"lr": 0.1}),))
    assert "SR-UNI-STEP3" not in errors(plan_of(lay_out_universal, one))


def test_slots_that_stage_3_does_not_load_are_named() -> None:
    more: Tensors = {f"optim.max_exp_avg_sq:{name}": (shape, "float32") for name, shape in SHAPES.items()}
    assert "SR-UNI-SLOTS3" in errors(plan_of(lay_out_universal, state_of(tensors_of() | more)))
    assert "SR-UNI-SLOTS3" not in errors(plan_of(lay_out_universal, state_of(tensors_of())))


def test_a_group_that_leaves_a_rank_empty_is_named() -> None:
    state = state_of(tensors_of())
    assert "SR-UNI-SMALL" in errors(plan_of(lay_out_universal, state, Layout(dp_shard=8)))
    assert "SR-UNI-SMALL" not in errors(plan_of(lay_out_universal, state, Layout(dp_shard=2)))


def test_jobs_whose_buffers_are_shuffled_cannot_load_universal() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    state = state_of(tensors_of(), format="zero", objects={"ds_config": config})
    found = [p for p in plan_of(lay_out_universal, state, Layout()).problems if p.code == "SR-UNI-SHUFFLE"]
    assert [problem.severity for problem in found] == ["error"]
    assert "SR-UNI-SHUFFLE" not in codes(plan_of(lay_out_zero, state, Layout()).problems)
    config["zero_optimization"]["round_robin_gradients"] = False
    assert "SR-UNI-SHUFFLE" not in codes(plan_of(lay_out_universal, state, Layout()).problems)


def test_roles_are_written_under_the_names_the_job_knows() -> None:
    state = state_of(tensors_of(), format="zero")
    entry = replace(state.tensors["param:a.weight"], original="_orig_mod.a.weight")
    plan = plan_of(lay_out_zero, replace(state, tensors={**state.tensors, "param:a.weight": entry}), Layout(dp_shard=1))
    held = b"".join(literal.content for file in plan.files for literal in file.literals)
    assert b"_orig_mod.a.weight" in held
    assert state.tensors["param:a.weight"].key.role is Role.PARAM


@pytest.mark.parametrize("to", ["zero", "universal"])
def test_a_frozen_member_of_a_group_is_proved_when_it_is_allowed(to: str, tmp_path: Path) -> None:
    from support.exports import write_export

    settings = {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    groups = (ParamGroup((), settings), ParamGroup(("layers.0.w", "layers.1.w", "head.w"), settings))
    export = write_export(tmp_path / "source", groups=groups)
    _freeze(export / "state.safetensors", "layers.1.w")
    checkpoint = open_checkpoint(export)
    with pytest.raises(UndecidedError, match="SR-DSW-STATELESS"):
        prepare(checkpoint, tmp_path / "dest", to=to, layout=Layout(dp_shard=2))
    allow = {"SR-DSW-STATELESS"}
    carry_out(prepare(checkpoint, tmp_path / "dest", to=to, layout=Layout(dp_shard=2), allow=allow))
    found = open_checkpoint(tmp_path / "dest")
    assert found.read("param:layers.1.w").tobytes() == checkpoint.read("param:layers.1.w").tobytes()
    assert [group.params for group in found.state.groups] == [("layers.0.w", "head.w")]
    for opened in (checkpoint, found):
        opened.close()


def _freeze(file: Path, name: str) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(file)
    save_file({key: value for key, value in tensors.items() if not (key.startswith("optim") and name in key)}, file)

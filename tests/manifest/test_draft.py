"""A draft: what the checkpoint tells is filled in, everything else is asked, and nothing is guessed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samerun.core.dtype import DTYPES
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, RecordedProgress, Role, Topology
from samerun.core.tolerance import precision_floor
from samerun.manifest.draft import draft_manifest, yaml_value
from samerun.manifest.models import Manifest
from samerun.manifest.read import Document, parse_document
from samerun.manifest.tolerances import METRICS, ControlTolerance
from support.manifests import manifest_data
from support.states import SHAPES, adam_state, tensor, without

STATE = adam_state()
ALWAYS_ASKED = {
    "run.model_commit",
    "run.precision",
    "batch.invariant",
    "batch.global_batch",
    "batch.max_microbatch",
    "batch.option",
    "transition.label",
    "control.kind",
    "control.vary_microbatch",
    "window.log_every",
    "window.eval_every",
    "launch.command",
}


def draft(state: LogicalState = STATE, **options: Any) -> Document:
    given = {"checkpoint": "ckpt/step-12", "name": "demo", **options}
    return parse_document(draft_manifest(state, given.pop("to", Layout(dp_shard=3)), **given))


def asked(state: LogicalState = STATE, **options: Any) -> set[str]:
    document = draft(state, **options)
    assert document.problems == ()
    return {question.key for question in document.questions}


def test_what_no_checkpoint_can_tell_is_always_asked() -> None:
    assert asked() == ALWAYS_ASKED | {"source.layout"}
    assert asked(source=Layout(dp_shard=4)) == ALWAYS_ASKED


def test_an_empty_checkpoint_makes_every_decision_a_question() -> None:
    nothing = LogicalState(format="safetensors", tensors={})
    assert asked(nothing) == ALWAYS_ASKED | {
        *("run.framework", "run.optimizer", "source.layout", "source.world_size"),
        *(f"progress.{name}" for name in ("update", "samples", "tokens", "epoch", "scheduler")),
    }


def test_what_the_checkpoint_tells_is_filled_in() -> None:
    document = draft()
    told = {
        "run.name": "demo",
        "run.framework": "pytorch",
        "run.checkpoint": "ckpt/step-12",
        "run.optimizer": "AdamW",
        "source.world_size": 4,
        "destination.layout": {"dp_shard": 3},
        "progress.update": 12,
        "progress.tokens": 24000,
        "progress.scheduler": {"last_epoch": 12},
        "declare.rng": "expected-to-change",
    }
    assert {key: document.value(key) for key in told} == told
    assert "file names" in document.text


def test_the_configuration_in_a_checkpoint_is_used_and_named() -> None:
    config = {
        "global_batch": 32,
        "microbatch": 2,
        "accumulation": 4,
        "precision": "bf16",
        "git_commit": "12e45",
        "log_every": 10,
        "eval_every": 20,
    }
    whole = replace(STATE, objects={"config": config})
    flat = replace(STATE, objects={f"config.train.{name}": value for name, value in config.items()})
    for state in (whole, flat):
        document = draft(state)
        assert document.problems == ()
        told = {
            "run.model_commit": "12e45",
            "run.precision": "bfloat16",
            "source.microbatch": 2,
            "source.accumulation": 4,
            "batch.global_batch": 32,
            "control.vary_microbatch": 1,
            "window.log_every": 10,
        }
        assert {key: document.value(key) for key in told} == told
        assert "batch.max_microbatch" in {question.key for question in document.questions}
        assert "from the checkpoint's configuration" in document.text
    odd = replace(STATE, objects={"config": {"global_batch": True, "precision": "mixed", "log_every": 0}, "other": 1})
    assert asked(odd, source=Layout(dp_shard=4)) == ALWAYS_ASKED
    assert "the configuration says mixed" in draft(odd).text


@pytest.mark.parametrize(
    ("slots", "hyperparameters", "optimizer"),
    [
        (("exp_avg", "exp_avg_sq"), {"decoupled_weight_decay": True}, "AdamW"),
        (("exp_avg", "exp_avg_sq"), {"decoupled_weight_decay": False}, "Adam"),
        (("exp_avg", "exp_avg_sq"), {}, None),
        (("exp_avg", "exp_avg_sq", "mu_product"), {"decoupled_weight_decay": True, "momentum_decay": 0.004}, None),
        (("momentum_buffer",), {"dampening": 0, "nesterov": False}, "SGD"),
        (("momentum_buffer",), {"ns_steps": 5, "nesterov": True}, "Muon"),
        (("momentum_buffer",), {}, None),
        (("square_avg", "acc_delta"), {}, "Adadelta"),
        (("exp_avg",), {}, None),
    ],
)
def test_the_optimizer_is_concluded_only_where_one_class_is_left(
    slots: tuple[str, ...], hyperparameters: dict[str, Any], optimizer: str | None
) -> None:
    entries = [tensor("param:w", (4, 4)), *(tensor(f"optim.{slot}:w", (4, 4)) for slot in slots)]
    groups = (ParamGroup(("w",), {"lr": 1.0, **hyperparameters}),)
    state = LogicalState(format="dcp", tensors={str(entry.key): entry for entry in entries}, groups=groups)
    document = draft(state)
    found = document.value("run.optimizer")
    assert (found == optimizer) if optimizer else ("run.optimizer" in {q.key for q in document.questions})


def test_two_kinds_of_weight_decay_are_not_one_class() -> None:
    groups = (
        ParamGroup(("embed.weight",), {"decoupled_weight_decay": True}),
        ParamGroup(("norm.weight",), {"decoupled_weight_decay": False}),
    )
    assert "run.optimizer" in asked(replace(STATE, groups=groups))


def test_stored_half_precision_is_computed_in() -> None:
    assert draft(adam_state(dtype="bfloat16")).value("run.precision") == "bfloat16"
    mixed = adam_state({"embed.weight": (4, 4)}, dtype="bfloat16")
    other = adam_state({"norm.weight": (4,)})
    assert "run.precision" in asked(replace(mixed, tensors={**mixed.tensors, **other.tensors}))


def test_floors_follow_precision_and_tokens() -> None:
    exact = draft(replace(STATE, objects={"config": {"precision": "float32"}}))
    half = draft(adam_state(dtype="bfloat16"))
    assert exact.value("tolerances.loss.floor") == pytest.approx(1e-6, rel=0.1)
    assert half.value("tolerances.loss.floor") > 100 * exact.value("tolerances.loss.floor")
    uncounted = adam_state(dtype="bfloat16", progress=RecordedProgress(update=12))
    assert 1e-4 < draft(uncounted).value("tolerances.loss.floor") < 2e-2


def test_floors_wait_for_a_precision_that_is_asked_for() -> None:
    """Parameters in float32 may be computed with in bfloat16: floors of float32 would reject every clean move."""
    assert draft().value("tolerances.loss.floor") is None
    data = manifest_data(
        run__precision="bfloat16",
        progress__tokens=12_000,
        **{f"tolerances__{metric}": {"from": "control", "factor": 10, "floor": None} for metric in METRICS},
    )
    settled = Manifest.from_data(data).settled_tolerances()
    floors = {metric: item.floor for metric, item in settled.items() if isinstance(item, ControlTolerance)}
    assert floors == {metric: precision_floor(metric, DTYPES["bfloat16"], 1000) for metric in METRICS}
    stated = Manifest.from_data(manifest_data(run__precision="bfloat16")).settled_tolerances()
    assert {item.floor for item in stated.values() if isinstance(item, ControlTolerance)} == {1e-6}


def test_muons_steps_are_computed_in_bfloat16() -> None:
    """A step that rounds otherwise in bfloat16 differs by 1e-4, the next loss by 3e-5: a clean move in float32."""
    documents: list[Document] = []
    for hyperparameters in ({"ns_steps": 5}, {"dampening": 0}):
        entries = [tensor("param:w", (4, 4)), tensor("optim.momentum_buffer:w", (4, 4))]
        groups = (ParamGroup(("w",), {"lr": 1.0, "nesterov": True, **hyperparameters}),)
        tensors = {str(entry.key): entry for entry in entries}
        config = {"config": {"precision": "float32"}}
        documents.append(draft(LogicalState(format="dcp", tensors=tensors, groups=groups, objects=config)))
    muon, sgd = documents
    assert (muon.value("run.optimizer"), sgd.value("run.optimizer")) == ("Muon", "SGD")
    for metric, wider in (("update_norm", True), ("parameter_delta", True), ("loss", True), ("eval_loss", False)):
        wide, narrow = (document.value(f"tolerances.{metric}.floor") for document in documents)
        assert wide > 10 * narrow if wider else wide == narrow, metric


def test_random_streams_stay_exact_only_on_the_same_ranks() -> None:
    assert draft(to=Layout(dp_replicate=2, dp_shard=2)).value("declare.rng") == "expected-to-change"
    assert draft(to=Layout(dp_shard=4)).value("declare.rng") == "exact"
    assert draft(replace(STATE, rng={}), to=Layout(dp_shard=4)).value("declare.rng") == "expected-to-change"
    assert draft(replace(STATE, topology=Topology()), to=Layout(dp_shard=4)).value("declare.rng") != "exact"


def test_a_concluded_source_becomes_part_of_the_question() -> None:
    cut = Topology(world_size=4, layout=Layout(dp_shard=4), inferred="from how tensors are cut")
    document = draft(replace(STATE, topology=cut))
    question = next(question for question in document.questions if question.key == "source.layout")
    assert "{dp_shard: 4}" in question.text
    assert document.value("source.world_size") == 4


def test_one_rank_can_only_be_arranged_one_way() -> None:
    alone = replace(STATE, topology=Topology(world_size=1, layout=Layout(), inferred="from how tensors are cut"))
    assert "source.layout" not in asked(alone)


def test_a_recorded_source_is_not_asked() -> None:
    for inferred in (None, "from the saved object config.layout"):
        state = replace(STATE, topology=Topology(world_size=4, layout=Layout(dp_shard=4), inferred=inferred))
        assert "source.layout" not in asked(state)
        assert draft(state).value("source.layout") == {"dp_shard": 4}


def test_a_source_that_the_user_tells_is_taken() -> None:
    document = draft(source=Layout(dp_shard=2, tp=2))
    assert document.value("source.layout") == {"dp_shard": 2, "tp": 2}
    assert "2 are batch replicas" in document.text


def test_tensor_parallel_ranks_are_not_counted_as_batches() -> None:
    document = draft(to=Layout(dp_shard=4, tp=2))
    assert document.value("destination.world_size") == 8
    assert "dealt to 4 replicas" in document.text


def test_a_checkpoint_without_scheduler_or_optimizer_is_asked_about() -> None:
    assert "progress.scheduler" in asked(replace(STATE, scheduler=None))
    assert "progress.scheduler" in asked(replace(STATE, scheduler={"gamma": 0.1}))
    assert "run.optimizer" in asked(without(replace(STATE, groups=()), Role.OPTIM))


def test_samples_per_update_are_suggested_and_not_taken() -> None:
    assert "384 samples in 12 updates are 32 each" in draft().text
    assert "each on average" not in draft(adam_state(progress=RecordedProgress(update=5, samples=384))).text


def test_the_editor_line_is_there_only_with_a_schema() -> None:
    assert not draft().text.startswith("# yaml-language-server")
    assert draft(schema="./s.json").text.startswith("# yaml-language-server: $schema=./s.json\n")


def test_names_that_yaml_would_misread_are_quoted() -> None:
    for name in ("no", "12e45", "a: b", "#1", "1.5", "null", "- x", "", " x", "é", ".5", "x:", "0x1f", "2026-01-01"):
        assert draft(name=name or "x", checkpoint=name or "x").value("run.name") == (name or "x")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(
        st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\x85\u2028\u2029\ufeff")
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(PLAIN.filter(lambda value: not (isinstance(value, str) and value.strip().startswith("ASK"))))
@example(1e-06)
@example(1e300)
@example("..")
def test_values_are_read_back_as_they_were_written(value: Any) -> None:
    found = parse_document(f"x: {yaml_value(value)}\n").value("x")
    assert found == value or (isinstance(value, float) and math.isclose(found, value))
    assert isinstance(found, bool) == isinstance(value, bool)


def test_every_shape_of_state_gives_a_readable_draft() -> None:
    for frozen in ((), tuple(SHAPES)):
        assert draft(adam_state(frozen=frozen)).problems == ()

"""A plan: what it holds, what keeps it from being made, and how it is found stale."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.batch import Dealing
from samerun.core.mesh import Layout
from samerun.core.orders import KeyedOrder
from samerun.core.progress import Committed
from samerun.core.state import LogicalState, RecordedProgress, Role, Topology
from samerun.errors import PlanError, Severity, UndecidedError
from samerun.plan.migration import MigrationPlan, check_plan, plan_migration
from support.manifests import manifest
from support.states import adam_state, without

STATE = adam_state()
CHANGE = {
    "batch__option": "changed-batch",
    "batch__changed": {"global_batch": 30, "learning_rate": {"policy": "linear"}, "reason": "three replicas"},
    "batch__invariant": "schedule-position",
    "declare__batch": "expected-to-change",
    "transition__label": "intentional-change",
}

POLICY = {"policy": "linear", "schedule": "samples"}


def refused(state: LogicalState = STATE, **changes: Any) -> list[tuple[str, str]]:
    with pytest.raises(PlanError) as caught:
        plan_migration(manifest(**changes), state)
    return [(problem.code, problem.where["key"]) for problem in caught.value.problems]


def warned(state: LogicalState = STATE, **changes: Any) -> set[str]:
    return {problem.code for problem in plan_migration(manifest(**changes), state).problems}


def test_the_plan_of_a_ragged_continuation() -> None:
    plan = plan_migration(manifest(), STATE)
    assert (plan.batch.kind, plan.batch.global_batch, plan.batch.replicas, plan.batch.passes) == ("ragged", 32, 3, 6)
    assert plan.batch.needs == ("weighted-normalisation",)
    assert plan.source_batch.microbatches == ((2, 2, 2, 2),) * 4
    assert (plan.first_update, plan.last_update, plan.label) == (13, 32, "continuation")
    assert (plan.source.world_size, plan.destination.world_size, plan.destination.batch_replicas) == (4, 3, 3)
    assert plan.learning_rate.policy is None
    assert plan.learning_rate.factor == 1.0
    assert len(plan.memory.per_rank) == 3
    assert {problem.code for problem in plan.problems} == {"SR-PLAN-UNEVEN"}
    assert check_plan(plan, manifest(), STATE) == []


def test_a_plan_goes_through_json_whole() -> None:
    for changes in ({}, CHANGE, {"batch__option": "fewer-replicas"}):
        plan = plan_migration(manifest(**changes), STATE)
        read = MigrationPlan.from_json(json.loads(json.dumps(plan.to_json())))
        assert read == plan
        assert read.to_json() == plan.to_json()


def scheduled(position: int = 12, **changes: Any) -> LogicalState:
    """The state with a cosine schedule over 100 steps, and rates as torch would have saved them."""
    saved = {"T_max": 100, "eta_min": 0.0, "base_lrs": [1e-3, 1e-4], "last_epoch": position, **changes}
    return replace(STATE, scheduler={name: value for name, value in saved.items() if value is not None})


def test_the_rates_of_the_window_are_planned() -> None:
    more = {"progress__scheduler": {"last_epoch": 12}}
    rates = plan_migration(manifest(**more, window__updates=30), scheduled()).next_rates
    assert rates is not None
    assert (rates.kind, rates.first_update, len(rates.rates)) == ("CosineAnnealingLR", 13, 30)
    assert rates.rates[0] == pytest.approx([b * (1 + math.cos(math.pi * 0.12)) / 2 for b in (1e-3, 1e-4)])
    four = plan_migration(manifest(progress__scheduler={"last_epoch": 48}), scheduled(48)).next_rates
    assert four is not None  # stepped once per process by Accelerate, and still
    plan = plan_migration(manifest(progress__scheduler={"last_epoch": 48}), scheduled(48))
    assert plan.costs[0].schedule_samples == 100 // 4 * 32
    assert four.rates[1][0] == pytest.approx(1e-3 * (1 + math.cos(math.pi * 0.52)) / 2)
    epochs = plan_migration(manifest(progress__scheduler={"last_epoch": 2}), scheduled(2)).next_rates
    assert epochs is not None
    assert epochs.rates == ()
    assert "2 times in 12 updates" in str(epochs.why_not)
    plan = plan_migration(manifest(**more), scheduled())
    assert MigrationPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert [p.where["key"] for p in check_plan(plan, manifest(**more), scheduled(T_max=50))] == ["costs", "next_rates"]


def test_what_the_options_cost_is_planned() -> None:
    """The sampler's place, the schedule's horizon and the evaluation interval, whichever of them are known."""
    more = {"progress__scheduler": {"last_epoch": 12}}
    at = Committed(update=12, samples_in_epoch=384, samples=384).to_json()
    sampler = {**at, "order": KeyedOrder(1000, 3).identity()}
    flat = {f"sampler.{name}": value for name, value in sampler.items() if name != "order"}
    flat |= {f"sampler.order.{name}": value for name, value in sampler["order"].items()}
    for data in ({"sampler": sampler}, {"app": {"sampler": sampler}}, flat):
        plan = plan_migration(manifest(**CHANGE, **more), replace(scheduled(), data=data))
        ragged, chosen = plan.costs[[o.kind for o in plan.options].index("ragged")], plan.costs[-1]
        assert (ragged.updates_left, chosen.updates_left) == (20, 21)  # 616 samples
        assert (ragged.eval_samples, chosen.eval_samples, chosen.eval_updates) == (640, 600, None)
        assert (ragged.schedule_samples, chosen.schedule_samples) == (3200, 12 * 32 + 88 * 30)
        assert (ragged.passes, ragged.peak_microbatch, ragged.pass_slots) == (6, 2, 18)
        body = plan.to_json()
        assert body["batch"]["cost"]["updates_left"] == 21
        assert all(option["cost"]["utilisation"] == option["utilisation"] for option in body["options"])
    bare = plan_migration(manifest(), STATE).costs[0]
    assert (bare.updates_left, bare.schedule_samples, bare.eval_samples) == (None, None, 640)


def test_ranks_that_share_a_batch_do_not_multiply_it() -> None:
    """tp, pp, cp and ep ranks are no batch replicas; ranks that fewer replicas leave idle are counted."""
    layout = {"pp": 2, "dp_shard": 5, "cp": 2, "tp": 2}
    assert Layout.from_dict({**layout, "ep": 2}).batch_replicas == 5
    there = {"destination": {"layout": layout, "world_size": 40, "device_memory": None}}
    state = replace(STATE, topology=Topology(world_size=4, layout=Layout(dp_shard=4)))
    plan = plan_migration(manifest(**there), state)
    assert (plan.destination.world_size, plan.destination.batch_replicas, plan.batch.passes) == (40, 5, 4)
    fewer = plan_migration(manifest(**there, batch__option="fewer-replicas"), state)
    assert (fewer.destination.batch_replicas, fewer.destination.world_size, fewer.destination.idle_ranks) == (4, 32, 8)
    assert fewer.batch.utilisation == 32 / (4 * 5 * 2)
    assert fewer.costs[-1].pass_slots == 4 * 5


def test_a_changed_batch_says_what_its_schedule_follows() -> None:
    more = {"progress__scheduler": {"last_epoch": 12}}
    by_samples = {**CHANGE, "batch__changed": {**CHANGE["batch__changed"], "learning_rate": POLICY}}
    updates, samples = (plan_migration(manifest(**change, **more), scheduled()) for change in (CHANGE, by_samples))
    assert updates.next_rates is not None
    assert samples.next_rates is not None
    base = 1e-3 * 30 / 32
    assert updates.next_rates.rates[8][0] == pytest.approx(base * (1 + math.cos(math.pi * 0.20)) / 2)
    assert samples.next_rates.rates[8][0] == pytest.approx(base * (1 + math.cos(math.pi * (0.12 + 8 * 0.3 / 32))) / 2)
    said = {d.key: d.chosen for d in samples.decisions}
    assert said["batch.changed.learning_rate.schedule"] == "samples"
    assert MigrationPlan.from_json(json.loads(json.dumps(samples.to_json()))) == samples
    unknown = plan_migration(manifest(**by_samples, **more), scheduled(T_max=None, lr_lambdas=[None]))
    assert "SR-SCHEDULE-UNKNOWN" in {problem.code for problem in unknown.problems}
    assert "SR-SCHEDULE-UNKNOWN" not in {problem.code for problem in samples.problems}


def test_the_case_in_the_literature() -> None:
    """16 x 2 x 8 = 256; on 10 replicas 8 passes would give 160 and 12.8 would be needed."""
    changes: dict[str, Any] = {
        "source": {"layout": {"dp_shard": 16}, "world_size": 16, "microbatch": 2, "accumulation": 8},
        "destination": {"layout": {"dp_shard": 10}, "world_size": 10},
        "batch__global_batch": 256,
        "progress__samples": 12 * 256,
    }
    state = adam_state(shards=16, progress=RecordedProgress(update=12, samples=12 * 256, tokens=24000, epoch=0))
    plan = plan_migration(manifest(**changes), state)
    assert plan.batch.passes == 13
    assert {option.global_batch for option in plan.options if option.kind == "changed-batch"} >= {160, 240, 260}
    shares = plan.batch.dealing.shares
    assert (sum(shares), max(shares) - min(shares)) == (256, 1)
    assert plan.source_batch.passes == 8


def test_no_option_is_taken_by_default_when_several_differ() -> None:
    with pytest.raises(UndecidedError) as caught:
        plan_migration(manifest(batch__option=None), STATE)
    (problem,) = caught.value.problems
    assert problem.code == "SR-PLAN-BATCH-UNDECIDED"
    assert problem.expected == "ragged | fewer-replicas | changed-batch"


def test_the_only_option_needs_no_choice() -> None:
    changes = {"batch__option": None, "destination": {"layout": {"dp_shard": 2}, "world_size": 2}}
    assert plan_migration(manifest(**changes), STATE).batch.kind == "uniform"


def test_an_option_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert refused(batch__option="uniform") == [("SR-PLAN-BATCH-IMPOSSIBLE", "batch.option")]
    uneven = CHANGE | {"batch__changed": CHANGE["batch__changed"] | {"global_batch": 31}}  # type: ignore[operator]
    assert refused(**uneven) == [("SR-PLAN-BATCH-IMPOSSIBLE", "batch.changed.global_batch")]


def test_fewer_replicas_launch_a_smaller_layout() -> None:
    plan = plan_migration(manifest(batch__option="fewer-replicas"), STATE)
    assert (plan.destination.layout, plan.destination.idle_ranks) == (Layout(dp_shard=2), 1)
    assert plan.destination.batch_replicas == plan.batch.replicas == 2
    assert len(plan.memory.per_rank) == 2
    hsdp = {"destination": {"layout": {"dp_replicate": 3, "dp_shard": 2}, "world_size": 6}}
    plan = plan_migration(manifest(batch__option="fewer-replicas", **hsdp), STATE)
    assert plan.destination.layout == Layout(dp_replicate=2, dp_shard=2)


def test_fewer_replicas_that_make_no_layout_are_refused() -> None:
    state = adam_state({"layers.0.experts.w": (6, 4), "layers.0.w": (6, 4)})
    destination = {"layout": {"dp_shard": 3, "ep": 3}, "world_size": 3}
    assert ("SR-PLAN-BATCH-IMPOSSIBLE", "batch.option") in refused(
        state, destination=destination, batch__option="fewer-replicas"
    )


def test_a_deliberate_change_states_its_learning_rate() -> None:
    plan = plan_migration(manifest(**CHANGE), STATE)
    assert (plan.batch.kind, plan.batch.global_batch, plan.batch.exact) == ("changed-batch", 30, False)
    assert plan.learning_rate.factor == 30 / 32
    assert plan.source_batch.global_batch == 32
    value = {"global_batch": 30, "learning_rate": {"policy": "value", "value": 1e-4}, "reason": "x"}
    rate = plan_migration(manifest(**CHANGE | {"batch__changed": value}), STATE).learning_rate
    assert (rate.policy, rate.factor, rate.value) == ("value", None, 1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"transition__label": "continuation"},
            {("SR-PLAN-LABEL", "transition.label"), ("SR-PLAN-LABEL", "declare.batch")},
        ),
        ({"declare__batch": "exact"}, {("SR-PLAN-LABEL", "declare.batch")}),
        ({"batch__invariant": "samples-per-update"}, {("SR-PLAN-INVARIANT", "batch.invariant")}),
    ],
)
def test_a_changed_batch_cannot_call_itself_something_else(changes: dict[str, Any], expected: set[Any]) -> None:
    assert set(refused(**CHANGE | changes)) == expected


@pytest.mark.parametrize("part", ["parameters", "buffers", "optimizer", "order", "batch", "schedule", "dtype"])
def test_a_continuation_claims_everything_exact(part: str) -> None:
    for claim in ("expected-to-change", {"bounded": 1}):
        assert refused(**{f"declare__{part}": claim}) == [("SR-PLAN-LABEL", f"declare.{part}")]


def test_an_approximate_continuation_may_bound_and_may_reorder() -> None:
    approximate = {
        "transition": {"label": "approximate-continuation", "replay_bound": 8, "reason": "one prefetched batch"},
        "declare__order": "expected-to-change",
        "declare__parameters": {"bounded": 1e-6},
    }
    plan = plan_migration(manifest(**approximate), STATE)
    label = next(decision for decision in plan.decisions if decision.key == "transition.label")
    assert "at most 8 samples replayed" in label.consequence
    assert refused(**approximate, declare__optimizer="expected-to-change") == [("SR-PLAN-LABEL", "declare.optimizer")]


def test_tokens_that_nobody_counts_cannot_be_the_invariant() -> None:
    state = replace(STATE, progress=RecordedProgress(update=12))
    tokens = {"batch__invariant": "valid-tokens-per-update"}
    assert refused(state, progress__tokens=None, **tokens) == [("SR-PLAN-INVARIANT", "progress.tokens")]
    assert plan_migration(manifest(**tokens), state).label == "continuation"


@pytest.mark.parametrize(
    ("state", "part"),
    [
        (without(STATE, Role.PARAM), "parameters"),
        (replace(without(STATE, Role.OPTIM), groups=()), "optimizer"),
        (replace(STATE, scheduler=None), "schedule"),
        (replace(STATE, rng={}), "rng"),
    ],
)
def test_what_the_checkpoint_lacks_cannot_be_exact(state: LogicalState, part: str) -> None:
    changes = {"declare__rng": "exact"} if part == "rng" else {}
    assert ("SR-PLAN-DECLARE", f"declare.{part}") in refused(state, **changes)


def test_random_streams_cannot_be_exact_on_other_ranks() -> None:
    assert refused(declare__rng="exact") == [("SR-PLAN-DECLARE", "declare.rng")]
    hsdp = {"destination": {"layout": {"dp_replicate": 2, "dp_shard": 2}, "world_size": 4}, "batch__option": "uniform"}
    assert refused(declare__rng="exact", **hsdp) == [("SR-PLAN-DECLARE", "declare.rng")]
    same = {"destination": {"layout": {"dp_shard": 4}, "world_size": 4}, "batch__option": "uniform"}
    assert warned(declare__rng="exact", **same) >= {"SR-PLAN-SAME-LAYOUT"}


def test_the_optimizer_must_be_the_one_with_these_slots() -> None:
    assert refused(run__optimizer="Muon") == [("SR-PLAN-OPTIMIZER", "run.optimizer")]
    assert plan_migration(manifest(run__optimizer="my.package.Shampoo"), STATE).label == "continuation"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"progress__update": 11}, "progress.update"),
        ({"progress__samples": 352}, "progress.samples"),
        ({"progress__tokens": 1}, "progress.tokens"),
        ({"progress__epoch": 1}, "progress.epoch"),
        ({"progress__scheduler": {"last_epoch": 13}}, "progress.scheduler.last_epoch"),
    ],
)
def test_progress_is_the_checkpoints(changes: dict[str, Any], key: str) -> None:
    assert ("SR-PLAN-PROGRESS", key) in refused(**changes)


def test_format_and_source_are_the_checkpoints() -> None:
    assert refused(run__format="torch") == [("SR-PLAN-FORMAT", "run.format")]
    other = {"source": {"layout": {"dp_shard": 2}, "world_size": 2}}
    assert "SR-PLAN-SOURCE" in warned(**other)
    recorded = replace(STATE, topology=Topology(world_size=4, layout=Layout(dp_shard=4)))
    assert refused(recorded, **other) == [("SR-PLAN-SOURCE", "source.world_size"), ("SR-PLAN-SOURCE", "source.layout")]
    assert "SR-PLAN-SOURCE" not in warned(replace(STATE, topology=Topology()), **other)
    context_parallel = {"source": {"layout": {"dp_shard": 2, "cp": 2}, "world_size": 4}}
    assert "SR-PLAN-SOURCE" not in warned(**context_parallel)
    assert "SR-PLAN-SOURCE" not in warned()


def test_samples_that_do_not_add_up_are_mentioned() -> None:
    unknown = replace(STATE, progress=RecordedProgress(update=12))
    assert "SR-PLAN-SAMPLES" in warned(unknown, progress__samples=768)
    assert "SR-PLAN-SAMPLES" not in warned(unknown)


def test_a_window_that_crosses_no_boundary_is_mentioned() -> None:
    assert "SR-PLAN-WINDOW" in warned(window__eval_every=100)
    assert "SR-PLAN-WINDOW" in warned(window__updates=7, window__eval_every=20)
    assert "SR-PLAN-WINDOW" not in warned(window__updates=8, window__eval_every=20)


def test_what_does_not_fit_the_device_is_refused() -> None:
    at = {"layout": {"dp_shard": 3}, "world_size": 3}
    assert refused(destination=at | {"device_memory": "50KiB"}) == [("SR-PLAN-MEMORY", "destination.device_memory")]
    assert plan_migration(manifest(destination=at | {"device_memory": "1MiB"}), STATE).memory.fits


def test_everything_that_blocks_comes_at_once() -> None:
    found = refused(run__format="torch", progress__update=11, declare__rng="exact", batch__option="uniform")
    assert {code for code, _ in found} == {
        "SR-PLAN-FORMAT",
        "SR-PLAN-PROGRESS",
        "SR-PLAN-DECLARE",
        "SR-PLAN-BATCH-IMPOSSIBLE",
    }


def test_a_stale_plan_is_found() -> None:
    plan = plan_migration(manifest(), STATE)
    longer = check_plan(plan, manifest(window__updates=30), STATE)
    assert [(problem.code, problem.where["key"]) for problem in longer] == [
        ("SR-PLAN-STALE", "manifest_sha256"),
        ("SR-PLAN-STALE", "window_updates"),
    ]
    grown = adam_state({"embed.weight": (300, 30)})
    assert "memory" in {problem.where["key"] for problem in check_plan(plan, manifest(), grown)}
    assert check_plan(plan, manifest(run__format="torch"), STATE)[-1].code == "SR-PLAN-FORMAT"
    assert (
        check_plan(replace(plan, checkpoint=replace(plan.checkpoint, fingerprint="sha256:1")), manifest(), STATE) == []
    )


def test_an_edited_plan_is_found() -> None:
    plan = plan_migration(manifest(), STATE)
    other = replace(plan.batch, dealing=Dealing(((8, 8), (8, 7))))
    found = check_plan(replace(plan, batch=other), manifest(), STATE)
    assert [problem.code for problem in found] == ["SR-PLAN-BROKEN", "SR-PLAN-BROKEN", "SR-PLAN-STALE"]


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 64), st.integers(1, 8))
def test_every_exact_option_that_is_offered_can_be_planned(ranks: int, batch: int, micro: int) -> None:
    changes: dict[str, Any] = {
        "destination": {"layout": {"dp_shard": ranks}, "world_size": ranks},
        "batch__global_batch": batch,
        "batch__max_microbatch": micro,
        "control__vary_microbatch": None,
        "progress__samples": 12 * batch,
        "batch__option": None,
    }
    state = replace(STATE, progress=RecordedProgress(update=12))
    try:
        kinds = {option.kind for option in plan_migration(manifest(**changes), state).options}
    except UndecidedError as error:
        kinds = set(str(error.problems[0].expected).split(" | "))
    for kind in kinds - {"changed-batch"}:
        plan = plan_migration(manifest(**changes | {"batch__option": kind}), state)
        assert plan.batch.exact
        assert sum(map(sum, plan.batch.dealing.microbatches)) == batch
        assert plan.batch.max_microbatch <= micro
        assert plan.destination.batch_replicas == plan.batch.replicas
        assert plan.destination.world_size + plan.destination.idle_ranks == ranks
        assert all(problem.severity is not Severity.ERROR for problem in plan.problems)

"""Schedules read from saved states against torch's own schedulers, and what batches cost, ramp up to, and weigh."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lrs

from samerun.catalog import load_catalog
from samerun.cli.batch import command as batch
from samerun.core.batch import RampUp, check_ramp, cost_of, deal_tokens, plan_batch
from samerun.core.progress import Committed, Span, UpdateSpan, after
from samerun.core.schedule import check_rates, parse_schedule, stride_of
from samerun.core.state import LogicalState, ParamGroup
from samerun.errors import UsageError
from samerun.formats.detect import open_checkpoint
from samerun.plan.batch import LearningRatePlan
from samerun.plan.schedule import PlannedRates, check_planned_rates, plan_rates
from samerun.train.schedule import CommittedLR, next_rates
from support.corpus import CORPUS, needs_corpus

Make = Callable[[torch.optim.Optimizer], Any]


def wsd(optimizer: torch.optim.Optimizer) -> lrs.SequentialLR:
    """Warm-up, stable, decay."""
    parts = [
        lrs.LinearLR(optimizer, 0.1, 1.0, 4),
        lrs.ConstantLR(optimizer, 1.0, 6),
        lrs.LinearLR(optimizer, 1.0, 0.05, 9),
    ]
    return lrs.SequentialLR(optimizer, parts, [4, 10])


SCHEDULERS: dict[str, Make] = {
    "step": lambda o: lrs.StepLR(o, 3, 0.5),
    "multistep": lambda o: lrs.MultiStepLR(o, [2, 5, 5], 0.3),
    "constant": lambda o: lrs.ConstantLR(o, 0.25, 4),
    "linear warm-up": lambda o: lrs.LinearLR(o, 0.1, 1.0, 7),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lrs.PolynomialLR(o, 20, 2.0),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 30, 1e-5),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 5, 2, 1e-6),
    "restarts of one length": lambda o: lrs.CosineAnnealingWarmRestarts(o, 5),
    "one cycle": lambda o: lrs.OneCycleLR(o, [0.1, 0.05], total_steps=40),
    "one cycle, linear": lambda o: lrs.OneCycleLR(
        o, [0.1, 0.05], total_steps=40, anneal_strategy="linear", three_phase=True
    ),
    "warm-up and cosine": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.01, 1, 5), lrs.CosineAnnealingLR(o, 25)], [5]
    ),
    "warm-up, stable, decay": wsd,
    "lambda": lambda o: lrs.LambdaLR(o, lambda at: 0.8**at),
}


def build(make: Make) -> tuple[torch.optim.Optimizer, Any]:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [params[0]], "lr": 0.02}, {"params": [params[1]], "lr": 0.01}], momentum=0.9
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(optimizer)
    return optimizer, scheduler


def run(optimizer: torch.optim.Optimizer, scheduler: Any, updates: int) -> list[list[float]]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR's own use of step(epoch)
        for _ in range(updates):
            found.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("done", [0, 3, 11])
def test_the_next_twenty_rates_are_those_that_torch_uses(name: str, done: int) -> None:
    optimizer, scheduler = build(SCHEDULERS[name])
    run(optimizer, scheduler, done)
    state, groups = scheduler.state_dict(), [dict(group) for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = next_rates(scheduler, 20)
    assert scheduler.state_dict() == state
    real = run(optimizer, scheduler, 20)
    assert check_rates(live, real, first_update=done + 1, rtol=1e-12) == []
    if name == "lambda":
        with pytest.raises(UsageError) as caught:
            parse_schedule(state, groups)
        assert [problem.code for problem in caught.value.problems] == ["SR-SCHEDULE-UNKNOWN"]
        return
    schedule = parse_schedule(state, groups)
    assert schedule.position == done
    assert check_rates(schedule.next_rates(20), real, first_update=done + 1) == []
    late = schedule.next_rates(21)[1:]
    if all(a != b for a, b in itertools.pairwise(real)):
        assert [p.code for p in check_rates(late, real, first_update=done + 1)] == ["SR-SCHEDULE-RATE"]


HORIZONS = {
    "step": None,
    "multistep": 5,
    "constant": 4,
    "linear warm-up": 7,
    "exponential": None,
    "polynomial": 20,
    "cosine": 30,
    "restarts": None,
    "one cycle": 40,
    "warm-up and cosine": 30,
    "warm-up, stable, decay": 19,
}


@pytest.mark.parametrize("name", HORIZONS)
def test_where_a_schedule_ends(name: str) -> None:
    optimizer, scheduler = build(SCHEDULERS[name])
    schedule = parse_schedule(scheduler.state_dict(), [dict(group) for group in optimizer.param_groups])
    assert schedule.horizon == HORIZONS[name]


def test_what_is_not_in_the_checkpoint_is_refused() -> None:
    _, plateau = build(lrs.ReduceLROnPlateau)
    bare = {name: value for name, value in plateau.state_dict().items() if name != "_last_lr"}
    for state in (bare, {}, {"last_epoch": 3}, {"last_epoch": 3, "base_lrs": [1.0]}):
        with pytest.raises(UsageError) as caught:
            parse_schedule(state)
        assert [problem.code for problem in caught.value.problems] == ["SR-SCHEDULE-UNKNOWN"]
    assert {"SR-SCHEDULE-UNKNOWN", "SR-SCHEDULE-RATE", "SR-BATCH-RAMP"} <= set(load_catalog())


@pytest.mark.parametrize("losses", ["1", "1 2 2", "1 2 2 2 2", "1 2 2 2 2 2", "1 2 2 2 2 2 2", "1 2 2 2 2 2 2 2 2"])
def test_a_plateaus_rates_are_known_until_its_patience_can_run_out(losses: str) -> None:
    """After each of these losses: the worst ones to come lower the rates right after the last update that is known."""
    optimizer, plateau = build(lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=3, cooldown=2))
    for loss in losses.split():
        plateau.step(float(loss))
    state, groups = plateau.state_dict(), [dict(group) for group in optimizer.param_groups]
    live = next_rates(plateau, 20)
    assert plateau.state_dict() == state
    assert live == [list(rates) for rates in parse_schedule(state, groups).next_rates(20)]
    assert parse_schedule(state).next_rates(20) == parse_schedule(state, groups).next_rates(20)
    real = []
    for _ in range(len(live) + 1):
        real.append([group["lr"] for group in optimizer.param_groups])
        plateau.step(9.0)
    assert 1 <= len(live) < 7
    assert real[:-1] == live
    assert real[-1] == [rate / 2 for rate in live[-1]]


def test_a_plateau_in_a_plan() -> None:
    """Stepped once per epoch of 100 updates, and a batch that changes on purpose."""
    optimizer, plateau = build(lambda o: lrs.ReduceLROnPlateau(o, patience=3))
    for _ in range(3):
        plateau.step(1.0)
    groups = tuple(ParamGroup(params=(), hyperparameters=dict(group)) for group in optimizer.param_groups)
    saved = LogicalState(format="dcp", tensors={}, groups=groups, scheduler=plateau.state_dict())
    policy = LearningRatePlan(policy="linear", factor=2.0)
    found = plan_rates(saved, policy, 301, old_batch=32, new_batch=64)
    assert (found.kind, found.rates) == ("ReduceLROnPlateau", ((0.04, 0.02),) * 2)
    assert found.why_not == "from update 303 on they follow the loss"
    assert PlannedRates.from_json(found.to_json()) == found
    assert check_planned_rates(found, {301: (0.04, 0.02), 302: (0.04, 0.02), 303: (0.004, 0.002)}) == []
    (problem,) = check_planned_rates(found, {301: (0.04, 0.02), 302: (0.02, 0.01)})
    assert (problem.code, problem.where) == ("SR-SCHEDULE-RATE", {"update": 302})


class Shaken(lrs.ExponentialLR):
    """A class of the user's, whose rates are not those of the one that it is made from."""

    def get_lr(self) -> list[float]:
        return [base * (1.0 + 0.1 * (self.last_epoch % 3)) for base in self.base_lrs]


class Delayed(lrs.CosineAnnealingLR):
    """Another one, which saves a setting of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.delay = 50
        super().__init__(optimizer, 30)

    def get_lr(self) -> list[float]:
        return list(self.base_lrs) if self.last_epoch < self.delay else super().get_lr()


@pytest.mark.parametrize("make", [lambda o: lrs.CyclicLR(o, 0.01, 0.1, 5), lambda o: Shaken(o, 0.9), Delayed])
def test_another_class_is_not_taken_for_one_of_torchs(make: Make) -> None:
    """Its rates would be planned by a formula that is not its own, and every control would be rejected."""
    optimizer, scheduler = build(make)
    run(optimizer, scheduler, 4)
    with pytest.raises(UsageError, match="SR-SCHEDULE-UNKNOWN"):
        parse_schedule(scheduler.state_dict())


def test_rates_that_were_scaled_by_hand_follow_no_formula() -> None:
    """torch's recursion goes on from the rate that it finds; the base rates do not tell of it."""
    optimizer, scheduler = build(SCHEDULERS["exponential"])
    run(optimizer, scheduler, 3)
    assert parse_schedule(scheduler.state_dict()).kind == "ExponentialLR"
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    run(optimizer, scheduler, 1)
    with pytest.raises(UsageError, match="set last"):
        parse_schedule(scheduler.state_dict())


MEGATRON = json.loads((Path(__file__).parents[1] / "golden" / "order" / "megatron_schedule.json").read_text())


@pytest.mark.parametrize(
    "case", MEGATRON, ids=lambda c: f"{c['state']['lr_decay_style']}-{c['state']['lr_warmup_steps']}"
)
def test_megatrons_schedule_counts_samples(case: dict[str, Any]) -> None:
    """After the warm-up, whose first rate is in no checkpoint; at the update after each number of updates."""
    batch, state = case["batch"], case["state"]
    groups = tuple(ParamGroup(params=(), hyperparameters={**g, "lr": 0.0}) for g in case["groups"])
    for done, at in enumerate(case["steps"][:25]):
        saved = LogicalState(format="megatron", tensors={}, groups=groups, scheduler={**state, "num_steps": at})
        found = plan_rates(saved, LearningRatePlan(), done + 1, old_batch=batch, new_batch=batch, count=5)
        if state["lr_decay_style"] == "WSD" or at < state["lr_warmup_steps"]:
            assert found.rates == ()
            assert found.why_not
            continue
        assert found.kind == "OptimizerParamScheduler"
        assert check_rates(found.rates, case["rates"][done : done + 5], first_update=done + 1, rtol=1e-12) == []
        if state["lr_decay_style"] in ("linear", "cosine") and 0 < at < 150:
            late = plan_rates(saved, LearningRatePlan(), done + 1, old_batch=batch, new_batch=batch + 1, count=5)
            assert late.rates == found.rates  # kept by updates
            more = plan_rates(
                saved, LearningRatePlan(), done + 1, old_batch=batch, new_batch=batch + 1, progress="samples", count=5
            )
            assert check_rates(more.rates, case["rates"][done : done + 5], first_update=done + 1) != []
    odd = [{"lr_mult": 0.5}]
    with pytest.raises(UsageError, match="SR-SCHEDULE-UNKNOWN"):
        parse_schedule({**state, "lr_decay_style": "cosine"}, odd)


TRAINER = json.loads((Path(__file__).parents[1] / "golden" / "order" / "trainer_schedule.json").read_text())


def saved_by_the_trainer(case: dict[str, Any], **changes: Any) -> LogicalState:
    arguments = {
        "lr_scheduler_type": case["kind"],
        "lr_scheduler_kwargs": case["more"] or None,
        "warmup_steps": case["warm_up"],
        "learning_rate": 2e-3,
        **changes,
    }
    objects = {f"training_args.{name}": value for name, value in arguments.items()}
    scheduler = {**case["state"], "lr_lambdas": [{}, {}]}
    groups = tuple(ParamGroup(params=(), hyperparameters={"lr": rate}) for rate in case["rates"][7])
    objects["trainer_state.max_steps"] = case["total"]
    return LogicalState(format="huggingface", tensors={}, groups=groups, scheduler=scheduler, objects=objects)


@pytest.mark.parametrize("case", TRAINER, ids=lambda c: f"{c['kind']}-{c['warm_up']}-{'-'.join(c['more'])}")
def test_the_trainers_schedules(case: dict[str, Any]) -> None:
    """Functions of the script to torch, but the arguments that the Trainer makes them of are saved."""
    found = plan_rates(saved_by_the_trainer(case), LearningRatePlan(), 8, old_batch=4, new_batch=4)
    assert found.kind == f"Trainer's {case['kind']}"
    assert len(found.rates) == 20
    assert check_rates(found.rates, case["rates"][7:27], first_update=8, rtol=1e-12) == []
    later = plan_rates(saved_by_the_trainer(case), LearningRatePlan(factor=0.5), 8, old_batch=4, new_batch=8)
    assert later.rates[3] == pytest.approx([rate / 2 for rate in case["rates"][10]])


def test_arguments_that_are_not_the_runs_schedule_do_not_count() -> None:
    """A script's own LambdaLR beside the arguments' default, and arguments of which nothing can be made."""
    case = next(case for case in TRAINER if case["kind"] == "cosine" and case["warm_up"])
    wrong: list[dict[str, Any]] = [
        {"lr_scheduler_type": "linear"},
        {"warmup_steps": 4},
        {"lr_scheduler_type": "greedy"},
    ]
    wrong += [{"lr_scheduler_kwargs": {"num_cycles": "x"}}, {"warmup_steps": None, "warmup_ratio": 0.4}]
    for changes in wrong:
        found = plan_rates(saved_by_the_trainer(case, **changes), LearningRatePlan(), 8, old_batch=4, new_batch=4)
        assert found.rates == ()
        assert found.why_not
        assert "LambdaLR" in found.why_not
    for same in ({"warmup_steps": 0, "warmup_ratio": 0.2}, {"warmup_steps": 0.2}):
        assert plan_rates(saved_by_the_trainer(case, **same), LearningRatePlan(), 8, old_batch=4, new_batch=4).rates


@needs_corpus
def test_the_schedule_of_a_trainers_checkpoint() -> None:
    """Cosine after a warm-up of 2, at update 5 of 20, on two processes."""
    assert CORPUS is not None
    with contextlib.closing(open_checkpoint(Path(CORPUS) / "torch/hf_trainer_ws2/checkpoint-5")) as checkpoint:
        found = plan_rates(checkpoint.state, LearningRatePlan(), 6, old_batch=4, new_batch=4)
    assert found.kind == "Trainer's cosine"
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 18)) for step in range(5, 20)]
    assert [rates[0] for rates in found.rates[:15]] == pytest.approx(expected, rel=1e-12)
    assert found.rates[15][0] == 0.0


def test_a_schedule_by_samples_and_a_policy() -> None:
    """At twice the batch, a schedule by samples is at the same rate after half the updates; linear doubles it."""
    optimizer, scheduler = build(SCHEDULERS["cosine"])
    run(optimizer, scheduler, 4)
    schedule = parse_schedule(scheduler.state_dict())
    by_updates = schedule.next_rates(20)
    by_samples = schedule.next_rates(10, stride=stride_of("samples", 32, 64), factor=2.0)
    assert by_samples == tuple(tuple(2 * rate for rate in by_updates[2 * n]) for n in range(10))
    assert schedule.next_rates(3, stride=stride_of("updates", 32, 64)) == by_updates[:3]


class TestCommitted:
    def start(self, **more: Any) -> tuple[torch.optim.Optimizer, CommittedLR]:
        optimizer, scheduler = build(SCHEDULERS["cosine"])
        run(optimizer, scheduler, 4)
        given = {"unit": "samples", "per": 32, "begin": Committed(update=4, samples=128), "position": 4, **more}
        return optimizer, CommittedLR(optimizer, parse_schedule(scheduler.state_dict()).rates, **given)

    @pytest.mark.parametrize("batch", [32, 64, 30])
    def test_by_samples_it_uses_the_rates_that_the_plan_prints(self, batch: int) -> None:
        """Saved and loaded between any two updates, with another batch from here on."""
        saved, scheduler = build(SCHEDULERS["cosine"])
        run(saved, scheduler, 4)
        stride = stride_of("samples", 32, batch)
        planned = parse_schedule(scheduler.state_dict()).next_rates(12, stride=stride)
        _, schedule = self.start()
        at, used = Committed(update=4, samples=128), []
        for _ in range(12):
            used.append(schedule.get_last_lr())
            at = after(at, UpdateSpan((Span(0, 0, batch),)))
            schedule.follow(at)
            state = json.loads(json.dumps(schedule.state_dict()))
            _, schedule = self.start()
            schedule.load_state_dict(state)
        assert check_rates(planned, used, first_update=5) == []

    def test_a_skipped_update_advances_samples_and_not_updates(self) -> None:
        moved = {}
        for unit in ("updates", "samples", "tokens"):
            _, schedule = self.start(unit=unit, per=1, begin=Committed(), position=0)
            schedule.follow(after(Committed(), UpdateSpan((Span(0, 0, 5),)), tokens=70, skipped=True))
            moved[unit] = schedule.position
        assert moved == {"updates": 0, "samples": 5, "tokens": 70}

    def test_what_cannot_be_followed(self) -> None:
        uncounted = Committed(tokens=None)
        for wrong in ({"unit": "hours"}, {"per": 0}, {"unit": "tokens", "begin": uncounted}):
            with pytest.raises(UsageError, match="SR-SCHEDULE-FOLLOW"):
                self.start(**wrong)
        optimizer, schedule = self.start()
        with pytest.raises(UsageError, match="SR-SCHEDULE-FOLLOW"):
            schedule.load_state_dict({**schedule.state_dict(), "unit": "updates"})
        with pytest.raises(UsageError, match="SR-SCHEDULE-FOLLOW"):
            CommittedLR(optimizer, lambda at: [0.1], unit="updates")
        assert "SR-SCHEDULE-FOLLOW" in load_catalog()


class TestRamp:
    @given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 5), st.integers(0, 400), st.integers(0, 60))
    @settings(max_examples=60, deadline=None)
    def test_against_megatrons_rule_step_by_step(
        self, start: int, increment: int, steps: int, over: int, updates: int
    ) -> None:
        ramp = RampUp(start, increment, over, start + steps * increment)
        samples = 0
        for _ in range(updates):
            if samples > over or not steps or not over:
                batch = ramp.final
            else:
                batch = min(start + int(samples / (over / steps) + 1e-9) * increment, ramp.final)
            assert ramp.batch_at(samples) == batch
            samples += batch
        assert ramp.samples_after(updates) == samples
        assert ramp.updates_after(samples) == updates
        if samples and ramp.batch_at(0) > 1:
            assert ramp.updates_after(1) is None

    def test_sizes_that_do_not_divide(self) -> None:
        ramp = RampUp(4, 4, 60, 16)
        assert [p.code for p in check_ramp(ramp, 3, 1)] == ["SR-BATCH-RAMP"]
        assert not [*check_ramp(ramp, 2, 2)]
        assert not [*check_ramp(ramp, 16, 1, samples=61)]
        for wrong in ((0, 1, 1, 1), (4, 3, 1, 8), (8, 1, 1, 4)):
            with pytest.raises(ValueError, match=r"batch|samples"):
                RampUp(*wrong)


class TestTokens:
    @given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6), st.integers(50, 120))
    @settings(max_examples=100, deadline=None)
    def test_every_sample_once_and_no_pass_too_large(self, lengths: list[int], replicas: int, most: int) -> None:
        found = deal_tokens(lengths, replicas, most)
        places = [place for row in found.positions for cell in row for place in cell]
        assert sorted(places) == list(range(len(lengths)))
        assert found.max_tokens <= most
        assert found.num_tokens == sum(lengths)
        assert {len(row) for row in found.positions} == {replicas}
        shares = [sum(row[r] for row in found.tokens) for r in range(replicas)]
        assert max(shares) - min(shares) <= max(lengths)
        assert 0 <= found.utilisation(most) <= 1
        assert found == deal_tokens(lengths, replicas, most)

    def test_a_sample_that_fits_in_no_pass(self) -> None:
        for lengths, replicas in (([5, 9], 2), ([], 1), ([1], 0)):
            with pytest.raises(UsageError) as caught:
                deal_tokens(lengths, replicas, 8)
            assert [problem.code for problem in caught.value.problems] == ["SR-BATCH-INVALID"]
        assert deal_tokens([8, 1], 3, 8).num_empty == 1


def test_what_an_option_costs() -> None:
    options = {option.kind: option for option in plan_batch(256, 10, 2)}
    ragged = cost_of(options["ragged"], 256, samples_left=1000, eval_every=50, schedule_updates=1000, updates_done=200)
    assert (ragged.passes, ragged.pass_slots, ragged.updates_left) == (13, 130, 4)
    assert (ragged.eval_samples, ragged.eval_updates) == (12800, 50)
    assert (ragged.schedule_samples, ragged.schedule_updates) == (256000, 1000.0)
    changed = next(option for option in plan_batch(256, 10, 2) if option.global_batch == 260)
    cost = cost_of(changed, 256, samples_left=1000, eval_every=65, schedule_updates=1000, updates_done=200)
    assert (cost.eval_samples, cost.eval_updates) == (16900, 64)
    assert cost.schedule_samples == 200 * 256 + 800 * 260
    assert cost.schedule_updates == 200 + 800 * 256 / 260
    assert cost_of(changed, 256).to_json()["updates_left"] is None


class TestVerbs:
    def test_what_options_cost(self, tmp_path: Path) -> None:
        lengths = tmp_path / "lengths.txt"
        lengths.write_text("\n".join(map(str, [9, 3, 5, 7, 2, 2])))
        words = ["--global-batch", "256", "--replicas", "10", "--max-microbatch", "2", "--samples-left", "1000"]
        words += ["--eval-every", "65", "--schedule-updates", "1000", "--updates-done", "200"]
        shown = CliRunner(env={"COLUMNS": "120"}).invoke(batch, words, catch_exceptions=False).output
        assert "eval: samples" in shown
        found = json.loads(
            CliRunner(env={"COLUMNS": "120"}).invoke(batch, [*words, "--json"], catch_exceptions=False).stdout
        )
        costs = {option["global_batch"]: option["cost"] for option in found["options"]}
        assert costs[260]["eval_updates"] == 64
        assert costs[256]["updates_left"] == 4
        words = ["--global-batch", "28", "--replicas", "2", "--max-microbatch", "10", "--unit", "tokens"]
        words += ["--lengths", str(lengths)]
        done = CliRunner(env={"COLUMNS": "120"}).invoke(batch, words, catch_exceptions=False)
        assert "measured: 28 tokens in 2 passes" in done.output
        assert "SR-BATCH-TOKENS" not in done.output
        body = json.loads(
            CliRunner(env={"COLUMNS": "120"}).invoke(batch, [*words, "--json"], catch_exceptions=False).stdout
        )
        assert sum(map(sum, body["token_dealing"]["tokens"])) == 28
        lengths.write_bytes(b"\x80\x05")
        with pytest.raises(UsageError, match="SR-BATCH-INVALID"):
            CliRunner().invoke(batch, words, catch_exceptions=False)

    def test_rates_of_a_checkpoint(self) -> None:
        optimizer, scheduler = build(SCHEDULERS["cosine"])
        run(optimizer, scheduler, 3)
        groups = tuple(
            ParamGroup(params=(), hyperparameters={"lr": group["lr"], "initial_lr": group["initial_lr"]})
            for group in optimizer.param_groups
        )
        state = LogicalState(format="dcp", tensors={}, groups=groups, scheduler=scheduler.state_dict())
        real = run(optimizer, scheduler, 20)

        def rates(policy: LearningRatePlan, of: LogicalState = state) -> PlannedRates:
            return plan_rates(of, policy, 4, old_batch=32, new_batch=64)

        kept = rates(LearningRatePlan())
        assert (kept.kind, len(kept.rates), kept.first_update) == ("CosineAnnealingLR", 20, 4)
        assert check_rates(kept.rates, real, first_update=4) == []
        doubled = rates(LearningRatePlan(policy="linear", factor=2.0))
        assert check_rates(doubled.rates, [[2 * rate for rate in each] for each in real], first_update=4) == []
        assert rates(LearningRatePlan(policy="value", factor=None, value=0.04)).rates[0][0] == doubled.rates[0][0]
        bare = replace(state, scheduler=None)
        assert rates(LearningRatePlan(), bare).to_json()["schedule"] == "constant"
        unknown = rates(LearningRatePlan(), replace(state, scheduler={"last_epoch": 3, "lr_lambdas": [None]}))
        assert unknown.rates == ()
        assert "LambdaLR" in str(unknown.why_not)

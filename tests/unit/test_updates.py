"""Updates against the control: every fault named, also at its smallest size, and silence on a clean move."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from samerun.core.dtype import parse_dtype
from samerun.errors import Problem, Severity
from samerun.manifest.tolerances import Tolerances
from samerun.plan.schedule import PlannedRates
from samerun.verify.evidence.observed import Observed
from samerun.verify.evidence.window import WindowPlan
from samerun.verify.updates.bands import plan_bands, split_bands, vanishing
from samerun.verify.updates.compare import compare_window
from samerun.verify.updates.controls import Controls, complete_reference
from samerun.verify.updates.movement import check_averages, check_end
from samerun.verify.updates.soundness import check_controls
from support.observations import BATCH, COUNT, FIRST, TENSORS, make_evaluation, make_observed, make_state, make_update

NOISE = 1e-7
BOUNDARIES = (("log", 10), ("eval", 20))


def tolerances(**changes: Any) -> dict[str, Any]:
    metrics = ("loss", "grad_norm", "update_norm", "eval_loss", "eval_logits", "parameter_delta")
    table = {metric: {"from": "control", "factor": 10.0, "floor": 1e-7} for metric in metrics} | changes
    return Tolerances.model_validate(table).by_metric()


def controls(*others: Observed) -> Controls:
    found = (make_observed(replicas=4), *(others or (make_observed(replicas=4, noise=NOISE),)))
    names = tuple(f"control-{number}" for number in range(len(found)))
    return Controls(names=names, observed=found, evaluations=(make_evaluation(),) * len(found))


def make_plan(**changes: Any) -> WindowPlan:
    bands = plan_bands(controls(), tolerances(), first_update=FIRST, num_updates=COUNT)
    plan = WindowPlan(
        stage="window",
        first_update=FIRST,
        num_updates=COUNT,
        bands=tuple(band for band in bands if not band.metric.startswith("eval_")),
        global_batch=BATCH,
        boundaries=BOUNDARIES,
        trainable={name: value > 0 for name, value in TENSORS.items()},
    )
    return replace(plan, **changes)


def problems(candidate: Observed, plan: WindowPlan | None = None) -> list[Problem]:
    return list(compare_window(controls().reference, candidate, plan or make_plan()).problems)


def codes(candidate: Observed, plan: WindowPlan | None = None) -> list[str]:
    return [problem.code for problem in problems(candidate, plan)]


def change(index: int, **changes: Any) -> Observed:
    return make_observed(make_update(index, noise=NOISE / 2, **changes), noise=NOISE / 2)


def scaled(index: int, name: str, factor: float) -> Observed:
    return change(index, **{name: getattr(make_update(index), name) * factor})


def test_a_clean_move_is_silent_and_measured() -> None:
    report = compare_window(controls().reference, make_observed(noise=NOISE), make_plan())
    assert report.problems == ()
    assert report.audit is not None
    assert report.audit.exactly_once
    assert len(report.series) == COUNT
    assert set(report.worst) == {"loss", "grad_norm", "update_norm", "parameter_delta"}
    assert 0 < report.worst["loss"]["used"] <= 0.11


@pytest.mark.parametrize(
    ("name", "code"),
    [("loss", "SR-UPD-LOSS"), ("grad_norm", "SR-UPD-GRADNORM"), ("update_norm", "SR-UPD-UPDATENORM")],
)
@pytest.mark.parametrize("index", [FIRST, FIRST + 7, FIRST + COUNT - 1])
def test_a_number_outside_its_band_is_named_where_it_leaves(name: str, code: str, index: int) -> None:
    found = problems(scaled(index, name, 1 + 20 * NOISE))
    assert [problem.code for problem in found] == [code]
    assert found[0].where["update"] == index
    assert codes(scaled(index, name, 1 + 5 * NOISE)) == []


def test_learning_rates_are_compared_to_the_last_bit() -> None:
    rates = make_update(20).lr
    nudged = (rates[0], math.nextafter(rates[1], 1.0))
    assert codes(change(20, lr=nudged)) == ["SR-UPD-LR"]


def test_the_hint_tells_a_shifted_schedule_from_a_scaled_one() -> None:
    ahead = [make_update(i, lr=make_update(i + 1).lr) for i in range(FIRST, FIRST + COUNT)]
    assert "1 steps off" in problems(make_observed(*ahead))[0].hint
    doubled = [make_update(i, lr=tuple(2 * rate for rate in make_update(i).lr)) for i in range(FIRST, FIRST + COUNT)]
    assert "2 times" in problems(make_observed(*doubled))[0].hint
    assert codes(change(14, lr=make_update(14).lr[:1])) == ["SR-UPD-LR"]


def test_groups_that_another_layout_cuts_otherwise() -> None:
    """Experts of their own where they are spread: one group more, at a rate that another group has too."""
    first, second = make_update(14).lr
    assert first != second
    assert codes(change(14, lr=(first, second, first))) == []
    assert codes(change(14, lr=(first, second, 3 * first))) == ["SR-UPD-LR"]
    assert codes(change(14, lr=(first, first, first))) == ["SR-UPD-LR"]


def test_declared_schedules_are_compared_as_declared() -> None:
    halved = [make_update(i, lr=tuple(rate / 2 for rate in make_update(i).lr)) for i in range(FIRST, FIRST + COUNT)]
    assert codes(make_observed(*halved), make_plan(rate_factor=0.5)) == []
    assert codes(make_observed(*halved), make_plan(rate_factor=None)) == []
    assert codes(make_observed(*halved), make_plan(rate_bound=0.6)) == []
    assert codes(make_observed(*halved), make_plan(rate_bound=0.4)) == ["SR-UPD-LR"]


def test_rates_that_the_plan_printed_are_kept_without_a_control() -> None:
    """Both jobs of a script with another horizon agree with each other, and not with the checkpoint."""
    rates = tuple(make_update(i).lr for i in range(FIRST, FIRST + COUNT))
    planned = PlannedRates(first_update=FIRST, kind="CosineAnnealingLR", rates=rates)
    late = replace(planned, rates=(*rates[:7], *(tuple(1.01 * rate for rate in row) for row in rates[7:])))
    for samples in (1.0, None):  # None: the schedule follows samples, and the control's rates are not the candidate's
        plan = make_plan(planned_rates=planned, rate_factor=samples)
        assert codes(make_observed(), plan) == []
        found = problems(make_observed(), replace(plan, planned_rates=late))
        assert [(problem.code, problem.where["update"]) for problem in found] == [("SR-SCHEDULE-RATE", FIRST + 7)]
    assert codes(make_observed(), make_plan(planned_rates=late, rate_bound=0.02)) == []
    first = make_plan(stage="update", num_updates=1, window_updates=COUNT, planned_rates=late, boundaries=())
    assert codes(make_observed(), first) == []
    joined = replace(planned, rates=tuple(row + row[:1] for row in rates))  # three groups, two of them alike
    assert codes(make_observed(), make_plan(planned_rates=joined)) == []
    other = replace(planned, rates=tuple((*row, 7.0) for row in rates))
    assert codes(make_observed(), make_plan(planned_rates=other)) == ["SR-SCHEDULE-RATE"]
    unsaved = replace(late, kind="constant")  # a script may compute its rates from the update's index
    unknown = PlannedRates(first_update=FIRST, kind=None, why_not="LambdaLR")
    for silent in (unsaved, unknown):
        assert codes(make_observed(), make_plan(planned_rates=silent)) == []


@pytest.mark.parametrize("changes", [{"loss": math.nan}, {"grad_norm": math.inf}, {"finite": False}])
def test_values_that_are_not_finite_are_named_first_of_all(changes: dict[str, Any]) -> None:
    assert codes(change(15, **changes))[0] == "SR-UPD-NONFINITE"


def test_a_wrong_first_index_and_missing_updates() -> None:
    late = make_observed(updates=tuple(make_update(i) for i in range(FIRST + 1, FIRST + COUNT + 1)))
    assert codes(late)[0] == "SR-UPD-INDEX"
    short = make_observed(updates=tuple(make_update(i) for i in range(FIRST, FIRST + 5)))
    assert codes(short) == ["SR-UPD-MISSING"]
    assert codes(make_observed(updates=())) == ["SR-UPD-MISSING"]


def test_other_samples_are_named_and_their_numbers_are_not_compared() -> None:
    moved = [make_update(i, ids=make_update(i + 1).ids, loss=9.0) for i in range(15, FIRST + COUNT)]
    found = codes(make_observed(*moved))
    assert "SR-SAMPLE-OMITTED" in found
    assert "SR-UPD-LOSS" not in found


def test_the_size_of_an_update_and_its_tokens() -> None:
    fewer = make_update(14)
    ids = {replica: ids[:-1] for replica, ids in (fewer.ids or {}).items()}
    assert "SR-UPD-SAMPLES" in codes(change(14, ids=ids, samples=BATCH - 3))
    assert codes(change(14, tokens=BATCH * 31 - 1)) == ["SR-UPD-TOKENS"]


def test_scaler_and_skips() -> None:
    assert codes(change(14, loss_scale=1024.0)) == ["SR-UPD-SCALE"]
    assert codes(change(14, skipped=1)) == ["SR-UPD-SKIPPED"]


@pytest.mark.parametrize("field", ["loss", "grad_norm", "update_norm", "ids"])
def test_what_is_not_recorded_is_missing_evidence(field: str) -> None:
    assert "SR-UPD-UNRECORDED" in codes(change(14, **{field: None}))


def test_movement() -> None:
    clean = make_update(FIRST).moved or {}
    still = problems(change(FIRST, moved={**clean, "norm.weight": 0.0}, deltas={}))
    assert ("SR-UPD-STILL", "norm.weight") in {(p.code, p.where.get("tensor")) for p in still}
    thawed = problems(change(FIRST, moved={**clean, "frozen.weight": 1e-9}))
    assert ("SR-UPD-FROZEN-MOVED", "frozen.weight") in {(p.code, p.where.get("tensor")) for p in thawed}


def test_a_parameter_without_gradient_anywhere_is_only_noted() -> None:
    plan = make_plan(trainable={**dict.fromkeys(TENSORS, True)})
    found = problems(make_observed(), plan)
    assert [(problem.code, problem.severity) for problem in found] == [("SR-UPD-STILL", Severity.NOTE)]


def test_one_tensor_that_moves_by_another_amount() -> None:
    found = problems(change(14, deltas={"embedding.weight": 0.5, "norm.weight": 0.02 * (1 + 1e-5)}))
    assert [(problem.code, problem.where["tensor"]) for problem in found] == [("SR-UPD-DELTA", "norm.weight")]


GRADIENTS = {"embedding.weight": 0.8, "norm.weight": 0.02}


def with_gradients(factor: float = 1.0, **changed: float) -> Observed:
    gradients = {name.replace("__", "."): value for name, value in changed.items()}
    norms = {name: value * factor for name, value in GRADIENTS.items()} | gradients
    return make_observed(make_update(FIRST, gradients=norms))


def gradient_plan(*others: Observed, floor: float = 1e-5) -> WindowPlan:
    reference = Controls(
        names=("first", "repeat-2"),
        observed=(with_gradients(), *(others or (with_gradients(),))),
        evaluations=(make_evaluation(),) * 2,
    )
    table = tolerances(parameter_gradient={"from": "control", "factor": 10.0, "floor": floor})
    bands = plan_bands(reference, table, first_update=FIRST, num_updates=COUNT)
    kept, _, _ = split_bands(bands, vanishing(reference, bands))
    return make_plan(bands=tuple(band for band in kept if band.metric == "parameter_gradient"))


def gradient_findings(candidate: Observed, plan: WindowPlan) -> list[Problem]:
    return list(compare_window(with_gradients(), candidate, plan).problems)


def test_the_gradient_of_every_tensor_is_judged() -> None:
    plan = gradient_plan()
    assert gradient_findings(with_gradients(1 + 5e-6), plan) == []
    (small,) = gradient_findings(with_gradients(norm__weight=0.02 * (1 + 2e-5)), plan)
    assert (small.code, small.where["tensor"]) == ("SR-UPD-GRADIENT", "norm.weight")
    (scaled,) = gradient_findings(with_gradients(0.75), plan)
    assert "0.75 times" in scaled.hint
    (lost,) = gradient_findings(make_observed(make_update(FIRST)), plan)
    assert (lost.code, lost.where["key"]) == ("SR-UPD-UNRECORDED", "gradients")


def test_a_gradient_that_is_rounding_alone_is_not_judged() -> None:
    floor = 0.2  # a quarter of it, of an average gradient of 0.57, is 0.028: norm.weight, 0.02, is below
    plan = gradient_plan(floor=floor)
    assert {band.tensor for band in plan.bands} == {"embedding.weight"}
    noisy = gradient_plan(with_gradients(norm__weight=0.05))
    assert {band.tensor for band in noisy.bands} == {"embedding.weight"}


def test_clipping_is_compared_where_the_gradient_agrees() -> None:
    def clipped(to: float, grad_norm: float | None = None) -> Observed:
        norm = make_update(15).grad_norm if grad_norm is None else grad_norm
        return make_observed(make_update(15, step_norm=to, grad_norm=norm))

    found = list(compare_window(clipped(1.0), clipped(1.0), make_plan()).problems)
    assert found == []
    (problem,) = compare_window(clipped(1.0), clipped(1.2), make_plan()).problems
    assert (problem.code, problem.where["update"]) == ("SR-UPD-CLIP", 15)
    other = [item.code for item in compare_window(clipped(1.0), clipped(1.2, grad_norm=9.0), make_plan()).problems]
    assert other == ["SR-UPD-GRADNORM"]


def test_an_average_that_stands_still_is_found() -> None:
    def state(digest: str) -> dict[str, Any]:
        return {"tensors": {"ema:w": {"digest": digest}, "param:w": {"digest": "0"}}}

    moving, standing = (state("a"), state("b")), (state("a"), state("a"))
    assert check_averages(moving, moving, "window") == []
    assert [(p.code, p.where["tensor"]) for p in check_averages(moving, standing, "window")] == [
        ("SR-UPD-AVERAGE", "ema:w")
    ]
    assert check_averages(standing, standing, "window") == []  # it does not move in the control either
    assert check_averages((None, None), standing, "window") == []


def test_boundaries() -> None:
    assert codes(make_observed(boundaries=frozenset({("log", 20), ("log", 30)}))) == ["SR-UPD-BOUNDARY"]


def test_an_intentional_change_is_held_to_the_same_order() -> None:
    flat = [sample for i in range(FIRST, FIRST + COUNT) for sample in make_update(i).all_ids()]
    flat.sort()
    updates = [
        make_update(FIRST + i, ids={0: tuple(flat[i * 10 : i * 10 + 10])}, samples=10, loss=2.0) for i in range(COUNT)
    ]
    plan = make_plan(samples="portions", global_batch=10)
    assert codes(make_observed(*updates), plan) == []
    assert "SR-UPD-SAMPLES" in codes(make_observed(), plan)
    assert codes(make_observed(*updates), replace(plan, samples="free")) == []


def test_replicas_after_the_window() -> None:
    clean, odd = make_state("end").body, make_state("end", odd=[{"rank": 2, "digest": "1" * 16}]).body
    assert check_end(clean, clean, "window") == []
    found = check_end(clean, odd, "window")
    assert [(problem.code, problem.severity) for problem in found] == [("SR-UPD-REPLICA", Severity.ERROR)]
    assert [problem.severity for problem in check_end(odd, odd, "window")] == [Severity.WARNING]
    assert [problem.code for problem in check_end(clean, None, "window")] == ["SR-UPD-UNRECORDED"]
    broken = make_state("end", nonfinite=1).body
    assert [problem.code for problem in check_end(clean, broken, "window")] == ["SR-UPD-NONFINITE"]
    masked, other = ({"tensors": {"buffer:mask": {"nonfinite": 3, "digest": digest}}} for digest in "12")
    assert check_end(masked, masked, "window") == []
    assert [problem.code for problem in check_end(other, masked, "window")] == ["SR-UPD-NONFINITE"]


# --- controls ---


def control_codes(found: Controls, **changes: Any) -> list[str]:
    arguments: dict[str, Any] = {
        "first_update": FIRST,
        "num_updates": COUNT,
        "boundaries": BOUNDARIES,
        "tolerances": tolerances(),
        "precision": parse_dtype("float32"),
    }
    return [problem.code for problem in check_controls(found, **{**arguments, **changes})]


def test_sound_controls_are_silent() -> None:
    assert control_codes(controls()) == []


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (make_observed(updates=tuple(make_update(i) for i in range(FIRST, 20)), replicas=4), "SR-CONTROL-SHORT"),
        (make_observed(make_update(15, loss=math.nan)), "SR-CONTROL-NONFINITE"),
        (make_observed(make_update(15, grad_norm=None)), "SR-CONTROL-UNRECORDED"),
        (make_observed(make_update(15, ids=None)), "SR-CONTROL-UNRECORDED"),
        (make_observed(make_update(15, ids=make_update(16).ids)), "SR-CONTROL-SAMPLES"),
        (make_observed(make_update(15, lr=(1.0, 2.0))), "SR-CONTROL-RATE"),
        (make_observed(problems=(Problem("SR-TRACE-LINE", "line 3 cannot be read"),)), "SR-CONTROL-TRACE"),
    ],
)
def test_controls_that_cannot_judge(other: Observed, code: str) -> None:
    assert code in control_codes(controls(other))


def test_one_control_has_no_variation() -> None:
    alone = Controls(names=("only",), observed=(make_observed(),), evaluations=(make_evaluation(),))
    assert control_codes(alone) == ["SR-CONTROL-SINGLE"]
    stated = {"from": "user", "limit": 1e-4, "reason": "measured last month"}
    assert control_codes(alone, tolerances=tolerances(**dict.fromkeys(tolerances(), stated))) == []


def test_controls_that_agree_to_the_last_bit_measure_nothing_in_low_precision() -> None:
    exact, half = controls(make_observed(replicas=4)), parse_dtype("bfloat16")
    assert control_codes(exact) == []
    assert control_codes(exact, precision=half) == ["SR-CONTROL-EXACT"]
    assert control_codes(controls(), precision=half) == []


def test_controls_and_evaluation() -> None:
    silent = replace(controls(), evaluations=(None, None))
    assert control_codes(silent) == ["SR-CONTROL-UNRECORDED"]
    dirty = replace(controls(), evaluations=(make_evaluation(), make_evaluation(changed=("buffer:mean",))))
    assert control_codes(dirty) == ["SR-CONTROL-EVAL"]
    infinite = replace(controls(), evaluations=(make_evaluation(losses=(math.inf, 1.0)), None))
    assert control_codes(infinite) == ["SR-CONTROL-NONFINITE"]


def test_the_window_must_cross_a_boundary_of_each_kind() -> None:
    assert control_codes(controls(), boundaries=(("log", 10), ("eval", 50))) == ["SR-CONTROL-BOUNDARY"]
    assert control_codes(controls(), boundaries=(("log", 10), ("eval", 15))) == ["SR-CONTROL-BOUNDARY"]


def test_a_noisy_control_abstains_but_a_noisy_tensor_is_left_out() -> None:
    wild = make_observed(replicas=4, noise=0.2)
    bands = plan_bands(controls(wild), tolerances(), first_update=FIRST, num_updates=COUNT)
    _, _, found = split_bands(bands)
    assert {problem.code for problem in found} == {"SR-CONTROL-NOISY"}
    moved = {**(make_update(FIRST).moved or {}), "norm.weight": 0.05}
    twitching = make_observed(make_update(FIRST, moved=moved, deltas={}), replicas=4)
    kept, noise, found = split_bands(
        plan_bands(controls(twitching), tolerances(), first_update=FIRST, num_updates=COUNT)
    )
    assert (noise, found) == (("norm.weight",), [])
    assert {band.tensor for band in kept if band.tensor} == {"embedding.weight", "frozen.weight"}


def test_a_metric_that_becomes_noisy_late_is_judged_up_to_there_if_that_was_declared() -> None:
    leap = make_observed(make_update(FIRST + 12, grad_norm=1.4), replicas=4)
    bands = plan_bands(controls(leap), tolerances(), first_update=FIRST, num_updates=COUNT)
    for at_least in (None, 13):
        _, _, found = split_bands(bands, at_least=at_least)
        assert [(p.code, p.severity) for p in found] == [("SR-CONTROL-NOISY", Severity.ERROR)]
    kept, _, found = split_bands(bands, at_least=12)
    assert [(p.code, p.severity) for p in found] == [("SR-CONTROL-PARTLY", Severity.WARNING)]
    (band,) = [band for band in kept if band.metric == "grad_norm"]
    assert (band.covers(FIRST + 11), band.covers(FIRST + 12)) == (True, False)
    plan = make_plan(bands=kept)
    assert codes(scaled(FIRST + 11, "grad_norm", 1.1), plan) == ["SR-UPD-GRADNORM"]
    assert codes(scaled(FIRST + 12, "grad_norm", 1.1), plan) == []
    assert codes(scaled(FIRST + 12, "loss", 1.1), plan) == ["SR-UPD-LOSS"]


def test_a_ledger_is_completed_by_the_control_that_resumed() -> None:
    ledger = make_observed(make_update(FIRST, moved=None, deltas={}), replicas=4)
    both = Controls(
        names=("recorded-1", "first"),
        observed=(ledger, make_observed(replicas=4)),
        evaluations=(None, make_evaluation()),
    )
    assert complete_reference(both).reference.by_update()[FIRST].moved == make_update(FIRST).moved
    assert both.evaluation is both.evaluations[1]

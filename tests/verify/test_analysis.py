"""Bands from analysis: what they are made from, what they abstain for, and how an oracle moves them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from samerun.core.dtype import parse_dtype
from samerun.core.tolerance import bands_from_json, bands_to_json
from samerun.manifest.tolerances import METRICS, Tolerances
from samerun.verify.evidence.observed import Observed
from samerun.verify.evidence.window import WindowPlan
from samerun.verify.updates.bands import plan_bands, split_bands, vanishing
from samerun.verify.updates.compare import compare_window
from samerun.verify.updates.controls import Controls
from samerun.verify.updates.oracle import Oracle, check_oracle, compare_with_oracle, distances, first_of
from samerun.verify.updates.soundness import check_controls
from support.observations import (
    BATCH,
    COUNT,
    FIRST,
    make_evaluation,
    make_header,
    make_observed,
    make_state,
    make_update,
)

SHAPES = {"embedding.weight": [64, 16], "norm.weight": [16], "frozen.weight": [4]}
GRADIENTS = {"embedding.weight": 0.9, "norm.weight": 0.05}
ANALYSED = Tolerances.model_validate({metric: {"from": "analysis"} for metric in METRICS}).by_metric()
FLOAT = parse_dtype("float32")


def job(noise: float = 0.0, *, shapes: Any = SHAPES, **changes: Any) -> Observed:
    state = make_state("loaded")
    tensors = {f"param:{name}": {"shape": shape, "trainable": name[0] != "f"} for name, shape in (shapes or {}).items()}
    states = (replace(state, body={**state.body, "tensors": tensors}),) if shapes else ()
    gradients = {name: value * (1 + noise) for name, value in GRADIENTS.items()}
    first = make_update(FIRST, noise=noise, gradients=gradients)
    return make_observed(first, noise=noise, states=states, **changes)


def controls(**changes: Any) -> Controls:
    return Controls(**{"names": ("first",), "observed": (job(),), "evaluations": (make_evaluation(),), **changes})


def problems_of(found: Controls, precision: str = "float32") -> list[str]:
    checked = check_controls(
        found,
        first_update=FIRST,
        num_updates=COUNT,
        boundaries=(),
        tolerances=ANALYSED,
        precision=parse_dtype(precision),
    )
    return [problem.code for problem in checked]


def bands(found: Controls, precision: str = "float32") -> tuple[Any, ...]:
    return plan_bands(found, ANALYSED, first_update=FIRST, num_updates=COUNT, precision=parse_dtype(precision))


def test_one_control_is_enough_if_it_tells_the_shapes() -> None:
    assert problems_of(controls()) == []
    assert problems_of(controls(observed=(job(shapes=None),))) == ["SR-CONTROL-UNRECORDED"]
    assert problems_of(controls(observed=(job(shapes={"norm.weight": [16]}),))) == ["SR-CONTROL-UNRECORDED"]


def test_every_metric_has_a_bound_that_says_where_it_comes_from_and_survives_its_seal() -> None:
    found = bands(controls())
    assert {band.metric for band in found} == set(METRICS)
    assert {band.origin for band in found} == {"analysis"}
    assert all("Higham" in band.reason and "1 weight matrices" in band.reason for band in found)
    assert {band.tensor for band in found if band.metric == "parameter_gradient"} == set(GRADIENTS)
    assert set(bands_from_json(bands_to_json(found, ()))) == set(found)
    loss = next(band for band in found if band.metric == "loss")
    assert 0 < loss.limits[0] < loss.limits[-1] < 1e-3  # two runs come apart


def test_rounding_is_within_and_a_thousandth_is_not() -> None:
    found = controls()
    kept, noise, wide = split_bands(bands(found), vanishing(found, bands(found)))
    assert (noise, wide) == ((), [])
    plan = WindowPlan(
        stage="window",
        first_update=FIRST,
        num_updates=COUNT,
        bands=tuple(band for band in kept if not band.metric.startswith("eval_")),
        global_batch=BATCH,
    )
    assert compare_window(found.reference, job(1e-7), plan).problems == ()
    codes = {problem.code for problem in compare_window(found.reference, job(1e-3), plan).problems}
    assert codes == {"SR-UPD-LOSS", "SR-UPD-GRADNORM", "SR-UPD-UPDATENORM", "SR-UPD-GRADIENT", "SR-UPD-DELTA"}


def test_a_bound_beyond_its_ceiling_abstains() -> None:
    _, _, wide = split_bands(bands(controls(), "bfloat16"))
    assert {problem.code for problem in wide} == {"SR-CONTROL-NOISY"}
    assert all("bound that analysis gives" in problem.message for problem in wide if "tensor" not in problem.where)


def test_parameters_in_few_bits_move_in_steps_that_have_no_bound() -> None:
    reference = job()
    body = dict(reference.states[0].body)
    body["tensors"] = {key: {**fact, "dtype": "bfloat16"} for key, fact in body["tensors"].items()}
    coarse = replace(reference, states=(replace(reference.states[0], body=body),))
    found = bands(controls(observed=(coarse,)))
    unknown = {band.metric for band in found if math.inf in band.limits}
    assert unknown == {"update_norm", "parameter_delta"}


def truth(noise: float) -> Oracle:
    return first_of(job(noise), make_evaluation(losses=(3.0 * (1 + noise), 2.5)), FIRST)


def test_a_bound_is_never_below_twice_the_controls_distance_from_the_oracle() -> None:
    far = bands(controls(oracle=truth(1e-3)))
    for metric in ("loss", "grad_norm", "eval_loss"):
        (band,) = [band for band in far if band.metric == metric]
        assert band.limits[0] >= 1.99e-3
        assert "fp64 oracle" in band.reason
    near = {band.metric: band.limits for band in bands(controls(oracle=truth(1e-9))) if band.tensor is None}
    assert near == {band.metric: band.limits for band in bands(controls()) if band.tensor is None}


def test_whether_rounding_explains_a_candidate() -> None:
    oracle, control = truth(0.0), truth(1e-6)
    rows = compare_with_oracle(oracle, [control], truth(5e-7))
    assert {metric: row["explained"] for metric, row in rows.items()} == dict.fromkeys(
        ("loss", "grad_norm", "parameter_gradient", "eval_loss", "eval_logits"), True
    )
    assert not compare_with_oracle(oracle, [control], truth(1e-3))["loss"]["explained"]
    assert distances(oracle, control)["parameter_gradient", "norm.weight"] == pytest.approx(1e-6, rel=1e-3)
    assert compare_with_oracle(oracle, [], control) == {}


def test_what_is_no_oracle() -> None:
    def oracle(dtype: str, **changes: Any) -> Observed:
        found = job(**changes)
        header = replace(make_header(0, next(iter(found.headers.values())).mesh()), environment={"dtype": [dtype]})  # type: ignore[arg-type]
        return replace(found, headers={0: header})

    assert check_oracle(oracle("float64"), job(), FIRST) == []
    assert [p.code for p in check_oracle(oracle("float32"), job(), FIRST)] == ["SR-CONTROL-ORACLE"]
    assert [p.code for p in check_oracle(None, job(), FIRST)] == ["SR-CONTROL-ORACLE"]
    assert [p.code for p in check_oracle(oracle("float64", updates=()), job(), FIRST)] == ["SR-CONTROL-ORACLE"]
    other = make_observed(make_update(FIRST, ids=make_update(FIRST + 1).ids))
    assert [p.code for p in check_oracle(oracle("float64"), other, FIRST)] == ["SR-CONTROL-SAMPLES"]


def test_a_control_without_logits_has_no_bound_for_them_and_none_without_examples() -> None:
    found = bands(controls(evaluations=(make_evaluation(logits=None),)))
    assert {band.metric for band in found} == set(METRICS) - {"eval_logits"}
    found = bands(controls(evaluations=(None,)))
    assert {band.metric for band in found} == set(METRICS) - {"eval_logits", "eval_loss"}
    silent = make_observed(make_update(FIRST, loss=0.0, gradients=GRADIENTS), states=job().states)
    (loss,) = [band for band in bands(controls(observed=(silent,))) if band.metric == "loss"]
    assert loss.limits[0] == math.inf  # a loss of zero has no relative bound

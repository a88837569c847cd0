"""What is compared after the window where no loss and no norm need show it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from samerun.errors import Severity
from samerun.verify.updates.ending import Span, check_beside, check_ending, check_motion
from support.observations import COUNT, FIRST, make_observed, make_update


def body(steps: float = 12.0) -> dict[str, Any]:
    return {
        "tensors": {
            "param:w": {"dtype": "float32", "digest": "1", "trainable": True, "aliases": ["head"]},
            "param:frozen": {"dtype": "float32", "digest": "2", "trainable": False},
            "buffer:mean": {"dtype": "float32", "digest": f"mean after {steps}"},
            "buffer:mask": {"dtype": "bool", "digest": "3"},
        },
        "counters": {"optim.step:w": {"value": steps, "dtype": "float32"}},
        "groups": [
            {
                "params": ["w"],
                "hyperparameters": {"lr": 1e-3 / steps, "eps": 1e-8, "betas": [0.9, 0.95], "amsgrad": False},
            }
        ],
    }


def clean() -> Span:
    return Span(body(), body(22.0))


def damaged(place: str, key: str, value: Any) -> Span:
    end = copy.deepcopy(body(22.0))
    if place == "groups":
        end["groups"][0]["hyperparameters"][key] = value
    elif place == "counters":
        end["counters"][key]["value"] = value
    else:
        end["tensors"][place][key] = value
    return Span(body(), end)


def found(control: Span, candidate: Span, **arguments: Any) -> list[tuple[str, Severity]]:
    return [(problem.code, problem.severity) for problem in check_ending(control, candidate, "window", **arguments)]


def test_a_clean_end_is_silent_although_rates_and_steps_moved() -> None:
    assert found(clean(), clean()) == []
    assert found(Span(None, None), clean()) == []


@pytest.mark.parametrize(
    ("span", "code"),
    [
        (damaged("groups", "eps", 1e-7), "SR-UPD-SETTING"),
        (damaged("groups", "amsgrad", True), "SR-UPD-SETTING"),
        (damaged("counters", "optim.step:w", 21.0), "SR-UPD-COUNTER"),
        (damaged("param:frozen", "trainable", True), "SR-UPD-TENSOR"),
        (damaged("param:w", "aliases", []), "SR-UPD-TENSOR"),
        (damaged("param:w", "dtype", "bfloat16"), "SR-UPD-TENSOR"),
        (damaged("buffer:mean", "digest", "mean after 12.0"), "SR-UPD-BUFFER"),
        (damaged("buffer:mask", "digest", "4"), "SR-UPD-BUFFER"),
    ],
)
def test_what_the_candidate_alone_did_is_an_error(span: Span, code: str) -> None:
    assert (code, Severity.ERROR) in found(clean(), span)
    assert Severity.ERROR not in {severity for _, severity in found(span, span)}


def test_a_parameter_that_joins_a_group_in_one_job_only() -> None:
    joined = body(22.0)
    joined["groups"].append({"params": ["frozen"], "hyperparameters": {"lr": 1e-3}})
    assert found(clean(), Span(body(), joined)) == [("SR-UPD-SETTING", Severity.ERROR)]


def test_what_differed_after_loading_is_judged_there() -> None:
    other = body()
    other["groups"][0]["hyperparameters"]["eps"] = 1e-7
    other["tensors"]["param:w"]["dtype"] = "bfloat16"
    end = copy.deepcopy(other)
    assert found(Span(body(), body()), Span(other, end)) == []


def test_a_setting_that_both_changed_after_loading_is_named() -> None:
    both = damaged("groups", "eps", 1e-7)
    (problem,) = check_ending(both, both, "window")
    assert (problem.code, problem.severity) == ("SR-UPD-SETTING", Severity.WARNING)
    assert (problem.expected, problem.found) == (1e-8, 1e-7)
    cycled = damaged("groups", "betas", [0.85, 0.95])
    assert found(cycled, cycled) == []
    assert ("SR-UPD-SETTING", Severity.ERROR) in found(clean(), cycled)


def test_an_optimizer_that_is_declared_to_change_is_left_alone() -> None:
    codes = {code for code, severity in found(clean(), damaged("groups", "eps", 1e-7), optimizer=False)}
    assert codes == {"SR-UPD-SETTING"}  # the warning about the middle of the window stays
    assert found(clean(), damaged("counters", "optim.step:w", 1.0), optimizer=False) == []


def test_a_control_that_moves_nothing_judges_nobody() -> None:
    still = make_observed(*(make_update(index, update_norm=0.0) for index in range(FIRST, FIRST + COUNT)))
    assert [problem.code for problem in check_motion("repeat-1", still, FIRST, COUNT)] == ["SR-CONTROL-STILL"]
    warming_up = make_observed(make_update(FIRST, update_norm=0.0))
    assert check_motion("repeat-1", warming_up, FIRST, COUNT) == []


def beside(lag: float | None, mean: float = 2.0) -> dict[str, Any]:
    return {"beside": {"average_lag": lag, "buffers": {"mean": mean}}}


def test_an_average_at_another_distance_decays_otherwise() -> None:
    def codes(candidate: dict[str, Any], *controls: dict[str, Any]) -> list[tuple[str, Severity]]:
        problems = check_beside(controls or (beside(0.1), beside(0.1)), candidate, "window", floor=1e-5, factor=10)
        return [(problem.code, problem.severity) for problem in problems]

    assert codes(beside(0.1 * (1 + 9e-5), 2.0 * (1 + 9e-5))) == []
    assert codes(beside(0.1 * (1 + 2e-4))) == [("SR-UPD-LAG", Severity.ERROR)]
    assert codes(beside(0.1, 2.001)) == [("SR-UPD-BUFFER", Severity.WARNING)]
    assert codes(beside(0.1005), beside(0.1), beside(0.1001)) == []  # ten times what the controls differ by
    assert codes(beside(None), beside(None)) == []
    assert codes({}) == []
    assert codes({"beside": {"average_lag": "nan", "buffers": {"mean": "inf"}}}) == [
        ("SR-UPD-LAG", Severity.ERROR),
        ("SR-UPD-BUFFER", Severity.WARNING),
    ]

"""Which kind of failure stands behind a number: each evidence on its own, and silence without any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samerun.errors import Problem, Severity
from samerun.verify.evidence.observed import Observed
from samerun.verify.updates.attribute import attribute
from samerun.verify.updates.controls import Controls
from samerun.verify.updates.evaluate import Evaluation
from support.observations import FIRST, make_evaluation, make_observed, make_state, make_update

MODULES = (("a", 1.0, 4), ("b", 2.0, 4), ("head", 3.0, 8))
DETAILS = {"a": (0.5, "float32"), "b": (0.7, "float32"), "head": (0.9, "float32")}
SETTINGS = {"norm": {"eps": 1e-5}, "drop": {"p": 0.0}}
LOSS = Problem("SR-UPD-LOSS", "the loss leaves its band")
LOGITS = Problem("SR-EVAL-LOGITS", "the logits differ")


def evaluation(**changes: Any) -> Evaluation:
    return make_evaluation(**{"modules": MODULES, "details": DETAILS, **changes})


def job(*, inputs: tuple[int, int] | None = (12, 77), settings: Any = SETTINGS) -> Observed:
    state = make_state("loaded")
    state = replace(state, body={**state.body, "modules": settings})
    return make_observed(make_update(FIRST, inputs=inputs), states=(state, make_state("end")))


def controls(*others: Evaluation) -> Controls:
    found = (evaluation(), *(others or (evaluation(),)))
    return Controls(names=("first", "repeat-2")[: len(found)], observed=(job(),) * len(found), evaluations=found)


def kind(problem: Problem, candidate: Observed, seen: Evaluation | None, against: Controls | None = None) -> str | None:
    (found,) = attribute([problem], against or controls(), candidate, seen)
    return found.kind


@pytest.mark.parametrize("problem", [LOSS, LOGITS])
def test_nothing_else_differs(problem: Problem) -> None:
    assert attribute([problem], controls(), job(), evaluation()) == [problem]
    assert attribute([problem], controls(), job(inputs=None, settings=None), None) == [problem]


def test_other_inputs_for_the_same_samples() -> None:
    assert kind(LOSS, job(inputs=(12, 78)), evaluation()) == "data"
    assert kind(LOGITS, job(inputs=(12, 78)), evaluation()) is None  # fixed examples are not from the loader
    assert kind(LOSS, job(inputs=(15, 78)), evaluation()) is None  # rows that the loader filled up


def test_other_settings_of_modules() -> None:
    assert kind(LOSS, job(settings={**SETTINGS, "drop": {"p": 0.1}}), evaluation()) == "random numbers"
    other = job(settings={**SETTINGS, "norm": {"eps": 1e-3}})
    for problem in (LOSS, LOGITS):
        assert kind(problem, other, evaluation()) == "settings that shapes do not show"
    assert kind(LOSS, job(settings={**SETTINGS, "new": {"p": 0.5}}), evaluation()) is None


def test_modules_that_give_out_something_else() -> None:
    norms = (("a", 1.0, 4), ("b", 2.1, 4), ("head", 3.0, 8))
    assert kind(LOSS, job(), evaluation(modules=norms)) == "settings that shapes do not show"
    turned = {**DETAILS, "b": (0.2, "float32")}
    (found,) = attribute([LOGITS], controls(), job(), evaluation(details=turned))
    assert found.kind == "fused and strided layouts"
    assert "b (of the same norm" in found.message
    short = {**DETAILS, "b": (0.7, "bfloat16")}
    assert kind(LOGITS, job(), evaluation(details=short)) == "dtype and masters"


def test_what_the_controls_differ_by_themselves_does_not_count() -> None:
    noisy = evaluation(modules=(("a", 1.0, 4), ("b", 2.02, 4), ("head", 3.0, 8)))
    small = evaluation(modules=(("a", 1.0, 4), ("b", 2.03, 4), ("head", 3.0, 8)))
    assert kind(LOSS, job(), small, controls(noisy)) is None
    assert kind(LOSS, job(), small) == "settings that shapes do not show"


def test_only_findings_about_numbers_are_touched() -> None:
    others = [Problem("SR-SAMPLE-OMITTED", "samples"), Problem("SR-UPD-LOSS", "fine", Severity.NOTE)]
    assert attribute(others, controls(), job(inputs=(12, 78)), evaluation()) == others

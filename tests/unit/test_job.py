"""What a job must have been before its numbers count, and what its end says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from samerun.core.mesh import Layout
from samerun.core.tolerance import band_from_user
from samerun.errors import Severity
from samerun.verify.evidence.job import Outcome, check_job, check_outcome, describe_status
from samerun.verify.evidence.observed import Observed
from samerun.verify.updates.evaluate import check_evaluation, evaluation_of, logit_deviation, loss_deviation
from support.observations import make_evaluation, make_header, make_job_plan, make_observed

THREE = Layout(dp_shard=3)
HYBRID = Layout(dp_replicate=2, dp_shard=2)


def with_headers(layout: Layout, /, **changes: Any) -> Observed:
    headers = {rank: make_header(rank, layout, **changes) for rank in range(layout.world_size)}
    return replace(make_observed(layout=layout), headers=headers)


def job_codes(observed: Observed | None, layout: Layout = THREE, stage: str = "window") -> list[str]:
    return [problem.code for problem in check_job(observed, make_job_plan(layout, stage))]


@pytest.mark.parametrize("layout", [THREE, HYBRID, Layout(tp=2, dp_shard=2), Layout(dp_replicate=3)])
def test_the_planned_job_is_silent(layout: Layout) -> None:
    assert job_codes(make_observed(layout=layout), layout) == []


def test_no_trace_shows_the_lines_to_add() -> None:
    (found,) = check_job(None, make_job_plan(THREE))
    assert found.code == "SR-JOB-SILENT"
    for word in ("Recorder.from_env()", "recorder.attach", "recorder.loaded", "recorder.record"):
        assert word in found.hint


def test_another_world_size_names_nothing_else() -> None:
    assert job_codes(make_observed(layout=Layout(dp_shard=2))) == ["SR-JOB-WORLD"]


def test_a_missing_rank() -> None:
    whole = make_observed(layout=THREE)
    assert job_codes(replace(whole, headers={0: whole.headers[0], 2: whole.headers[2]})) == ["SR-JOB-RANKS"]


def test_another_stage() -> None:
    assert job_codes(make_observed(layout=THREE), stage="load") == ["SR-JOB-STAGE"]


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": {"dp_shard": 4}},
        {"declared_layout": {"dp_shard": 4}},
        {"layout": {"nonsense": 4}},
        {"coordinate": {"dp_replicate": 1, "dp_shard": 1}},
    ],
)
def test_another_layout_at_the_same_world_size(changes: dict[str, Any]) -> None:
    assert job_codes(with_headers(HYBRID, **changes), HYBRID) == ["SR-JOB-LAYOUT"]


@pytest.mark.parametrize(
    "wrong",
    [{"global_batch": 9}, {"passes": 1}, {"replicas": 4}, {"microbatches": [[2, 2, 2], [2, 2, 1], [0, 0, 1]]}],
)
def test_another_batch(wrong: dict[str, Any]) -> None:
    batch = {**(make_header(0, THREE).batch or {}), **wrong}
    assert job_codes(with_headers(THREE, batch=batch)) == ["SR-JOB-BATCH"]


def test_what_a_failed_job_said_is_not_what_its_launcher_says_last() -> None:
    ranks = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "train.py", line 9',
        "[rank0]: ValueError: no",
    ]
    launcher = ["E1129 18:33 torch/distributed/elastic/agent.py] failed", "Traceback (most recent call last):"]
    outcome = Outcome(returncode=1, seconds=1.0, tail=(*ranks, *launcher, "ChildFailedError:", "====", "rank : 0"))
    (failed,) = check_outcome(outcome, "load", timeout_seconds=60)
    assert failed.message.endswith("it said:\nValueError: no")
    plain = Outcome(returncode=1, seconds=1.0, tail=("--resume: another config", *launcher))
    assert check_outcome(plain, "load", timeout_seconds=60)[0].message.endswith("it said:\n--resume: another config")


def test_a_job_that_does_not_say_what_it_is() -> None:
    assert job_codes(with_headers(THREE, batch=None)) == ["SR-JOB-UNREPORTED"]
    assert job_codes(with_headers(HYBRID, layout=None, declared_layout=None), HYBRID) == ["SR-JOB-UNREPORTED"]


def test_outcomes() -> None:
    def codes(outcome: Outcome) -> list[str]:
        return [problem.code for problem in check_outcome(outcome, "load", timeout_seconds=60)]

    assert codes(Outcome(returncode=0, seconds=1.0)) == []
    assert codes(Outcome(returncode=0, seconds=1.0, leftovers=2)) == ["SR-JOB-LEFTOVER"]
    assert codes(Outcome(returncode=-15, seconds=61.0, timed_out=True)) == ["SR-JOB-TIMEOUT"]
    (failed,) = check_outcome(Outcome(returncode=1, seconds=1.0, tail=("KeyError: 'w'",)), "load", timeout_seconds=60)
    assert failed.code == "SR-JOB-FAILED"
    assert "KeyError: 'w'" in failed.message
    (crashed,) = check_outcome(Outcome(returncode=-6, seconds=1.0), "load", timeout_seconds=60, finished=True)
    assert (crashed.code, crashed.severity) == ("SR-JOB-EXIT", Severity.WARNING)
    late = Outcome(returncode=-15, seconds=61.0, timed_out=True)
    assert check_outcome(late, "load", timeout_seconds=60, finished=True)[0].code == "SR-JOB-TIMEOUT"
    assert describe_status(-9) == "signal 9 (SIGKILL)"


# --- fixed examples ---

BANDS = (
    band_from_user("eval_loss", 12, 1, limit=1e-6, reason="test"),
    band_from_user("eval_logits", 12, 1, limit=1e-6, reason="test"),
)


def evaluation_codes(**changes: Any) -> list[str]:
    return [problem.code for problem in check_evaluation(make_evaluation(), make_evaluation(**changes), BANDS)]


def nudged(amount: float) -> np.ndarray[Any, Any]:
    logits = make_evaluation().logits
    assert logits is not None
    moved = logits.astype(np.float64)
    moved[0, 2] += amount
    return moved


def test_the_same_evaluation_is_silent() -> None:
    assert evaluation_codes() == []
    assert evaluation_codes(losses=(3.0 + 1e-6, 2.5), logits=nudged(2e-6)) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"losses": (3.0 + 1e-5, 2.5)}, "SR-EVAL-LOSS"),
        ({"logits": nudged(1e-5)}, "SR-EVAL-LOGITS"),
        ({"logits": nudged(float("nan"))}, "SR-EVAL-LOGITS"),
        ({"logits": None}, "SR-EVAL-LOGITS"),
        ({"losses": (3.0, float("nan"))}, "SR-EVAL-NONFINITE"),
        ({"losses": (3.0, 2.5, 1.0)}, "SR-EVAL-EXAMPLES"),
        ({"shape": (2, 4)}, "SR-EVAL-EXAMPLES"),
        ({"update": 13}, "SR-EVAL-UPDATE"),
        ({"changed": ("buffer:mean",)}, "SR-EVAL-CHANGED"),
    ],
)
def test_evaluations_that_differ(changes: dict[str, Any], code: str) -> None:
    assert evaluation_codes(**changes) == [code]


def test_logits_are_compared_with_the_largest_and_not_with_themselves() -> None:
    one, other = make_evaluation(), make_evaluation(logits=nudged(4e-6))
    assert logit_deviation(one, other) == pytest.approx(1e-6, rel=1e-3)
    assert logit_deviation(one, other, absolute=True) == pytest.approx(4e-6, rel=1e-3)
    assert loss_deviation(one, make_evaluation(losses=(3.0, 2.75))) == pytest.approx(0.1)


def test_what_a_trace_line_says_changed_is_kept() -> None:
    line = make_observed().evals[0]
    assert evaluation_of(line, None).changed == ()
    assert evaluation_of(replace(line, state_unchanged=False), None).changed == ("state",)
    assert "random number generators" in evaluation_of(replace(line, rng_unchanged=False), None).changed

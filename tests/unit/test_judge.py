"""The verdict as a function of what the stages found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from samerun.errors import Problem, Severity
from samerun.verify.evidence.stage import CONVERT, StageResult, stages_of
from samerun.verify.judge import RULES, Sealed, Verdict, judge, rule_of

SEALED = Sealed(digest="sha256:1", label="continuation", layout={"dp_shard": 3}, batch={"global_batch": 32})
WORST = {"loss": {"used": 0.2, "deviation": 2e-7, "limit": 1e-6, "update": 14}}
MEASURED = {"06-window": {"worst": WORST, "audit": {"bound": 0}, "bound": 0}}


def clean() -> dict[str, StageResult]:
    stages = stages_of(converts=False)[:-1]
    return {name: StageResult(stage=name, status="pass", measured=MEASURED.get(name, {})) for name in stages}


def decide(stage: str, *problems: Problem) -> Verdict:
    results = {name: result for name, result in clean().items() if name <= stage}
    results[stage] = StageResult(stage=stage, status="fail", problems=problems)
    return judge(SEALED, results)


def test_promote_names_what_was_validated() -> None:
    verdict = judge(SEALED, clean())
    body = verdict.to_json()
    assert (body["verdict"], verdict.exit_code) == ("promote", 0)
    assert body["validated"] == {"layout": {"dp_shard": 3}, "batch": {"global_batch": 32}}
    assert body["first_divergence"] is None
    assert {item["name"] for item in body["criteria"]} >= {"state-coverage", "batch", "samples", "numerics"}
    assert all(item["pass"] is True for item in body["criteria"])
    assert next(item for item in body["criteria"] if item["name"] == "numerics.loss")["limit"] == 1e-6
    json.dumps(body)


def test_one_failure_rejects_and_says_where_first() -> None:
    verdict = decide(
        "05-update",
        Problem("SR-UPD-LOSS", "late", where={"update": 13}),
        Problem("SR-SAMPLE-REPLAYED", "cause", where={"update": 13}),
        Problem("SR-UPD-GRADNORM", "later", where={"update": 13}),
    )
    assert (verdict.decision, verdict.exit_code) == ("reject", 1)
    assert verdict.first_divergence is not None
    assert verdict.first_divergence["code"] == "SR-SAMPLE-REPLAYED"
    assert verdict.first_divergence["criterion"] == "samples"
    assert [problem.code for problem in verdict.reasons][1] == "SR-UPD-LOSS"
    assert verdict.validated == {"layout": None, "batch": None}
    criteria = {item.name: item.passed for item in verdict.criteria}
    assert criteria["samples"] is False
    assert criteria["state-coverage"] is True
    assert criteria["boundaries"] is None  # never reached


def test_an_earlier_update_comes_before_an_earlier_kind() -> None:
    verdict = decide(
        "06-window",
        Problem("SR-SAMPLE-REPLAYED", "x", where={"update": 20}),
        Problem("SR-UPD-LOSS", "x", where={"update": 15}),
    )
    assert verdict.first_divergence is not None
    assert verdict.first_divergence["code"] == "SR-UPD-LOSS"


@pytest.mark.parametrize("code", ["SR-CONTROL-NOISY", "SR-JOB-SILENT", "SR-UPD-UNRECORDED", "SR-EVAL-MISSING"])
def test_missing_evidence_abstains(code: str) -> None:
    verdict = decide("02-control", Problem(code, "not seen"))
    assert (verdict.decision, verdict.exit_code) == ("abstain", 4)
    assert verdict.first_divergence is None


def test_a_failure_outweighs_missing_evidence() -> None:
    verdict = decide("05-update", Problem("SR-UPD-UNRECORDED", "x"), Problem("SR-UPD-NONFINITE", "y"))
    assert verdict.decision == "reject"
    assert [problem.code for problem in verdict.reasons] == ["SR-UPD-NONFINITE"]
    assert [problem.code for problem in verdict.remarks] == ["SR-UPD-UNRECORDED"]


def test_samples_shared_by_replicas_come_before_the_size_that_they_make() -> None:
    where = {"update": 13, "stage": "update"}
    size, shared = (
        Problem("SR-UPD-SAMPLES", "too many", where=where),
        Problem("SR-SAMPLE-OVERLAP", "twice", where=where),
    )
    for found, first in (((size, shared), "SR-SAMPLE-OVERLAP"), ((size,), "SR-UPD-SAMPLES")):
        verdict = decide("05-update", *found)
        assert verdict.first_divergence is not None
        assert verdict.first_divergence["code"] == first


def test_what_the_last_state_shows_comes_after_the_updates_but_not_a_changed_setting() -> None:
    late = Problem("SR-UPD-NONFINITE", "in update 15", where={"update": 15})
    for code, first in (("SR-UPD-COUNTER", late.code), ("SR-UPD-SETTING", "SR-UPD-SETTING")):
        verdict = decide("06-window", Problem(code, "at the end", where={"stage": "window"}), late)
        assert verdict.first_divergence is not None
        assert verdict.first_divergence["code"] == first


def test_what_the_evidence_tells_of_the_kind_goes_before_the_code() -> None:
    told = Problem("SR-UPD-LOSS", "the loss", kind="data")
    for problem, kind in ((told, "data"), (replace(told, kind=None), "loss normalisation")):
        verdict = decide("05-update", problem)
        assert verdict.first_divergence is not None
        assert verdict.first_divergence["kind"] == kind
        kept = StageResult(stage="05-update", status="fail", problems=(problem,)).to_json()
        assert StageResult.from_json(kept).problems == (problem,)


def test_what_was_not_run_is_no_pass() -> None:
    results = clean()
    del results["06-window"]
    verdict = judge(SEALED, results)
    assert verdict.decision == "abstain"
    assert [problem.code for problem in verdict.reasons] == ["SR-JUDGE-INCOMPLETE"]
    assert judge(SEALED, {}).decision == "abstain"


def test_a_broken_seal_abstains() -> None:
    verdict = judge(SEALED, clean(), further=[Problem("SR-SEAL-BROKEN", "edited")])
    assert verdict.decision == "abstain"


def test_warnings_and_notes_decide_nothing() -> None:
    results = clean()
    note = Problem("SR-JOB-LEFTOVER", "two", Severity.WARNING)
    results["03-load"] = StageResult(stage="03-load", status="pass", problems=(note,))
    verdict = judge(SEALED, results)
    assert verdict.decision == "promote"
    assert verdict.remarks == (note,)


@pytest.mark.parametrize(
    ("stage", "code", "rule"),
    [
        ("01-inspect", "SR-COV-GAP", "checkpoint"),
        ("03-load", "SR-FILE-CRC", "checkpoint"),
        ("03-load", "SR-FILE-CHANGED", "source-unchanged"),
        ("03-load", "SR-JOB-WROTE", "source-unchanged"),
        ("03-load", "SR-JOB-BATCH", "batch"),
        ("03-load", "SR-JOB-WORLD", "job"),
        ("03-load", "SR-LOAD-MISSING", "state-coverage"),
        ("03-load", "SR-LOAD-PARAM", "state-values"),
        ("03-load", "SR-LOAD-OPT-RESET", "optimizer"),
        ("03-load", "SR-LOAD-REPLICA", "replicas"),
        ("03-load", "SR-LOAD-NONFINITE", "finite"),
        ("03-load", "SR-LOAD-LR", "schedule"),
        ("04-eval", "SR-EVAL-LOGITS", "forward"),
        ("05-update", "SR-UPD-INDEX", "progress"),
        ("06-window", "SR-UPD-LOSS", "numerics"),
        ("05-update", "SR-UPD-GRADIENT", "numerics"),
        ("05-update", "SR-UPD-CLIP", "numerics"),
        ("06-window", "SR-UPD-AVERAGE", "averages"),
        ("06-window", "SR-UPD-BOUNDARY", "boundaries"),
        ("02-control", "SR-CONTROL-NOISY", "control"),
    ],
)
def test_every_finding_has_its_criterion(stage: str, code: str, rule: str) -> None:
    assert rule_of(stage, code) == rule


def test_no_criterion_is_left_out_of_a_verdict() -> None:
    direct = [item.name for item in judge(SEALED, clean()).criteria]
    assert sorted(name for name in direct if "." not in name) == sorted({rule.name for rule in RULES} - {"conversion"})
    converted = [item.name for item in judge(SEALED, clean(), converts=True).criteria]
    assert sorted(name for name in converted if "." not in name) == sorted(rule.name for rule in RULES)


def test_a_conversion_that_is_declared_must_have_passed() -> None:
    verdict = judge(SEALED, clean(), converts=True)
    assert (verdict.decision, verdict.reasons[0].where["stage"]) == ("abstain", CONVERT)
    passed = clean() | {CONVERT: StageResult(stage=CONVERT, status="pass")}
    assert judge(SEALED, passed, converts=True).decision == "promote"
    differs = Problem("SR-CONVERT-DIFFERS", "x", where={"tensor": "param:w"})
    failed = passed | {CONVERT: StageResult(stage=CONVERT, status="fail", problems=(differs,))}
    rejected = judge(SEALED, failed, converts=True)
    assert rejected.decision == "reject"
    assert [item.name for item in rejected.criteria if item.passed is False] == ["conversion"]


def test_a_result_survives_its_file() -> None:
    problem = Problem("SR-UPD-LOSS", "x", where={"update": 3}, hint="y", expected=1.0, found=2.0)
    result = StageResult(stage="05-update", status="fail", problems=(problem,), measured={"a": 1}, seconds=2.0)
    assert StageResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    with pytest.raises(ValueError, match="cannot pass"):
        StageResult(stage="05-update", status="pass", problems=(problem,))
    with pytest.raises(ValueError, match="no stage"):
        StageResult(stage="99-x", status="pass")

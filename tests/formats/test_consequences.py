"""What a missing file takes with it follows from that finding, and nothing else does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from samerun.errors import Problem, Severity
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.consequence import explain_consequences
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from support.corpus import corpus, needs_corpus
from support.dcp import job_state, save

GOLDEN = Path(__file__).parent.parent / "golden"


def inspect(path: Path, *, deep: bool = False) -> InspectReport:
    checkpoint = open_checkpoint(path)
    try:
        return inspect_checkpoint(checkpoint, deep=deep)
    finally:
        checkpoint.close()


def following(report: InspectReport) -> set[str]:
    return {problem.code for problem in report.problems if problem.follows_from}


def test_a_whole_checkpoint_has_no_consequences(tmp_path: Path):
    report = inspect(save(job_state(), tmp_path / "step-3"))
    assert following(report) == set()


def test_objects_lost_with_a_file_follow_from_it(tmp_path: Path):
    folder = save(job_state(), tmp_path / "step-3")
    (folder / "__0_0.distcp").unlink()
    report = inspect(folder)
    assert {"SR-GROUP-LOST", "SR-SCHED-MISSING"} <= following(report)
    assert [p.code for p in report.problems if p.severity is Severity.ERROR] == ["SR-FILE-MISSING"]
    assert not report.complete
    assert report.resumable.verdict == "no"
    lost = next(problem for problem in report.problems if problem.code == "SR-GROUP-LOST")
    assert lost.to_json()["follows_from"] == "SR-FILE-MISSING"


def test_what_was_never_saved_does_not_follow(tmp_path: Path):
    state = job_state()
    del state["scheduler"]
    folder = save(state, tmp_path / "step-3")
    report = inspect(folder)
    assert "SR-SCHED-MISSING" in {problem.code for problem in report.problems}
    assert following(report) == set()


def test_a_missing_generator_file_explains_streams_only():
    cause = Problem("SR-FILE-MISSING", "gone", where={"file": "/x/random_states_0.pkl"})
    others = [Problem("SR-RNG-RANKS", "one of two"), Problem("SR-SCHED-MISSING", "none")]
    explained = explain_consequences([cause, *others])
    assert [problem.follows_from for problem in explained] == [None, "SR-FILE-MISSING", None]


def test_gaps_stay_errors():
    cause = Problem("SR-FILE-TRUNCATED", "cut", where={"file": "/x/rank_0.pt"})
    gap = explain_consequences([cause, Problem("SR-COV-GAP", "values")])[1]
    assert (gap.follows_from, gap.severity) == ("SR-FILE-TRUNCATED", Severity.ERROR)


@pytest.mark.parametrize("name", ["z2_align_rr", "z3_sub_bf16"])
def test_moments_of_which_a_part_is_missing_are_not_called_zero(name: str, tmp_path: Path):
    folder = tmp_path / name
    shutil.copytree(GOLDEN / "deepspeed" / name, folder)
    before = {problem.code for problem in inspect(folder, deep=True).problems}
    next(iter(sorted(folder.rglob("*_pp_rank_0_mp_rank_00_optim_states.pt")))).unlink()
    after = {problem.code for problem in inspect(folder, deep=True).problems}
    assert "SR-FILE-MISSING" in after
    assert "SR-VAL-ZERO" not in after - before


@needs_corpus
def test_the_only_rank_file_left_is_not_called_swapped(tmp_path: Path):
    source = corpus("torch/fsdp1_ws2_orig/sharded_torchsave")
    for file in source.glob("rank1*.pt"):
        shutil.copy(file, tmp_path / file.name)
    found = {problem.code for problem in inspect(tmp_path).problems}
    assert "SR-FILE-MISSING" in found
    assert "SR-RANK-SWAPPED" not in found

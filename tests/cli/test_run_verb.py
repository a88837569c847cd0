"""What a person reads while a run goes on, and what the verdict looks like."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from samerun.cli.judge import SHOWN_PER_CODE, print_verdict
from samerun.cli.run import HEARTBEAT_SECONDS, TerminalProgress
from samerun.core.tolerance import band_from_controls, bands_to_json
from samerun.errors import Problem
from samerun.verify.evidence.stage import StageResult, stages_of
from samerun.verify.judge import Sealed, judge

BATCH = {"global_batch": 32, "option": "ragged", "passes": 6, "invariant": "samples-per-update"}
SEALED = Sealed(digest="sha256:1", label="continuation", layout={"dp_shard": 3}, batch=BATCH)


def follow(*, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    out = io.StringIO()
    progress = TerminalProgress(Console(file=out, width=100, force_terminal=terminal, color_system=None))
    progress.stage_kept(StageResult(stage="01-inspect", status="pass", started="2026-01-01T00:00:00+00:00"))
    progress.stage_begins("03-load", "load and compare", "1 job, about 30 s judging by the control")
    progress.job_begins("load: 3 processes", "torchrun train.py [odd] --resume x", 600.0)
    progress.job_line("loading [shard 1]")
    clock = iter([HEARTBEAT_SECONDS * 2] * 9)
    monkeypatch.setattr("samerun.cli.run.time.monotonic", lambda: progress._last_beat + next(clock))
    progress.job_tick(31.0)
    progress.job_ends(32.0, "exit status 0")
    problems = tuple(Problem("SR-LOAD-PARAM", f"tensor {number} differs") for number in range(40))
    progress.stage_ends(StageResult(stage="03-load", status="fail", problems=problems, seconds=33.0))
    band = band_from_controls("loss", 13, [[0.0, 0.0]], factor=10, floor=1e-6)
    progress.sealed("sha256:abc", bands_to_json([band], ["noisy.bias"]))
    progress.note([Problem("SR-RUN-LEFTOVER", "two processes")])
    progress.close()
    return out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_can_be_followed(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = follow(terminal=terminal, monkeypatch=monkeypatch)
    for expected in (
        "1/7 inspect  passed earlier",
        "3/7 load     load and compare",
        "1 job, about 30 s judging by the control",
        "$ torchrun train.py [odd] --resume x",
        "loading [shard 1]",
        "ended after 32.0 s with exit status 0",
        "fail, 33.0 s",
        f"and {40 - SHOWN_PER_CODE} more of SR-LOAD-PARAM, all in stages/03-load/result.json",
        "loss             within 1e-06  (from precision)",
        "noise in the controls already: noisy.bias",
        "SR-RUN-LEFTOVER",
    ):
        assert expected in said, expected
    assert said.count("SR-LOAD-PARAM  ") == SHOWN_PER_CODE


def test_verdicts_end_with_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    clean = {name: StageResult(stage=name, status="pass") for name in stages_of(converts=False)[:-1]}
    print_verdict(judge(SEALED, clean).to_json(), Path("move.run"))
    assert "PROMOTE  continuation on dp_shard=3, 32 samples per update (ragged, 6 passes)" in capsys.readouterr().out
    failed = {
        **clean,
        "05-update": StageResult(stage="05-update", status="fail", problems=(Problem("SR-UPD-LR", "x"),)),
    }
    print_verdict(judge(SEALED, failed).to_json(), Path("move.run"))
    said = capsys.readouterr().out
    assert "REJECT  first divergence: schedule at 05-update (SR-UPD-LR)" in said
    assert said.index("SR-UPD-LR") < said.index("REJECT")
    del clean["06-window"]
    print_verdict(judge(SEALED, clean).to_json(), Path("move.run"))
    assert "ABSTAIN  the evidence does not suffice" in capsys.readouterr().out

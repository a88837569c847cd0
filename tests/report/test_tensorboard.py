"""The curves of a run directory, read back by TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samerun.errors import UsageError
from samerun.report.model import read_run
from samerun.report.tensorboard import curves_of, write_events
from support.runs import unpack_run


def samerun(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samerun", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns (step, value) of every series of one run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.framework
def test_every_job_is_a_run_with_the_numbers_that_it_recorded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    root = unpack_run("promote", tmp_path)
    done = samerun("report", root, "--tensorboard", tmp_path / "curves")
    assert done.returncode == 0, done.stderr
    curves = curves_of(read_run(root))
    assert {name.partition("-")[0] for name in curves} == {"control", "candidate"}
    assert done.stdout.split() == [str(tmp_path / "curves" / name) for name in curves]
    assert (
        not (root / "report.html").exists()
        or (root / "report.html").stat().st_mtime < (tmp_path / "curves").stat().st_mtime
    )
    for name, updates in curves.items():
        shown = read(tmp_path / "curves" / name)
        assert {"loss", "grad_norm", "update_norm", "learning_rate/0", "samples"} <= set(shown)
        assert [step for step, _ in shown["loss"]] == [item.update for item in updates]
        assert [value for _, value in shown["loss"]] == pytest.approx([item.loss for item in updates], rel=1e-6)
        assert [value for _, value in shown["samples"]] == [item.samples for item in updates]


@pytest.mark.framework
def test_a_ledger_is_a_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trace = unpack_run("promote", tmp_path) / "stages" / "06-window" / "trace"
    done = samerun("trace", trace, "--tensorboard", tmp_path / "curves")
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "curves" / "trace")["loss"]) > 1


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    root = unpack_run("promote", tmp_path)
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves" / "mine").write_text("kept")
    done = samerun("report", root, "--tensorboard", tmp_path / "curves")
    assert done.returncode == 2
    assert "SR-REPORT-EVENTS" in done.stderr
    assert [path.name for path in (tmp_path / "curves").iterdir()] == ["mine"]


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samerun.report.tensorboard.find_spec", lambda name: None)
    with pytest.raises(UsageError) as refused:
        write_events({}, tmp_path / "no" / "curves", began=0.0)
    assert [problem.code for problem in refused.value.problems] == ["SR-REPORT-EVENTS"] * 3

"""The curves of a run directory, read back by each tool's own reader."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samerun.errors import UsageError
from samerun.report.curves import TOOLS, curves_of, series, write_curves
from samerun.report.model import read_run
from support.runs import unpack_run

Shown = dict[str, list[tuple[int, float]]]
"""(step, value) of every series of one run."""


def samerun(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samerun", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def read_tensorboard(place: Path) -> Shown:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(place))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def read_mlflow(place: Path) -> Shown:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=place.parents[1].as_uri())
    run = client.get_run(place.name)
    assert run.info.status == "FINISHED"
    return {
        tag: [(metric.step, metric.value) for metric in client.get_metric_history(place.name, tag)]
        for tag in run.data.metrics
    }


def read_wandb(place: Path) -> Shown:
    """Reads what `wandb sync` would send: records of W&B's own messages in a log file as LevelDB has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = place.glob("wandb/offline-run-*/run-*.wandb")
    shown: Shown = {}
    for packed in logged(file.read_bytes()):
        record = Record()
        record.ParseFromString(packed)
        if record.WhichOneof("record_type") == "run":
            assert record.run.display_name == place.name
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): float(item.value_json) for item in record.history.item}
            for tag in values:
                if not tag.startswith("_"):
                    shown.setdefault(tag, []).append((int(values["_step"]), values[tag]))
    return shown


def logged(data: bytes) -> Iterator[bytes]:
    """Yields the records of a file in blocks of 32 KiB, after a header of 7 bytes."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


READERS: dict[str, Any] = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip(request.param)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # as anybody needs who looks at one
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return request.param


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")  # the tools' own
def test_every_job_is_a_run_with_the_numbers_that_it_recorded(tool: str, tmp_path: Path) -> None:
    root = unpack_run("promote", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    done = samerun("report", root, f"--{tool}", tmp_path / "curves")
    assert done.returncode == 0, done.stderr
    curves = curves_of(read_run(root))
    assert {name.partition("-")[0] for name in curves} == {"control", "candidate"}
    places = [Path(line) for line in done.stdout.split()]
    assert [place.is_relative_to(tmp_path / "curves") for place in places] == [True] * len(curves)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    for place, updates in zip(places, curves.values(), strict=True):
        wanted: Shown = {}
        for item in updates:
            for tag, value in series(item):
                wanted.setdefault(tag, []).append((item.update, value))
        assert {"loss", "grad_norm", "update_norm", "learning_rate/0", "samples"} <= set(wanted)
        shown = READERS[tool](place)
        assert shown.keys() == wanted.keys()
        exact = {} if tool == "tensorboard" else {"rel": 1e-15}  # its events hold 32-bit numbers
        for tag, points in wanted.items():
            assert [step for step, _ in shown[tag]] == [step for step, _ in points]
            assert [value for _, value in shown[tag]] == pytest.approx([value for _, value in points], **exact)


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
def test_a_ledger_is_a_run(tool: str, tmp_path: Path) -> None:
    trace = unpack_run("promote", tmp_path) / "stages" / "06-window" / "trace"
    done = samerun("trace", trace, f"--{tool}", tmp_path / "curves")
    assert done.returncode == 0, done.stderr
    place = next((tmp_path / "curves").glob("[1-9]*/*/meta.yaml")).parent if tool == "mlflow" else None
    assert len(READERS[tool](place or tmp_path / "curves" / "trace")["loss"]) > 1


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_there_already_stays(tool: str, tmp_path: Path) -> None:
    root = unpack_run("promote", tmp_path)
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves" / "mine").write_text("kept")
    done = samerun("report", root, f"--{tool}", tmp_path / "curves")
    assert done.returncode == 2
    assert "SR-REPORT-EVENTS" in done.stderr
    assert [path.name for path in (tmp_path / "curves").iterdir()] == ["mine"]
    assert sorted(os.listdir(tmp_path)) == ["curves", root.name]


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samerun.report.curves.find_spec", lambda name: None)
    with pytest.raises(UsageError) as refused:
        write_curves({}, tmp_path / "no" / "curves", to="wandb", began=0.0)
    assert [problem.code for problem in refused.value.problems] == ["SR-REPORT-EVENTS"] * 3
    assert "samerun[wandb]" in str(refused.value)


def test_one_tool_at_a_time(tmp_path: Path) -> None:
    done = samerun("report", tmp_path, "--wandb", tmp_path / "a", "--mlflow", tmp_path / "b")
    assert done.returncode == 2
    assert "--wandb and --mlflow: one at a time" in done.stderr

"""`inspect --against`: what should have moved since an earlier checkpoint of the run and did not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.crc import combine_crc32
from samerun.errors import Severity
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from samerun.verify.state.against import Against
from samerun.verify.state.fingerprint import fingerprint_tensor
from support.corpus import corpus, needs_corpus
from support.dcp import job_state, save, split_tensor


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_combine(first: bytes, second: bytes):
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def inspect(path: Path, previous: Path, *, deep: bool = False) -> InspectReport:
    return inspect_checkpoint(open_checkpoint(path), deep=deep, previous=open_checkpoint(previous))


def against(report: InspectReport) -> Against:
    assert report.against is not None
    return report.against


def codes(report: InspectReport) -> set[str]:
    return {problem.code for problem in report.problems if problem.code.startswith("SR-AGAINST")}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("saves")
    return {updates: save(job_state(updates), folder / f"step-{updates}") for updates in (3, 5)}


@pytest.mark.parametrize("deep", [False, True])
def test_a_run_that_went_on_is_clean(saves: dict[int, Path], deep: bool):
    report = inspect(saves[5], saves[3], deep=deep)
    assert codes(report) == set()
    found = against(report)
    assert found.update == (3, 5)
    assert found.moved == 24
    assert found.unchanged == ()


def test_the_cut_does_not_matter_to_a_fingerprint(saves: dict[int, Path], tmp_path: Path):
    folder = tmp_path / "step-5"
    shutil.copytree(saves[5], folder)
    split_tensor(folder, "model.0.weight", 3)
    a, b = open_checkpoint(saves[5]), open_checkpoint(folder)
    assert len(b.state.tensors["param:0.weight"].tiling) == 3
    mark = fingerprint_tensor(a, "param:0.weight")
    assert mark == fingerprint_tensor(b, "param:0.weight")
    assert mark == f"crc32:{zlib.crc32(a.read('param:0.weight').tobytes()):08x}"


@pytest.mark.parametrize("deep", [False, True])
def test_parameters_written_again_are_stuck(saves: dict[int, Path], tmp_path: Path, deep: bool):
    state, old = job_state(5), job_state(3)
    state["model"] = old["model"]
    report = inspect(save(state, tmp_path / "step-5"), saves[3], deep=deep)
    problem = next(problem for problem in report.problems if problem.code == "SR-AGAINST-STUCK")
    assert "tensors of param " in problem.message
    assert problem.severity is Severity.ERROR
    assert set(against(report).unchanged) == {key for key in report.state.tensors if key.startswith("param:")}


def test_one_old_layer_is_named(saves: dict[int, Path], tmp_path: Path):
    state, old = job_state(5), job_state(3)
    state["model"]["0.weight"] = old["model"]["0.weight"]
    report = inspect(save(state, tmp_path / "step-5"), saves[3])
    assert codes(report) == {"SR-AGAINST-PARTLY"}
    assert against(report).unchanged == ("param:0.weight",)


def test_frozen_and_never_used_parameters_need_not_move(saves: dict[int, Path], tmp_path: Path):
    paths: list[Path] = []
    for updates in (3, 5):
        state = job_state(updates)
        state["model"]["frozen"] = torch.arange(100.0)
        state["model"]["unused"] = torch.arange(90.0)
        state["optim"]["state"]["unused"] = {
            "step": torch.tensor(float(updates)),
            "exp_avg": torch.zeros(90),
            "exp_avg_sq": torch.zeros(90),
        }
        state["optim"]["param_groups"][1]["params"].append("unused")
        paths.append(save(state, tmp_path / f"step-{updates}"))
    report = inspect(paths[1], paths[0])
    assert codes(report) == set()
    assert {"buffer:frozen", "param:unused", "optim.exp_avg:unused"} <= set(against(report).still)


def test_backwards_missing_new_and_reshaped(saves: dict[int, Path], tmp_path: Path):
    report = inspect(saves[3], saves[5])
    assert codes(report) == {"SR-AGAINST-BACKWARDS"}
    assert codes(inspect(saves[3], saves[3])) == {"SR-AGAINST-SAME"}
    state = job_state(5)
    del state["model"]["1.weight"]
    state["model"]["extra"] = torch.ones(3)
    state["model"]["2.weight"] = state["model"]["2.weight"].to(torch.bfloat16)
    changed = inspect(save(state, tmp_path / "step-5"), saves[3])
    assert codes(changed) == {"SR-AGAINST-MISSING", "SR-AGAINST-NEW", "SR-AGAINST-SHAPE"}


def test_a_changed_weight_decay_is_named(saves: dict[int, Path], tmp_path: Path):
    state = job_state(5)
    state["optim"]["param_groups"][0]["weight_decay"] = 0.0
    report = inspect(save(state, tmp_path / "step-5"), saves[3])
    problem = next(problem for problem in report.problems if problem.code == "SR-AGAINST-GROUPS")
    assert (problem.where["key"], problem.expected, problem.found) == ("weight_decay", "0.1", "0.0")


def test_without_checksums_only_reading_decides(tmp_path: Path):
    paths: list[Path] = []
    for updates in (3, 5):
        state = job_state(updates)
        paths.append(tmp_path / f"step-{updates}.pt")
        torch.save(
            {"model": state["model"], "optimizer": state["optim"], "progress": state["progress"]},
            paths[-1],
            _use_new_zipfile_serialization=False,
        )
    # two weights of 54 and 45 elements are read as small ones; nothing here is larger
    assert "SR-AGAINST-OPEN" not in codes(inspect(paths[1], paths[0]))
    big = {"model": {"w.weight": torch.arange(200.0)}, "progress": {"update": 1}}
    torch.save(big, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert "SR-AGAINST-OPEN" in codes(inspect(tmp_path / "a.pt", tmp_path / "a.pt"))
    assert "SR-AGAINST-OPEN" not in codes(inspect(tmp_path / "a.pt", tmp_path / "a.pt", deep=True))


def test_the_document_and_the_text_say_how(saves: dict[int, Path]):
    def run(*more: str) -> str:
        line = [sys.executable, "-m", "samerun", "inspect", str(saves[5]), "--against", str(saves[3]), *more]
        return subprocess.run(line, capture_output=True, text=True, timeout=120).stdout

    document: dict[str, Any] = json.loads(run("--json"))["against"]
    assert document["update"] == [3, 5]
    assert document["unchanged"] == []
    assert sum(document["compared_by"].values()) == 24
    assert "tensors moved" in run()


@needs_corpus
@pytest.mark.parametrize("world", [2, 3, 4])
def test_saves_of_other_world_sizes_are_compared_without_reading(world: int):
    """The corpus holds the same run at several world sizes: same update, so nothing has to have moved."""
    report = inspect(corpus(f"torch/dcp_fsdp2_ws{world}"), corpus("torch/dcp_single"))
    found = against(report)
    assert codes(report) <= {"SR-AGAINST-SAME", "SR-AGAINST-OPEN", "SR-AGAINST-GROUPS"}
    assert found.by["crc32"] > 40

"""Digests that real gloo ranks write when they save: they prove a checkpoint intact, and name a file left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from samerun.core.mesh import Layout
from samerun.formats.detect import open_checkpoint
from samerun.train import write_digests
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from support import toy
from support.gloo import run_ranks

pytestmark = pytest.mark.multiprocess
LAYOUTS = {"fsdp3": Layout(dp_shard=3), "hsdp": Layout(dp_replicate=2, dp_shard=2), "ddp2": Layout(dp_replicate=2)}


def write(rank: int, world_size: int, layout: Layout, top: Path, updates: tuple[int, ...]) -> Any:
    job = toy.build(layout)
    done = 0
    for update in updates:
        toy.train(job, update - done)
        done = update
        toy.save(job, top / f"step-{update}")
        write_digests(top / f"step-{update}", job.model, job.optimizer, update=update)


@pytest.fixture(scope="module", params=list(LAYOUTS))
def top(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    layout = LAYOUTS[request.param]
    run_ranks(layout.world_size, write, layout, folder, (2, 4))
    return folder


def deep(path: Path) -> InspectReport:
    return inspect_checkpoint(open_checkpoint(path), deep=True)


def codes(report: InspectReport) -> set[str]:
    return {problem.code for problem in report.problems if "SIDECAR" in problem.code or "GENERATION" in problem.code}


def test_a_whole_save_is_intact(top: Path):
    for update in (2, 4):
        report = deep(top / f"step-{update}")
        assert report.intact is True
        assert codes(report) == set()


def test_one_file_of_an_older_save_is_named(top: Path, tmp_path: Path):
    mixed = tmp_path / "step-4"
    shutil.copytree(top / "step-4", mixed)
    for old in sorted((top / "step-2").glob("*.distcp")):
        shutil.copy(old, mixed / old.name)
        report = deep(mixed)
        assert report.intact is False
        assert "SR-SIDECAR-VALUE" in codes(report)
        named = {problem.where["file"] for problem in report.problems if problem.code == "SR-SIDECAR-FILE"}
        assert named == {str(mixed / old.name)}
        shutil.copy(top / "step-4" / old.name, mixed / old.name)


def test_digests_of_an_older_save_decide_nothing(top: Path, tmp_path: Path):
    shutil.copytree(top / "step-4", tmp_path / "step-4")
    shutil.copy(top / "step-2" / "samerun-digests.json", tmp_path / "step-4")
    report = deep(tmp_path / "step-4")
    assert report.intact is not False
    assert codes(report) - {"SR-FILE-GENERATION-OPEN"} == {"SR-SIDECAR-STALE"}


def test_edited_digests(top: Path, tmp_path: Path):
    shutil.copytree(top / "step-4", tmp_path / "step-4")
    sidecar = tmp_path / "step-4" / "samerun-digests.json"
    body = json.loads(sidecar.read_text())
    key = next(iter(body["tensors"]))
    changed = {**body, "tensors": {**body["tensors"], f"{key}.lost": body["tensors"][key]}}
    sidecar.write_text(json.dumps(changed))
    assert codes(deep(tmp_path / "step-4")) >= {"SR-SIDECAR-MISSING"}
    counter = next(iter(body["counters"]))
    sidecar.write_text(json.dumps({**body, "counters": {counter: 9.0}}))
    assert codes(deep(tmp_path / "step-4")) >= {"SR-SIDECAR-COUNTER"}
    for text in ("{", "[]", json.dumps({**body, "tensors": {"nothing": 1}}), json.dumps({**body, "schema": "x"})):
        sidecar.write_text(text)
        assert codes(deep(tmp_path / "step-4")) >= {"SR-SIDECAR-BROKEN"}


def test_tensors_without_elements_are_told_apart_in_a_job_too(tmp_path: Path):
    """Every rank holds nothing of such a tensor, so the job's sum is zero; its digest is the file's all the same."""
    import torch

    model = torch.nn.Linear(3, 2)
    for name, shape in (("wide", (0, 5)), ("long", (5, 0))):
        model.register_buffer(name, torch.empty(shape))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "a.pt")
    path = write_digests(tmp_path / "a.pt", model, optimizer, update=1)
    assert path is not None
    listed = json.loads(Path(path).read_text())["tensors"]
    assert listed["buffer:wide"]["digest"] != listed["buffer:long"]["digest"]
    report = inspect_checkpoint(open_checkpoint(tmp_path / "a.pt"), deep=True)
    assert report.intact is True
    assert report.digests is not None
    assert report.digests["buffer:wide"] == listed["buffer:wide"]["digest"]

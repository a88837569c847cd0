"""A training script that shares nothing with the first (DDP, SGD, another model, other flags) is moved 2 -> 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samerun.demo.answers import fill_in
from support.warm_ranks import WARM_PATH, warm_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "ddp" / "train.py"
HASTY = f"""
from torch.optim import lr_scheduler

class Twice(lr_scheduler.CosineAnnealingLR):
    def step(self, *rest):
        super().step(*rest)
        if self.last_epoch > 10:
            super().step(*rest)

lr_scheduler.CosineAnnealingLR = Twice
import runpy
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
"""The same script after an edit: it steps its schedule twice per update."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{WARM_PATH}"}


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has torch imported."""
    with warm_launches():
        yield


def shell(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=600
    )


def samerun(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return shell(sys.executable, "-m", "samerun", *words, cwd=cwd)


def test_an_unrelated_ddp_script_is_moved_from_two_ranks_to_three(tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    trained = shell(*launch, "2", str(SCRIPT), "--steps", "10", "--out", "saved", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr[-3000:]
    inspected = samerun("inspect", "saved/10", "--json", cwd=tmp_path)
    assert inspected.returncode == 0, inspected.stdout
    report = json.loads(inspected.stdout)
    assert report["complete"] is True
    assert report["progress"]["update"] == 10
    drafted = samerun(
        "draft", "saved/10", "--from", "dp_replicate=2", "--to", "dp_replicate=3", "-o", "move.yaml", cwd=tmp_path
    )
    assert drafted.returncode == 0, drafted.stderr
    undecided = samerun("plan", "move.yaml", cwd=tmp_path)
    assert undecided.returncode == 1
    assert "SR-PLAN-ASK" in undecided.stdout + undecided.stderr
    command = "{python} -m torch.distributed.run --standalone --nproc-per-node {world_size} "
    command += f"{SCRIPT} --from {{checkpoint}} --batch {{global_batch}} --at-once {{max_microbatch}}"
    answers = {
        "run.model_commit": "second",
        "run.precision": "float32",
        "progress.samples": 400,
        "progress.tokens": None,
        "progress.epoch": 0,
        "batch.invariant": "samples-per-update",
        "batch.global_batch": 40,
        "batch.max_microbatch": 8,
        "batch.option": "ragged",
        "transition.label": "continuation",
        "control.kind": "original-layout",
        "control.vary_microbatch": 5,
        "window.updates": 10,
        "window.log_every": 5,
        "window.eval_every": 10,
        "launch.command": command,
        "launch.environment": ENVIRONMENT,
    }
    fill_in(tmp_path / "move.yaml", answers)
    planned = samerun("plan", "move.yaml", cwd=tmp_path)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    ran = samerun("run", "move.yaml", "--dir", "move", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    verdict = json.loads((tmp_path / "move" / "verdict.json").read_text())
    assert verdict["verdict"] == "promote"
    assert verdict["validated"]["layout"]["dp_replicate"] == 3

    rates = json.loads(samerun("plan", "move.yaml", "--json", cwd=tmp_path).stdout)["next_rates"]
    assert rates["schedule"] == "CosineAnnealingLR"
    used = [line for line in map(json.loads, last_trace(tmp_path / "move")) if line["kind"] == "update"]
    assert [line["lr"] for line in used] == [pytest.approx(rate) for rate in rates["rates"][:10]]

    # The edit is in the script of control and candidate alike: they agree, and neither is the run that was saved.
    (tmp_path / "hasty.py").write_text(HASTY)
    text = (tmp_path / "move.yaml").read_text()
    (tmp_path / "edited.yaml").write_text(text.replace(str(SCRIPT), "hasty.py"))
    edited = samerun("run", "edited.yaml", "--dir", "edited", cwd=tmp_path)
    assert edited.returncode == 1, edited.stdout[-4000:] + edited.stderr[-4000:]
    verdict = json.loads((tmp_path / "edited" / "verdict.json").read_text())
    assert verdict["first_divergence"]["stage"] == "02-control"
    assert verdict["first_divergence"]["code"] == "SR-SCHEDULE-RATE"
    assert verdict["first_divergence"]["where"]["update"] == 12


def last_trace(rundir: Path) -> list[str]:
    return (rundir / "stages" / "06-window" / "trace" / "rank-00000.jsonl").read_text().splitlines()

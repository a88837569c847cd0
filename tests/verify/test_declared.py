"""What a configuration declares and the checkpoint lacks; schedules whose horizon is another one than recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from support.corpus import corpus, needs_corpus

TRAINER = Path(__file__).parent.parent / "golden" / "statedict" / "trainer" / "checkpoint-4"
SCALER = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3}


def inspect(path: Path, previous: Path | None = None) -> InspectReport:
    return inspect_checkpoint(open_checkpoint(path), previous=open_checkpoint(previous) if previous else None)


def codes(report: InspectReport) -> set[str]:
    return {problem.code for problem in report.problems}


def save(path: Path, **more: Any) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": schedule.state_dict()}
    torch.save({**state, "global_step": 2, **more}, path)
    return path


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"args": {"fp16": True}}, True),
        ({"config": {"mixed_precision": "fp16"}}, True),
        ({"hyper_parameters": {"precision": "16-mixed"}}, True),
        ({"args": {"fp16": False}}, False),
        ({"config": {"mixed_precision": "bf16", "precision": "bf16-mixed", "fp16_full_eval": True}}, False),
        ({}, False),
    ],
)
def test_a_scaler_is_missed_where_fp16_says_it_is_needed(settings: dict[str, Any], needed: bool, tmp_path: Path):
    assert ("SR-SCALER-MISSING" in codes(inspect(save(tmp_path / "a.pt", **settings)))) is needed
    for name in ("scaler", "grad_scaler", "MixedPrecision"):
        report = inspect(save(tmp_path / f"{name}.pt", **settings, **{name: SCALER}))
        assert "SR-SCALER-MISSING" not in codes(report)
        assert "scaler" in report.resumable.have


def test_the_horizon_of_a_trainer_run_is_checked_by_formula(tmp_path: Path):
    assert "SR-SCHED-HORIZON" not in codes(inspect(TRAINER))
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-4")
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "max_steps": 9}))
    report = inspect(folder)
    assert "SR-SCHED-HORIZON" in codes(report)
    problem = next(problem for problem in report.problems if problem.code == "SR-SCHED-HORIZON")
    assert problem.found == [0.0, 0.0]
    assert problem.expected == pytest.approx([6.913417161825449e-4] * 2)  # half a cosine, 3 of 8 steps after warm-up


@needs_corpus
def test_real_trainer_runs_follow_their_horizon():
    assert "SR-SCHED-HORIZON" not in codes(inspect(corpus("torch/hf_trainer_ws2/checkpoint-5")))


def test_another_schedule_than_before_is_named(tmp_path: Path):
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-4")
    assert "SR-AGAINST-SCHEDULE" not in codes(inspect(folder, TRAINER))
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "max_steps": 9}))
    assert "SR-AGAINST-SCHEDULE" in codes(inspect(folder, TRAINER))


def test_schedules_of_torch_are_compared_without_what_moves(tmp_path: Path):
    def step(total: int, updates: int) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - 2)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[2])
        for _ in range(updates):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            schedule.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
        path = tmp_path / f"{total}-{updates}.pt"
        torch.save({**state, "global_step": updates}, path)
        return path

    first = step(20, 3)
    assert "SR-AGAINST-SCHEDULE" not in codes(inspect(step(20, 6), first))
    report = inspect(step(25, 6), first)
    problem = next(problem for problem in report.problems if problem.code == "SR-AGAINST-SCHEDULE")
    assert "T_max: 18 -> 23" in problem.message

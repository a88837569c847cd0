"""Several schedulers saved as a list by torch itself: each is read, judged, compared, and written as a list again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.core.schedule import position_of, schedulers_of
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from samerun.verify.state.compare import compare_settings
from support.zero import codes

UPDATES = 4


def saved(*, second: float = 0.9, more: int = 0) -> dict[str, Any]:
    """What a script saves that chains two schedulers; the second is stepped `more` times more often."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    chained = [
        torch.optim.lr_scheduler.StepLR(optimizer, 3),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, second),
    ]
    for _ in range(UPDATES):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        for scheduler in chained:
            scheduler.step()
    for _ in range(more):
        chained[1].step()
    named = get_optimizer_state_dict(model, optimizer)
    parts = {"model": model.state_dict(), "optimizer": named, "step": UPDATES}
    return parts | {"schedulers": [scheduler.state_dict() for scheduler in chained]}


def written(folder: Path, to: str, state: dict[str, Any]) -> Path:
    if to == "torch":
        torch.save(state, folder / "run.pt")
        return folder / "run.pt"
    dcp.save(state, checkpoint_id=folder / "run", no_dist=True)
    return folder / "run"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_every_scheduler_of_a_list_is_read(form: str, tmp_path: Path) -> None:
    kept = saved()
    checkpoint = open_checkpoint(written(tmp_path, form, kept))
    parts = schedulers_of(checkpoint.state.scheduler)
    assert [dict(part) for part in parts] == kept["schedulers"]
    assert list(checkpoint.state.scheduler or ()) == ["0", "1"]
    assert position_of(checkpoint.state.scheduler) == UPDATES
    report = inspect_checkpoint(checkpoint)
    assert not [code for code in codes(report.problems) if code.startswith("SR-SCHED")]  # the second one set the rate


@pytest.mark.filterwarnings("ignore")
def test_each_of_them_is_judged(tmp_path: Path) -> None:
    report = inspect_checkpoint(open_checkpoint(written(tmp_path, "torch", saved(more=2))))
    (found,) = [problem for problem in report.problems if problem.code == "SR-SCHED-POSITION"]
    assert (found.expected, found.found) == (UPDATES, UPDATES + 2)
    kept = saved()
    kept["schedulers"][1]["_last_lr"] = [0.5]
    (tmp_path / "run.pt").unlink()
    report = inspect_checkpoint(open_checkpoint(written(tmp_path, "torch", kept)))
    assert "SR-SCHED-LR" in codes(report.problems)


@pytest.mark.filterwarnings("ignore")
def test_a_difference_in_the_second_one_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = open_checkpoint(written(tmp_path / "a", "torch", saved()))
    other = open_checkpoint(written(tmp_path / "b", "torch", saved(second=0.8)))
    assert compare_settings(first.state, first.state) == []
    assert "scheduler.1.gamma" in [item.key for item in compare_settings(first.state, other.state)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize("between", ["torch", "dcp", "safetensors"])
def test_they_are_a_list_again_where_a_script_loads_them(form: str, between: str, tmp_path: Path) -> None:
    kept = saved()
    source, there, back = written(tmp_path, form, kept), tmp_path / "there", tmp_path / "back.pt"
    for here, dest, to in ((source, there, between), (there, back, "torch")):
        checkpoint = open_checkpoint(here)
        carry_out(prepare(checkpoint, dest, to=to))
        checkpoint.close()
    found = torch.load(back)["lr_scheduler"]  # where the torch writer puts what is a scheduler
    assert found == kept["schedulers"]
    optimizer = torch.optim.AdamW(nn.Linear(3, 5).parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1).load_state_dict(found[1])

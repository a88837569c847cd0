"""What optimizers other than Adam and schedules of several parts keep, carried so that torch goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from samerun.convert.convert import carry_out
from samerun.convert.prepare import Prepared, prepare
from samerun.core.mesh import Layout
from samerun.errors import Severity, UndecidedError
from samerun.execute.engine import Settings
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint

State = dict[str, Any]
Build = Callable[[torch.optim.Optimizer], LRScheduler]

SCHEDULES: dict[str, Build] = {
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 4, 6]),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "in sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.MultiStepLR(o, [2, 5])], [2]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, total_iters=2), schedules.MultiStepLR(o, [4])], o
    ),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, updates: int, schedule: LRScheduler | None = None) -> None:
    batch = torch.linspace(-1, 1, 24).reshape(4, 6)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = net(batch).pow(2).sum()
        value.backward()
        return value

    for _ in range(updates):
        optimizer.step(loss)  # type: ignore[arg-type]
        if schedule is not None:
            schedule.step()


def saved(net: nn.Module, optimizer: torch.optim.Optimizer, **rest: Any) -> State:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, **rest}


def ready(source: Path, dest: Path, to: str, layout: Layout | None = None, allow: set[str] | None = None) -> Prepared:
    return prepare(open_checkpoint(source), dest, to=to, layout=layout, allow=allow or set())


def convert(source: Path, dest: Path, to: str, layout: Layout | None = None, allow: set[str] | None = None) -> Path:
    carry_out(ready(source, dest, to, layout, allow), settings=Settings(threads=1))
    return dest


def load(file: Path) -> State:
    return torch.load(file, weights_only=True)


def severities(file: Path) -> dict[str, Severity]:
    return {problem.code: problem.severity for problem in inspect_checkpoint(open_checkpoint(file)).problems}


@pytest.mark.parametrize("build", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_goes_on_as_before_from_a_file_that_was_a_dcp_directory_in_between(
    build: Build, tmp_path: Path
) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = build(optimizer)
    train(net, optimizer, 3, schedule)
    torch.save(saved(net, optimizer, lr_scheduler=schedule.state_dict()), tmp_path / "run.pt")

    middle = convert(tmp_path / "run.pt", tmp_path / "dcp", "dcp", Layout(dp_shard=3))
    end = load(convert(middle, tmp_path / "again.pt", "torch"))

    other = model()
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    following = build(resumed)
    other.load_state_dict(end["model"])
    resumed.load_state_dict(end["optimizer"])
    following.load_state_dict(end["lr_scheduler"])
    for _ in range(5):
        train(net, optimizer, 1, schedule)
        train(other, resumed, 1, following)
        assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in optimizer.param_groups]


def lbfgs(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=0.1, history_size=3, max_iter=2)


def test_the_history_lists_of_lbfgs_stay_with_their_parameter(tmp_path: Path) -> None:
    net = model()
    optimizer = lbfgs(net)
    train(net, optimizer, 3)
    torch.save(saved(net, optimizer), tmp_path / "run.pt")
    end = load(convert(tmp_path / "run.pt", tmp_path / "again.pt", "torch"))
    assert "optimizer_objects" not in end
    other = model()
    resumed = lbfgs(other)
    other.load_state_dict(end["model"])
    resumed.load_state_dict(end["optimizer"])
    train(net, optimizer, 2)
    train(other, resumed, 2)
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_lists_by_position_are_not_lost_on_the_way_to_dcp_without_a_word(tmp_path: Path) -> None:
    net = model()
    optimizer = lbfgs(net)
    train(net, optimizer, 3)
    torch.save(saved(net, optimizer), tmp_path / "run.pt")
    with pytest.raises(UndecidedError) as refused:
        ready(tmp_path / "run.pt", tmp_path / "dcp", "dcp")
    assert [problem.code for problem in refused.value.problems] == ["SR-WRITE-OBJECT"]
    assert "old_dirs" in refused.value.problems[0].message
    ready(tmp_path / "run.pt", tmp_path / "dcp", "dcp", allow={"SR-WRITE-OBJECT"})


def test_mappings_by_number_and_lists_of_arrays_keep_their_form(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 3)
    odd = {"best": {3: "a", 7: {2: "b"}}, "arrays": [torch.arange(3), torch.arange(5), torch.arange(2)]}
    torch.save(saved(net, optimizer, **odd), tmp_path / "run.pt")
    end = load(convert(tmp_path / "run.pt", tmp_path / "again.pt", "torch"))
    assert end["best"] == odd["best"]
    assert all(map(torch.equal, end["arrays"], odd["arrays"]))


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors"])
def test_keys_that_are_alike_as_text_stay_two(tmp_path: Path, to: str) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    seen = {"words": {1: "one", "1": "text"}, "counts": {1: torch.ones(2), "1": torch.zeros(3)}}
    torch.save(saved(net, optimizer, seen=seen), tmp_path / "source.pt")
    objects = open_checkpoint(convert(tmp_path / "source.pt", tmp_path / "dest", to)).state.objects
    assert objects["seen.words"] == seen["words"]
    assert {key: value.tolist() for key, value in objects["seen.counts"].items()} == {1: [1, 1], "1": [0, 0, 0]}


def test_what_is_allowed_is_reported_once(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 3)
    torch.save(saved(net, optimizer, when=__import__("datetime").datetime(2020, 1, 1)), tmp_path / "run.pt")
    prepared = ready(tmp_path / "run.pt", tmp_path / "again.pt", "torch", allow={"SR-WRITE-OBJECT"})
    assert [problem.code for problem in prepared.decisions] == ["SR-WRITE-OBJECT"]
    assert "SR-WRITE-OBJECT" not in {problem.code for problem in prepared.problems}


def test_nothing_of_adam_is_added_to_the_groups_of_its_kin(tmp_path: Path) -> None:
    for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax):
        net = model()
        optimizer = kind(net.parameters())
        train(net, optimizer, 3)
        file, name = tmp_path / f"{kind.__name__}.pt", f"{kind.__name__}-again.pt"
        torch.save(saved(net, optimizer), file)
        group = load(convert(file, tmp_path / name, "torch"))["optimizer"]["param_groups"][0]
        assert group.keys() - {"param_names"} == optimizer.state_dict()["param_groups"][0].keys()


def test_factored_moments_are_no_lost_slots(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.Adafactor(net.parameters())
    train(net, optimizer, 3)
    state = saved(net, optimizer)
    torch.save(state, tmp_path / "run.pt")
    assert "SR-OPT-SLOT" not in severities(tmp_path / "run.pt")
    for slots in state["optimizer"]["state"].values():  # of the vectors, none has its moments
        slots.pop("variance", None)
    torch.save(state, tmp_path / "damaged.pt")
    assert severities(tmp_path / "damaged.pt")["SR-OPT-SLOT"] is Severity.ERROR


def test_groups_of_two_algorithms_are_no_lost_hyperparameters(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[1].parameters()}])
    train(net, optimizer, 3)
    state = saved(net, optimizer)
    first, second = state["optimizer"]["param_groups"]
    first["tag"] = "decayed"
    torch.save(state, tmp_path / "marked.pt")
    assert severities(tmp_path / "marked.pt")["SR-GROUP-HYPER"] is Severity.WARNING
    del first["betas"], first["eps"]
    first["momentum"] = 0.95
    torch.save(state, tmp_path / "mixed.pt")
    assert severities(tmp_path / "mixed.pt")["SR-GROUP-HYPER"] is Severity.WARNING
    first["betas"] = (0.9, 0.999)
    first["eps"] = 1e-8
    for name in set(second) - {"lr", "params"}:
        del second[name]
    torch.save(state, tmp_path / "lost.pt")
    assert severities(tmp_path / "lost.pt")["SR-GROUP-HYPER"] is Severity.ERROR


def test_zero_in_fp32_keeps_parameters_whole_and_cut_over_ranks_that_do_not_divide_them(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 3)
    torch.save(saved(net, optimizer), tmp_path / "run.pt")
    dest = convert(tmp_path / "run.pt", tmp_path / "zero", "zero", Layout(dp_shard=3))
    checkpoint = open_checkpoint(dest)
    for name, value in net.state_dict().items():
        assert (checkpoint.read(f"param:{name}") == value.numpy()).all()


def test_arrays_of_text_are_kept_in_an_export(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    names = np.array([["cat", "mouse"], ["", "é"]])
    raw = np.array([b"ab", b"c"])
    torch.save(saved(net, optimizer, classes=names, raw=raw), tmp_path / "run.pt")
    objects = open_checkpoint(convert(tmp_path / "run.pt", tmp_path / "out", "safetensors")).state.objects
    for key, value in (("classes", names), ("raw", raw)):
        assert objects[key].dtype == value.dtype
        assert np.array_equal(objects[key], value)


def test_an_empty_section_in_the_schedulers_place_does_not_hide_it(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = schedules.StepLR(optimizer, 2)
    train(net, optimizer, 3, schedule)
    torch.save(saved(net, optimizer, scheduler=schedule.state_dict(), lr_scheduler=None), tmp_path / "run.pt")
    end = load(convert(tmp_path / "run.pt", tmp_path / "again.pt", "torch"))
    assert end["lr_scheduler"]["last_epoch"] == 3
    assert end["lr_scheduler_objects"] is None

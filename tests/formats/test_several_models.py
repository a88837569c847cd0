"""Several models and optimizers in one checkpoint: which optimizer is whose, and where they lie.

Everything is written by torch itself. The truth is the live run's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from samerun.convert.convert import convert
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.dcp import save


def pair() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Two models of one shape, each with its own optimizer after one update."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 3) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    return list(models), list(optimizers)


PAIRS: dict[str, tuple[str, str, str, str]] = {
    "words": ("actor", "critic", "actor_optimizer", "critic_optimizer"),
    "letters": ("netG", "netD", "optG", "optD"),
    "numbers": ("q1", "q2", "q1_opt", "q2_opt"),
}


@pytest.mark.parametrize("names", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_optimizer_is_that_of_the_model_it_is_called_after(
    names: tuple[str, str, str, str], order: tuple[int, int], tmp_path: Path
):
    models, optimizers = pair()
    state: dict[str, Any] = {names[i]: models[i].state_dict() for i in (0, 1)}
    state |= {names[2 + i]: optimizers[i].state_dict() for i in order}
    torch.save(state, tmp_path / "c.pt")
    checkpoint = open_checkpoint(tmp_path / "c.pt")
    for i in (0, 1):
        for name, param in models[i].named_parameters():
            for slot, value in optimizers[i].state[param].items():
                assert checkpoint.read(f"optim.{slot}:{names[i]}.{name}").tobytes() == value.numpy().tobytes()
    assert "SR-OPT-OPEN" not in {problem.code for problem in checkpoint.state.problems}


@pytest.mark.parametrize("form", ["by position", "by name"])
@pytest.mark.parametrize("names", [("target", "online"), ("teacher", "student"), ("target_network", "q_network")])
def test_the_copy_is_not_taken_for_the_trained_model(names: tuple[str, str], form: str, tmp_path: Path):
    models, _ = pair()
    given: Any = models[1].parameters() if form == "by position" else models[1].named_parameters()
    optimizer = torch.optim.Adam(given, foreach=False)
    models[1](torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {name: model.state_dict() for name, model in zip(names, models, strict=True)}
    torch.save({**state, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    checkpoint = open_checkpoint(tmp_path / "c.pt")
    weight = models[1].weight
    assert isinstance(weight, torch.Tensor)
    assert checkpoint.read("param:weight").tobytes() == weight.detach().numpy().tobytes()
    assert f"param:{names[0]}.weight" in checkpoint.state.tensors
    assert "SR-OPT-OPEN" not in {problem.code for problem in checkpoint.state.problems}


def test_models_and_optimizers_whose_names_say_nothing_are_open(tmp_path: Path):
    models, optimizers = pair()
    state = {"x": models[0].state_dict(), "y": models[1].state_dict(), "f": optimizers[1].state_dict()}
    torch.save({**state, "g": optimizers[0].state_dict()}, tmp_path / "c.pt")
    found = [problem for problem in open_checkpoint(tmp_path / "c.pt").state.problems if problem.code == "SR-OPT-OPEN"]
    assert [problem.where["key"] for problem in found] == ["f"]


def slots_of(model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str = "") -> dict[str, bytes]:
    """Returns the bytes of parameters and slots under samerun's keys."""
    found: dict[str, bytes] = {}
    for name, param in model.named_parameters():
        found[f"param:{prefix}{name}"] = param.detach().numpy().tobytes()
        for slot, value in optimizer.state.get(param, {}).items():
            found[f"optim.{slot}:{prefix}{name}"] = value.numpy().tobytes()
    return found


def held(path: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(path)
    return {key: checkpoint.read(key).tobytes() for key in checkpoint.state.tensors}


@pytest.mark.parametrize("names", PAIRS.values(), ids=PAIRS)
def test_two_models_of_one_shape_in_a_dcp_directory(names: tuple[str, str, str, str], tmp_path: Path):
    """Read, written again by samerun, and read again: each optimizer stays with its model."""
    models, optimizers = pair()
    parts = [get_state_dict(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    state = {names[0]: parts[0][0], names[1]: parts[1][0], names[3]: parts[1][1], names[2]: parts[0][1]}
    truth = slots_of(models[0], optimizers[0], f"{names[0]}.") | slots_of(models[1], optimizers[1], f"{names[1]}.")
    path = save(state, tmp_path / "c")
    assert held(path) == truth
    assert inspect_checkpoint(open_checkpoint(path), deep=True).complete
    convert(open_checkpoint(path), tmp_path / "d", to="dcp")
    assert held(tmp_path / "d") == truth


@pytest.mark.parametrize("names", [("target", "online"), ("teacher_model", "student")])
def test_the_copy_is_not_the_trained_model_in_a_dcp_directory(names: tuple[str, str], tmp_path: Path):
    models, optimizers = pair()
    trained, settings = get_state_dict(models[1], optimizers[1])
    path = save({names[0]: models[0].state_dict(), names[1]: trained, "optim": settings}, tmp_path / "c")
    found = held(path)
    assert found.items() >= slots_of(models[1], optimizers[1]).items()
    assert f"param:{names[0]}.weight" in found
    assert "SR-OPT-OPEN" not in {problem.code for problem in open_checkpoint(path).state.problems}


def test_models_whose_names_say_nothing_are_open_in_a_dcp_directory(tmp_path: Path):
    models, optimizers = pair()
    trained, settings = get_state_dict(models[1], optimizers[1])
    path = save({"x": models[0].state_dict(), "y": trained, "optim": settings}, tmp_path / "c")
    assert "SR-OPT-OPEN" in {problem.code for problem in open_checkpoint(path).state.problems}


def in_sections(section: str, model: Any, optim: Any) -> dict[str, Any]:
    if section == "composer":
        state = {"model": model, "optimizers": {"AdamW": optim}, "timestamp": {"Timestamp": {"batch": 1}}}
        return {"state": state, "rng": [{"torch": torch.get_rng_state()}]}
    return {section: {"model": model, "optimizer": optim, "step": 1}}


@pytest.mark.parametrize("section", ["composer", "state", "train_state"])
def test_everything_in_one_section(section: str, tmp_path: Path):
    """A mapping called `state` is no optimizer, though optimizers keep theirs under that name; nor is what trains."""
    models, optimizers = pair()
    path = save(in_sections(section, *get_state_dict(models[0], optimizers[0])), tmp_path / "c")
    truth = slots_of(models[0], optimizers[0])
    assert held(path) == truth
    state = open_checkpoint(path).state
    assert [group.hyperparameters["lr"] for group in state.groups] == [1e-2]
    convert(open_checkpoint(path), tmp_path / "d", to="dcp")
    assert held(tmp_path / "d") == truth


def test_a_torch_save_file_with_everything_in_one_section_is_written_as_dcp(tmp_path: Path):
    """The layout of Composer's unsharded checkpoints."""
    models, optimizers = pair()
    state = {"model": models[0].state_dict(), "optimizers": {"AdamW": optimizers[0].state_dict()}}
    torch.save({"state": state, "rng": []}, tmp_path / "c.pt")
    convert(open_checkpoint(tmp_path / "c.pt"), tmp_path / "d", to="dcp")
    assert held(tmp_path / "d") == slots_of(models[0], optimizers[0])


def test_slots_without_groups_under_state_are_still_an_optimizer(tmp_path: Path):
    models, optimizers = pair()
    model, optim = get_state_dict(models[0], optimizers[0])
    path = save({"model": model, "state": optim["state"]}, tmp_path / "c")
    assert held(path) == slots_of(models[0], optimizers[0])
    assert "SR-GROUP-NONE" in {problem.code for problem in inspect_checkpoint(open_checkpoint(path)).problems}

"""Where two runs part first: real modules and real gradients, made to differ in one place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from samerun.core.tolerance import Band
from samerun.demo.faults import FAULTS
from samerun.trace import read_trace
from samerun.train import Recorder
from samerun.train.activations import MOST_MODULES, watch_modules
from samerun.verify.evidence.locate import Place, first_module, worst_gradient
from samerun.verify.kinds import kind_of
from samerun.verify.updates.evaluate import check_evaluation, evaluation_of
from support.observations import make_evaluation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6, eps=1e-6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": x + self.linear(self.norm(x))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)["out"]
        return self.head(x)


def outputs_of(model: nn.Module) -> list[tuple[str, float, int]]:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    with watch_modules(model) as outputs:
        model(x)
    return [tuple(row) for row in outputs.rows()]


def test_every_module_is_named_in_the_order_of_the_forward_pass_and_no_hook_stays() -> None:
    model = Net()
    rows = outputs_of(model)
    inner = [f"blocks.{i}{part}" for i in range(3) for part in (".norm", ".linear", "")]
    assert [row[0] for row in rows] == [*inner, "head"]
    assert [row[2] for row in rows] == [24] * 9 + [8]
    assert all(not module._forward_hooks for module in model.modules())
    expected = model.blocks[0].norm(torch.linspace(-1, 1, 24).view(4, 6)).norm().item()
    assert rows[0][1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("place", ["blocks.1.norm", "blocks.2.linear", "head"])
def test_the_first_module_that_differs_is_the_one_that_was_changed(place: str) -> None:
    control, other = outputs_of(Net()), Net()
    module = other.get_submodule(place)
    with torch.no_grad():
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-2
        else:
            module.weight.mul_(1.01)
    found = first_module(control, outputs_of(other), 1e-6)
    assert found is not None
    assert found.name == place
    assert first_module(control, outputs_of(Net()), 0.0) is None
    assert first_module(control, outputs_of(other), math.inf) is None


def test_outputs_of_another_size_are_passed_over() -> None:
    control = [("a", 1.0, 8), ("b", 2.0, 8)]
    assert first_module(control, [("a", 5.0, 4), ("b", 2.0, 8)], 1e-3) is None
    assert first_module(control, [("a", 5.0, 4), ("b", 3.0, 8)], 1e-3) == Place("b", 2.0, 3.0)


def test_a_model_with_too_many_modules_is_watched_from_above() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(MOST_MODULES // 2)])
    with watch_modules(model) as outputs:
        model(torch.ones(2))
    assert len(outputs.rows()) == MOST_MODULES // 2


def test_a_compiled_module_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")).requires_grad_(False)
    with watch_modules(model) as outputs:
        model(torch.ones(1, 2))
    assert [row[0] for row in outputs.rows()] == ["0"]


def test_logits_outside_their_band_name_the_module() -> None:
    bands = [Band(metric="eval_logits", first_update=12, limits=(1e-6,), origin="user")]
    control = make_evaluation(modules=(("a", 1.0, 4), ("b", 2.0, 4)))
    same = make_evaluation(modules=(("a", 9.0, 4), ("b", 2.0, 4)))
    assert check_evaluation(control, same, bands) == []  # norms decide nothing
    odd = make_evaluation(logits=make_evaluation().logits * 1.5, modules=(("a", 1.0, 4), ("b", 2.5, 4)))
    (problem,) = check_evaluation(control, odd, bands)
    assert (problem.code, problem.where["module"]) == ("SR-EVAL-LOGITS", "b")
    assert "b (2.5, in the control 2)" in problem.message
    (plain,) = check_evaluation(make_evaluation(), make_evaluation(logits=odd.logits), bands)
    assert "module" not in plain.where


def test_a_recorder_writes_both(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "trace")
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    x = torch.linspace(-1, 1, 24).view(4, 6)
    recorder.evaluate(lambda: {"losses": model(x).square().mean(1)})
    model(x).square().mean().backward()
    norms = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    optimizer.step()
    recorder.record(update=1, loss=1.0, sample_ids=[0])
    recorder.close()
    lead = read_trace(tmp_path / "trace").lead
    assert [row[0] for row in lead.evals[0].modules][-1] == "head"
    assert evaluation_of(lead.evals[0], None).modules == lead.evals[0].modules
    assert lead.updates[0].gradients == pytest.approx(norms, rel=1e-6)
    assert lead.updates[0].grad_norm == pytest.approx(math.hypot(*norms.values()), rel=1e-6)


def test_the_gradient_that_accounts_for_most() -> None:
    control = {"small": 1e-6, "large": 1.0, "same": 2.0}
    assert worst_gradient(control, control) is None
    assert worst_gradient(control, None) is None
    assert worst_gradient(control, {"small": 2e-6, "large": 1.1, "same": 2.0}) == Place("large", 1.0, 1.1)
    assert worst_gradient(control, {**control, "small": math.nan}).name == "small"  # type: ignore[union-attr]


def test_kinds() -> None:
    assert kind_of("SR-UPD-LR") == "scheduler"
    assert kind_of("SR-JOB-WORLD") == "global batch"
    assert kind_of("SR-JOB-TIMEOUT") == "the job itself"
    assert kind_of("SR-SEAL-CHANGED") is None


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_every_fault_is_named_by_findings_that_point_to_a_kind(fault) -> None:
    assert all(kind_of(code) for code in fault.codes)

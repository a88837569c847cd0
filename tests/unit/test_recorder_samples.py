"""A loop that tells the recorder of passes: its updates are recorded by the optimizer's own step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samerun.errors import UsageError
from samerun.trace import check_trace, read_trace
from samerun.train import ElasticSampler, Recorder
from samerun.train.recorder import StageDone

BATCHES = {1: [(0.5, [3, 1, 4]), (2.0, [1])], 2: [(1.0, [5]), (4.0, [9, 2, 6])]}


def make(optimizer: Any = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    build = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    return model, build(model.parameters())


def one_pass(model: nn.Module, recorder: Recorder, ids: list[int] | None, **more: Any) -> torch.Tensor:
    loss = model(torch.randn(4, 3)).square().mean()
    recorder.samples(ids, loss=loss, **more)
    loss.backward()
    return loss


def test_each_step_is_an_update_with_what_its_passes_told(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    recorder.attach(model, optimizer, scheduler, batch={"global_batch": 4})
    optimizer.step()  # an empty one, before loading
    recorder.loaded(update=6)
    for passes in BATCHES.values():
        for loss, ids in passes:
            model(torch.randn(4, 3)).square().mean().backward()
            recorder.samples(ids, loss=torch.tensor(loss, requires_grad=True), tokens=10 * len(ids))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        recorder.boundary("log", 7)
    recorder.close()
    trace = read_trace(tmp_path)
    assert check_trace(trace) == []
    lines = trace.lead.updates
    assert [(line.update, line.sample_ids, line.samples, line.tokens) for line in lines] == [
        (7, (3, 1, 4, 1), 4, 40),
        (8, (5, 9, 2, 6), 4, 40),
    ]
    assert [line.loss for line in lines] == [(3 * 0.5 + 2.0) / 4, (1.0 + 3 * 4.0) / 4]
    assert [line.lr for line in lines] == [(0.01,), (0.005,)]
    assert all(line.update_norm and line.grad_norm and line.steps == 1 for line in lines)


def test_a_pass_weighs_what_the_loop_says(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model, optimizer = make()
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    for loss, weight in ((1.0, 30), (5.0, 10), (math.nan, 0)):
        recorder.samples([0], loss=loss, weight=weight)
    optimizer.step()
    recorder.close()
    assert [line.loss for line in read_trace(tmp_path).lead.updates] == [2.0]


def test_the_sampler_tells_what_the_loop_leaves_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model, optimizer = make()
    sampler = ElasticSampler(10, global_batch=4, replicas=1, replica=0, max_microbatch=2, seed=5)
    recorder.attach(model, optimizer, sampler=sampler)
    recorder.loaded(update=0)
    expected = []
    for _ in range(2):
        expected.append(tuple(sampler.update_ids().tolist()))
        losses = [one_pass(model, recorder, None).item() for _ in range(2)]
        optimizer.step()
        sampler.commit()
        assert read_trace(tmp_path).lead.updates[-1].loss == pytest.approx(sum(losses) / 2)
    recorder.close()
    assert [line.sample_ids for line in read_trace(tmp_path).lead.updates] == expected


def test_an_update_that_the_scaler_skips(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    model, optimizer = make(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    recorder.attach(model, optimizer, None, scaler)
    recorder.loaded(update=0)
    for ids, factor in (([0], 1.0), ([1], math.inf), ([2], 1.0), ([3], math.inf)):
        loss = model(torch.randn(4, 3)).square().mean()
        recorder.samples(ids, loss=loss)
        (scaler.scale(loss) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    recorder.close()
    lines = read_trace(tmp_path).lead.updates
    assert [(line.update, line.skipped, line.sample_ids, line.loss_scale) for line in lines] == [
        (1, False, (0,), 8.0),
        (2, True, (1,), 8.0),
        (2, False, (2,), 4.0),
        (3, True, (3,), 4.0),
    ]


class PatientScale:
    """A loss scale that stands at the first infinities, as those of Megatron and DeepSpeed do."""

    num_skipped = 0

    def get_scale(self) -> float:
        return 8.0


def test_an_update_that_is_skipped_at_an_unchanged_scale(tmp_path: Path) -> None:
    recorder, scale = Recorder(tmp_path), PatientScale()
    model, optimizer = make(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    recorder.attach(model, optimizer, None, scale)
    recorder.loaded(update=0)
    for number, skips in enumerate((False, True, False, True)):
        one_pass(model, recorder, [number])
        if skips:
            scale.num_skipped += 1
        else:
            optimizer.step()
        optimizer.zero_grad()
    recorder.close()
    lines = read_trace(tmp_path).lead.updates
    assert [(line.update, line.skipped, line.sample_ids) for line in lines] == [
        (1, False, (0,)),
        (2, True, (1,)),
        (2, False, (2,)),
        (3, True, (3,)),
    ]


def test_an_update_is_one_step_of_every_optimizer(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model, _ = make()
    optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
    recorder.attach(model, optimizers)
    recorder.loaded(update=0)
    for number in range(2):
        one_pass(model, recorder, [number])
        for optimizer in optimizers:
            optimizer.step()
    recorder.close()
    lines = read_trace(tmp_path).lead.updates
    assert [(line.update, line.steps, line.sample_ids) for line in lines] == [(1, 2, (0,)), (2, 2, (1,))]
    assert lines[0].moved is not None
    assert all(change > 0 for change in lines[0].moved.values())


@pytest.mark.parametrize(("stage", "updates"), [("load", 0), ("update", 1), ("window", 3)])
def test_a_launched_loop_that_does_not_look_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, updates: int
) -> None:
    for name, value in (("STAGE", stage), ("TRACE_DIR", str(tmp_path)), ("MAX_UPDATES", str(updates))):
        monkeypatch.setenv(f"SAMERUN_{name}", value)
    recorder = Recorder.from_env()
    recorder._guard.remove()  # this process goes on with other tests
    model, optimizer = make()
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    for number in range(updates):
        one_pass(model, recorder, [number])
        optimizer.step()
    with pytest.raises(StageDone) as ended:
        one_pass(model, recorder, [updates])
    assert ended.value.code == 0
    trace = read_trace(tmp_path)
    assert [line.update for line in trace.lead.updates] == list(range(1, updates + 1))
    assert trace.lead.end is not None
    assert trace.lead.end.reason == "finished"


def test_misuse_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model, optimizer = make()
    recorder.attach(model, optimizer)
    with pytest.raises(UsageError, match="samples was called before loaded"):
        recorder.samples([0])
    recorder.loaded(update=0)
    with pytest.raises(UsageError, match="samples was given no ids"):
        recorder.samples()
    recorder.samples([0], loss=1.0)
    with pytest.raises(UsageError, match="record was called after samples"):
        recorder.record(update=1, loss=1.0, sample_ids=[0])
    recorder.close()


def test_samples_after_record_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model, optimizer = make()
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    optimizer.step()
    recorder.record(update=1, loss=1.0, sample_ids=[0])
    with pytest.raises(UsageError, match="samples was called after record"):
        recorder.samples([1])
    recorder.close()


def test_the_norm_before_clipping(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, norms="every")
    model, optimizer = make(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    expected = []
    for told in (True, False, None):
        optimizer.zero_grad()
        one_pass(model, recorder, [0])
        if told is False:
            recorder.grad_norm()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if told:
            recorder.grad_norm(norm)
        expected.append(1e-3 if told is None else norm.item())
        optimizer.step()
    recorder.close()
    assert [line.grad_norm for line in read_trace(tmp_path).lead.updates] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("told", [True, False])
def test_gradients_are_those_before_clipping(told: bool, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, norms="every")
    model, optimizer = make(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    one_pass(model, recorder, [0])
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    if not told:
        recorder.grad_norm()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    if told:
        recorder.grad_norm(norm)
    optimizer.step()
    recorder.close()
    (line,) = read_trace(tmp_path).lead.updates
    found = {name: value for name, value in (line.gradients or {}).items() if name in norms}
    assert found == pytest.approx(norms, rel=1e-4)
    assert line.step_norm == pytest.approx(1e-3, rel=1e-3)
    assert line.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_a_gradient_that_is_computed_within_the_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, norms="every")
    model, optimizer = make(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    norms = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = one_pass(model, recorder, [len(norms)])
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    recorder.close()
    lines = read_trace(tmp_path).lead.updates
    assert [line.sample_ids for line in lines] == [(0,), (1,)]
    assert [line.grad_norm for line in lines] == pytest.approx(norms, rel=1e-5)

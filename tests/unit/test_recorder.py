"""The recorder in one process: what it writes, when it is inert, what it measures, and what it refuses."""

from __future__ import annotations

import io
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from samerun.errors import UsageError
from samerun.trace import Trace, UpdateLine, check_trace, read_trace
from samerun.train import ElasticSampler, Recorder
from samerun.train.guard import SaveGuard, SaveRefused
from samerun.train.launch import read_launch

ENVIRONMENT = ("SAMERUN_STAGE", "SAMERUN_TRACE_DIR", "SAMERUN_MAX_UPDATES")


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.middle(torch.relu(self.first(x)))))) * self.frozen


class Job:
    """An ordinary loop around a toy model; `optimizer` and the rest are whatever a test needs."""

    def __init__(self, recorder: Recorder, optimizer: Any = None, **attach: Any) -> None:
        torch.manual_seed(1)
        self.model = Toy()
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.recorder = recorder
        self.scheduler: Any = None
        recorder.attach(self.model, self.optimizer, **attach)

    def backward(self) -> torch.Tensor:
        loss = self.model(torch.randn(5, 4)).square().mean()
        loss.backward()
        return loss

    def update(self, index: int, **record: Any) -> None:
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        record = {"sample_ids": [2 * index, 2 * index + 1]} | record
        self.recorder.record(update=index, loss=loss, **record)


def launch(monkeypatch: pytest.MonkeyPatch, directory: Path, stage: str, updates: int | None = None) -> Recorder:
    monkeypatch.setenv("SAMERUN_STAGE", stage)
    monkeypatch.setenv("SAMERUN_TRACE_DIR", str(directory))
    if updates is not None:
        monkeypatch.setenv("SAMERUN_MAX_UPDATES", str(updates))
    recorder = Recorder.from_env()
    recorder._guard.remove()  # this process goes on with other tests
    return recorder


def lines(directory: Path) -> tuple[UpdateLine, ...]:
    return read_trace(directory).lead.updates


def sound(directory: Path) -> Trace:
    trace = read_trace(directory)
    assert check_trace(trace) == []
    return trace


def test_importing_the_package_imports_nothing() -> None:
    probe = "import samerun.train, sys; print('torch' in sys.modules, 'numpy' in sys.modules, samerun.train.__all__)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    names = ["ContributionMean", "ElasticSampler", "ElasticStream", "KeyedDropout", "Recorder", "SampleKeys"]
    names += ["TokenSampler"]
    assert done.stdout.strip() == f"False False {[*names, 'use_keyed_dropout', 'write_digests']}"


def test_inert_without_a_launch() -> None:
    recorder = Recorder.from_env()
    assert (recorder.active, recorder.stage, recorder.may_save, recorder.finished) == (False, None, True, False)
    assert recorder.max_updates is None
    job = Job(recorder)
    recorder.loaded(update=3)
    recorder.evaluate(lambda: pytest.fail("an inert recorder evaluates nothing"))
    job.update(4)
    job.update(4)
    recorder.boundary("log", 4)
    recorder.close()
    assert not job.optimizer._optimizer_step_pre_hooks


def test_a_ledger(tmp_path: Path) -> None:
    recorder = Recorder.from_env(tmp_path / "ledger")
    assert (recorder.active, recorder.stage, recorder.may_save) == (True, None, True)
    job = Job(recorder, layout="dp_shard=1", objects={"progress": {"update": 12}}, config={"heads": 4})
    job.scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
    recorder.loaded(update=12)
    for index in (13, 14, 15):
        job.update(index, grad_norm=torch.tensor(0.5), tokens=7)
    recorder.boundary("log", 15)
    recorder.close()
    recorder.close()
    assert not recorder.finished
    trace = sound(tmp_path / "ledger")
    header = trace.lead.header
    assert (header.stage, header.rank, header.world_size, header.batch) == (None, 0, 1, None)
    assert (header.layout, header.declared_layout) == ({"dp_shard": 1}, {"dp_shard": 1})
    assert header.versions["torch"] == torch.__version__
    assert header.environment["dtype"] == ["float32"]
    state = trace.lead.state("loaded")
    assert state is not None
    assert state.update == 12
    assert state.body["objects"]["progress"] == {"update": 12}
    assert state.body["config"] == {"heads": 4}
    assert [line.lr for line in trace.lead.updates] == [(0.01,), (0.005,), (0.0025,)]  # what each step used
    assert [line.grad_norm for line in trace.lead.updates] == [0.5] * 3
    line = trace.lead.updates[0]
    assert (line.samples, line.tokens, line.sample_ids) == (2, 7, (26, 27))
    assert [(line.what, line.update) for line in trace.lead.boundaries] == [("log", 15)]
    assert trace.lead.end is not None
    assert trace.lead.end.updates == 3


def test_norms_are_those_of_the_real_change(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    job = Job(recorder, lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    recorder.loaded(update=0)
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    loss = job.backward()
    gradient = math.sqrt(sum(float(p.grad.square().sum()) for p in job.model.parameters() if p.grad is not None))
    job.optimizer.step()
    recorder.record(update=1, loss=loss, sample_ids=[0])
    change = {name: float((p.detach() - before[name]).norm()) for name, p in job.model.named_parameters()}
    (line,) = lines(tmp_path)
    assert line.moved == pytest.approx(change, rel=1e-6)
    assert line.moved is not None
    assert line.moved["frozen"] == 0.0
    assert line.update_norm == pytest.approx(math.sqrt(sum(value**2 for value in change.values())), rel=1e-6)
    assert line.grad_norm == pytest.approx(gradient, rel=1e-6)
    assert {"first.weight", "last.bias"} < set(line.deltas)
    assert "frozen" not in line.deltas
    assert line.deltas == pytest.approx({name: change[name] for name in line.deltas}, rel=1e-6)
    recorder.close()


def test_moved_is_recorded_once_and_only_for_the_first_update(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, norms="every")
    job = Job(recorder)
    recorder.loaded(update=0)
    for index in (1, 2):
        job.update(index)
    recorder.close()
    assert [line.moved is not None for line in lines(tmp_path)] == [True, False]
    assert all(line.update_norm for line in lines(tmp_path))


@pytest.mark.parametrize(
    ("norms", "measured"), [("every", [1, 2, 3, 4, 5, 6, 7]), ("after-save", [1, 2, 5, 6]), ("never", [])]
)
def test_how_often_a_ledger_measures(tmp_path: Path, norms: Any, measured: list[int]) -> None:
    recorder = Recorder(tmp_path, norms=norms, window=2)
    job = Job(recorder)
    recorder.loaded(update=0)
    for index in range(1, 8):
        job.update(index)
        if index == 4:
            recorder.boundary("save", index)
    recorder.close()
    assert [line.update for line in lines(tmp_path) if line.update_norm is not None] == measured


def test_loss_scaling_and_a_skipped_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    job = Job(recorder, lambda parameters: torch.optim.SGD(parameters, lr=0.1), scaler=scaler)
    recorder.loaded(update=0)
    for factor in (1.0, math.inf, 1.0):
        loss = job.model(torch.randn(5, 4)).square().mean()
        (scaler.scale(loss) * factor).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        done = 1 if factor == 1.0 and recorder._num_updates == 0 else 2
        recorder.record(update=done, loss=loss, sample_ids=[done])
    recorder.close()
    trace = sound(tmp_path)
    assert [(line.update, line.skipped, line.loss_scale) for line in trace.lead.updates] == [
        (1, False, 8.0),
        (2, True, 8.0),
        (2, False, 4.0),
    ]
    state = trace.lead.state("loaded")
    assert state is not None
    assert state.body["objects"]["scaler"]["scale"] == 8.0


def test_several_optimizers(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model = Toy()
    first = torch.optim.SGD(model.first.parameters(), lr=0.1)
    rest = torch.optim.SGD([*model.middle.parameters(), *model.last.parameters()], lr=0.2, momentum=0.9)
    recorder.attach(model, [first, rest])
    recorder.loaded(update=0)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(3, 4)).sum().backward()
    first.step()
    rest.step()
    recorder.record(update=1, loss=0.0, sample_ids=[])
    recorder.close()
    change = math.sqrt(
        sum(float((p.detach() - old).square().sum()) for p, old in zip(model.parameters(), before, strict=True))
    )
    (line,) = lines(tmp_path)
    assert (line.lr, line.steps) == ((0.1, 0.2), 2)
    assert line.update_norm == pytest.approx(change, rel=1e-6)


def test_bfloat16_changes_are_measured_in_full(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    before = [p.detach().float().clone() for p in model.parameters()]
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    recorder.record(update=1, loss=1.0, sample_ids=["a", "b"])
    recorder.close()
    change = math.sqrt(
        sum(float((p.detach().float() - old).square().sum()) for p, old in zip(model.parameters(), before, strict=True))
    )
    (line,) = lines(tmp_path)
    assert line.update_norm == pytest.approx(change, rel=1e-6)
    assert line.sample_ids == ("a", "b")


def test_an_empty_step_before_loading_leaves_no_mark(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    job = Job(recorder)
    for parameter in job.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    job.optimizer.param_groups[0]["lr"] = 0.0
    job.optimizer.step()  # as torch's state-dict functions do to allocate state
    job.optimizer.param_groups[0]["lr"] = 0.01
    recorder.loaded(update=12)
    job.update(13)
    recorder.close()
    assert [(line.lr, line.steps) for line in lines(tmp_path)] == [((0.01,), 1)]


def test_a_value_that_is_not_finite(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    job = Job(recorder)
    recorder.loaded(update=0)
    job.update(1)
    job.model.first.weight.data[0, 0] = math.nan
    job.update(2)
    recorder.close()
    assert [line.finite for line in lines(tmp_path)] == [True, False]
    assert [problem.code for problem in check_trace(read_trace(tmp_path))] == ["SR-TRACE-NONFINITE"]


def test_batch_and_position_come_from_the_sampler(tmp_path: Path) -> None:
    sampler = ElasticSampler(50, global_batch=7, replicas=3, replica=1, max_microbatch=2)
    recorder = Recorder(tmp_path)
    Job(recorder, sampler=sampler, layout={"dp_shard": 1})
    recorder.loaded(update=0)
    recorder.close()
    header = sound(tmp_path).lead.header
    assert header.batch is not None
    assert {name: header.batch[name] for name in ("global_batch", "max_microbatch", "passes", "replicas")} == {
        "global_batch": 7,
        "max_microbatch": 2,
        "passes": 2,
        "replicas": 3,
    }
    assert sum(map(sum, header.batch["microbatches"])) == 7
    state = read_trace(tmp_path).lead.state("loaded")
    assert state is not None
    assert state.body["objects"]["sampler"]["samples"] == 0


class TestStages:
    @pytest.mark.parametrize(
        ("stage", "asked", "made", "states"),
        [
            ("load", None, 0, ["loaded"]),
            ("eval", 5, 0, ["loaded"]),
            ("update", 5, 1, ["loaded", "end"]),
            ("window", 3, 3, ["loaded", "end"]),
            ("window", None, 20, ["loaded", "end"]),
            ("control", 2, 2, ["loaded", "end"]),
        ],
    )
    def test_each_does_its_own_and_stops(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        stage: str,
        asked: int | None,
        made: int,
        states: list[str],
    ) -> None:
        recorder = launch(monkeypatch, tmp_path, stage, asked)
        assert (recorder.stage, recorder.may_save, recorder.finished) == (stage, False, False)
        job = Job(recorder)
        recorder.loaded(update=12)
        recorder.evaluate(lambda: {"losses": [1.0], "logits": torch.ones(1, 2)})
        index = 12
        while not recorder.finished:
            index += 1
            job.update(index)
        recorder.close()
        trace = sound(tmp_path)
        assert trace.lead.header.stage == stage
        assert trace.update_indices == tuple(range(13, 13 + made))
        assert [line.when for line in trace.lead.states] == states
        assert len(trace.lead.evals) == (1 if stage in ("eval", "control") else 0)
        assert all(line.update_norm for line in trace.lead.updates)
        assert trace.lead.end is not None
        assert trace.lead.end.reason == "finished"

    def test_a_run_that_ends_before_its_window_still_shows_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorder = launch(monkeypatch, tmp_path, "window", 10)
        job = Job(recorder)
        recorder.loaded(update=0)
        job.update(1)
        recorder.close()
        lead = read_trace(tmp_path).lead
        assert [line.when for line in lead.states] == ["loaded", "end"]
        assert lead.end is not None
        assert (lead.end.reason, lead.end.updates) == ("closed", 1)

    def test_a_directory_given_by_the_script_gives_way(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAMERUN_STAGE", "load")
        monkeypatch.setenv("SAMERUN_TRACE_DIR", str(tmp_path / "stage"))
        recorder = Recorder.from_env(tmp_path / "ledger")
        recorder._guard.remove()
        Job(recorder)
        recorder.close()
        assert [path.name for path in tmp_path.iterdir()] == ["stage"]

    @pytest.mark.parametrize(
        ("variables", "named"),
        [
            ({"SAMERUN_STAGE": "load"}, ["SAMERUN_TRACE_DIR"]),
            ({"SAMERUN_TRACE_DIR": "x"}, ["SAMERUN_STAGE"]),
            ({"SAMERUN_STAGE": "dance", "SAMERUN_TRACE_DIR": "x"}, ["SAMERUN_STAGE"]),
            (
                {"SAMERUN_STAGE": "window", "SAMERUN_MAX_UPDATES": "-1"},
                ["SAMERUN_TRACE_DIR", "SAMERUN_MAX_UPDATES"],
            ),
        ],
    )
    def test_half_a_launch_is_refused(self, variables: dict[str, str], named: list[str]) -> None:
        with pytest.raises(UsageError) as caught:
            read_launch(variables)
        assert {problem.code for problem in caught.value.problems} == {"SR-REC-LAUNCH"}
        assert [problem.where["key"] for problem in caught.value.problems] == named

    def test_no_launch_and_a_whole_one(self) -> None:
        assert read_launch({}) is None
        found = read_launch({"SAMERUN_STAGE": "control", "SAMERUN_TRACE_DIR": "t", "SAMERUN_MAX_UPDATES": "4"})
        assert found is not None
        assert (found.stage, found.trace_dir, found.max_updates, found.evaluates) == ("control", Path("t"), 4, True)


class TestEvaluation:
    def evaluate(self, directory: Path, spoil: Any = lambda job: None) -> Any:
        recorder = Recorder(directory)
        sampler = ElasticSampler(50, global_batch=4, replicas=1, replica=0, max_microbatch=2)
        job = Job(recorder, sampler=sampler)
        job.sampler = sampler
        recorder.loaded(update=0)
        job.update(1)
        job.model.middle.eval()

        def function() -> dict[str, Any]:
            assert not torch.is_grad_enabled()
            assert not job.model.training
            spoil(job)
            logits = job.model(torch.ones(3, 4))
            return {"losses": logits.square().mean(1), "logits": logits}

        recorder.evaluate(function)
        assert job.model.training
        assert not job.model.middle.training
        recorder.close()
        return read_trace(directory).lead.evals[0]

    def test_losses_logits_and_that_nothing_changed(self, tmp_path: Path) -> None:
        line = self.evaluate(tmp_path)
        assert (line.update, line.num_examples, line.state_unchanged, line.rng_unchanged) == (1, 3, True, True)
        assert line.changed == ()
        assert line.logits is not None
        logits = np.load(tmp_path / line.logits["file"])
        assert logits.dtype == np.float32
        assert (list(logits.shape), line.logits["shape"], line.logits["stored_elements"]) == ([3, 3], [3, 3], 9)
        assert list(line.losses) == pytest.approx((logits**2).mean(1).tolist(), rel=1e-6)

    @pytest.mark.parametrize(
        ("spoil", "changed"),
        [
            (lambda job: job.model.first.bias.data.add_(1e-7), ["param:first.bias"]),
            (lambda job: job.optimizer.state[job.model.first.bias]["exp_avg"].mul_(2), ["optim.exp_avg:first.bias"]),
            (lambda job: job.sampler.commit(), ["sampler"]),
            (lambda job: torch.rand(1), ["rng.torch"]),
            (lambda job: random.random(), ["rng.python"]),
            (lambda job: np.random.rand(), ["rng.numpy"]),
        ],
    )
    def test_whatever_it_changes_is_named(self, tmp_path: Path, spoil: Any, changed: list[str]) -> None:
        line = self.evaluate(tmp_path, spoil)
        assert list(line.changed) == changed
        assert line.rng_unchanged == (not changed[0].startswith("rng."))
        assert line.state_unchanged == changed[0].startswith("rng.")

    def test_large_logits_are_thinned(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("samerun.train.evaluation.LARGEST_LOGITS", 10)
        recorder = Recorder(tmp_path)
        Job(recorder)
        recorder.loaded(update=0)
        recorder.evaluate(lambda: {"losses": [0.0], "logits": torch.arange(33.0).view(3, 11)})
        recorder.close()
        (line,) = read_trace(tmp_path).lead.evals
        assert line.logits is not None
        kept = np.load(tmp_path / line.logits["file"])
        assert kept.tolist() == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0]
        assert (line.logits["shape"], line.logits["stored_elements"], line.logits["stride"]) == ([3, 11], 9, 4)

    def test_an_evaluation_that_fails_restores_the_modes(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        job = Job(recorder)
        recorder.loaded(update=0)

        def fail() -> dict[str, Any]:
            raise KeyError("no examples")

        with pytest.raises(KeyError):
            recorder.evaluate(fail)
        assert job.model.training
        recorder.close()


class TestMisuse:
    def refused(self, call: Any, match: str) -> None:
        with pytest.raises(UsageError, match=match) as caught:
            call()
        assert [problem.code for problem in caught.value.problems] == ["SR-REC-USE"]
        assert caught.value.problems[0].hint

    def test_before_attach(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        self.refused(lambda: recorder.record(update=1, loss=0.0, sample_ids=[]), "before attach")
        self.refused(lambda: recorder.loaded(update=1), "before attach")
        self.refused(lambda: recorder.evaluate(dict), "before attach")
        self.refused(lambda: recorder.boundary("log", 1), "before attach")
        recorder.close()

    def test_attached_twice(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        Job(recorder)
        self.refused(lambda: Job(recorder), "twice")
        recorder.close()

    def test_record_before_loaded_and_loaded_too_late(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        job = Job(recorder)
        self.refused(lambda: job.update(1), "before loaded")
        recorder.loaded(update=0)
        job.update(1)
        self.refused(lambda: recorder.loaded(update=1), "after updates")
        recorder.close()
        self.refused(lambda: job.update(2), "after close")

    @pytest.mark.parametrize("index", [12, 11, 0])
    def test_an_index_that_does_not_grow(self, tmp_path: Path, index: int) -> None:
        recorder = Recorder(tmp_path)
        job = Job(recorder)
        recorder.loaded(update=12)
        self.refused(lambda: job.update(index), f"update {index} was recorded after update 12")
        job.update(13)
        self.refused(lambda: job.update(13), "after update 13")
        recorder.close()

    def test_no_sample_ids(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        job = Job(recorder)
        recorder.loaded(update=0)
        self.refused(lambda: job.update(1, sample_ids=None), "no sample ids")
        recorder.close()

    @pytest.mark.parametrize("layout", ["dp_shard", "warp=3", {"dp_shard": 0}])
    def test_an_unusable_layout(self, tmp_path: Path, layout: Any) -> None:
        self.refused(lambda: Job(Recorder(tmp_path), layout=layout), "layout")

    def test_unknown_norms(self, tmp_path: Path) -> None:
        wrong: Any = "sometimes"
        self.refused(lambda: Recorder(tmp_path, norms=wrong), "sometimes")


class TestGuard:
    @pytest.fixture
    def guard(self) -> Any:
        guard = SaveGuard("window")
        guard.install()
        yield guard
        guard.remove()

    def test_everything_that_saves_is_refused_and_nothing_written(self, tmp_path: Path, guard: SaveGuard) -> None:
        state = {"w": torch.ones(2)}
        writer = FileSystemWriter(tmp_path / "writer")
        with (tmp_path / "open").open("wb") as file:
            calls = [
                lambda: torch.save(state, tmp_path / "a.pt"),
                lambda: torch.save(state, str(tmp_path / "b.pt")),
                lambda: torch.save(state, f=file),
                lambda: dcp.save(state, checkpoint_id=tmp_path / "c"),
                lambda: dcp.async_save(state, checkpoint_id=tmp_path / "d"),
                lambda: dcp.state_dict_saver.save(state, checkpoint_id=tmp_path / "e"),
                lambda: writer.reset(tmp_path / "f"),
            ]
            for call in calls:
                with pytest.raises(SaveRefused, match=r"recorder\.may_save") as caught:
                    call()
                assert caught.value.problems[0].code == "SR-REC-SAVE"
                assert caught.value.problems[0].where["stage"] == "window"
        assert [path.name for path in tmp_path.iterdir()] == ["open"]
        assert (tmp_path / "open").stat().st_size == 0

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_a_function_imported_earlier_is_refused_too(self, tmp_path: Path) -> None:
        from torch.distributed.checkpoint import save as imported_earlier

        guard = SaveGuard("load")
        guard.install()
        try:
            with pytest.raises(SaveRefused):
                imported_earlier({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
        finally:
            guard.remove()
        assert list(tmp_path.iterdir()) == []

    def test_memory_and_reading_stay_possible(self, tmp_path: Path) -> None:
        torch.save(torch.ones(2), tmp_path / "before.pt")
        guard = SaveGuard("load")
        guard.install()
        try:
            buffer = io.BytesIO()
            torch.save({"w": 1}, buffer)
            assert torch.load(io.BytesIO(buffer.getvalue())) == {"w": 1}
            assert torch.load(tmp_path / "before.pt").tolist() == [1.0, 1.0]
        finally:
            guard.remove()

    def test_removed_it_leaves_no_trace(self, tmp_path: Path) -> None:
        original = torch.save, dcp.save
        guard = SaveGuard("load")
        guard.install()
        guard.remove()
        assert (torch.save, dcp.save) == original
        torch.save(1, tmp_path / "a.pt")

    def test_a_launched_job_puts_it_up(self, tmp_path: Path) -> None:
        script = (
            "import torch\nfrom samerun.train import Recorder\nrecorder = Recorder.from_env()\n"
            f"torch.save(1, {str(tmp_path / 'x.pt')!r})"
        )
        for stage in ("update", None):
            variables = {"SAMERUN_STAGE": stage, "SAMERUN_TRACE_DIR": str(tmp_path / "t")} if stage else {}
            done = run(script, variables)
            assert ("recorder.may_save" in done.stderr) == (stage is not None)
            assert (tmp_path / "x.pt").exists() == (stage is None)


def run(script: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    import os

    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


SCRIPT = """
import torch
from samerun.train import Recorder
recorder = Recorder({directory!r})
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder.attach(model, optimizer)
recorder.loaded(update=0)
{last}
"""


@pytest.mark.parametrize(
    ("last", "reason"),
    [("", "exit"), ("raise RuntimeError('power')", "error: RuntimeError"), ("import os; os._exit(9)", None)],
)
def test_how_a_job_ended_without_closing(tmp_path: Path, last: str, reason: str | None) -> None:
    run(SCRIPT.format(directory=str(tmp_path), last=last), {})
    trace = read_trace(tmp_path)
    assert (trace.lead.end.reason if trace.lead.end else None) == reason
    assert [problem.code for problem in check_trace(trace)] == ([] if reason else ["SR-TRACE-OPEN"])


@pytest.mark.parametrize("noise", [1e-7, -3e-7])
def test_what_is_hardly_a_gradient_is_left_out_of_a_tensors_change(tmp_path: Path, noise: float) -> None:
    """A part of a bias that softmax cancels has rounding for a gradient, and Adam makes a full step of it."""
    torch.manual_seed(4)
    model = nn.Linear(5, 9)
    recorder = Recorder(dir=tmp_path / str(noise))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    recorder.attach(model, optimizer)
    recorder.loaded(update=0)
    recorder.evaluate(lambda: {"losses": [0.0]})
    model.weight.grad = torch.randn(9, 5)
    model.bias.grad = torch.randn(9)
    model.bias.grad[3:6] = noise * torch.tensor([1.0, 0.1, 0.0])  # exact zeros are no noise
    before = model.bias.detach().clone()
    optimizer.step()
    recorder.record(update=1, loss=1.0, grad_norm=1.0, sample_ids=[0])
    recorder.close()
    (line,) = read_trace(tmp_path / str(noise)).lead.updates
    change = model.bias.detach() - before
    assert abs(float(change[3])) > 0.008  # a step like that of any other element
    kept = torch.cat([change[:3], change[5:]])
    assert line.moved is not None
    assert line.moved["bias"] == pytest.approx(float(kept.norm()), rel=1e-6)
    assert line.moved["weight"] == pytest.approx(0.01 * 45**0.5, rel=1e-4)
    assert line.update_norm == pytest.approx(math.hypot(float(change.norm()), line.moved["weight"]), rel=1e-6)

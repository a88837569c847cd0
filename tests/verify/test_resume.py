"""Findings about what a run resumes from: each provoked on a real save, each silent on a whole one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, RecordedProgress, Topology
from samerun.errors import Severity
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.resume import check_counters, check_resume
from samerun.verify.inspection.resume_schedule import check_scheduler
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from support.corpus import corpus, needs_corpus
from support.dcp import job_state, save

State = dict[str, Any]


def inspect(state: State, folder: Path, *, deep: bool = False, to: Layout | None = None) -> InspectReport:
    return inspect_checkpoint(open_checkpoint(save(state, folder)), deep=deep, destination=to)


def found(report: InspectReport) -> dict[str, Severity]:
    return {problem.code: problem.severity for problem in report.problems}


def without(section: str) -> Callable[[State], None]:
    return lambda state: state.pop(section)


def change(section: str, **values: Any) -> Callable[[State], None]:
    return lambda state: state[section].update(values)


def each_state(edit: Callable[[str, State], Any], only: tuple[str, ...] = ()) -> Callable[[State], None]:
    def damage(state: State) -> None:
        for name, slots in list(state["optim"]["state"].items()):
            if not only or name in only:
                edit(name, slots)

    return damage


def drop_state(state: State) -> None:
    for name in ("0.bias", "1.bias"):
        del state["optim"]["state"][name]


def drop_optimizer_state(state: State) -> None:
    state["optim"]["state"] = {}


def drop_groups(state: State) -> None:
    del state["optim"]["param_groups"]


def lose_group(state: State) -> None:
    del state["optim"]["param_groups"][0]


def list_twice(state: State) -> None:
    groups = state["optim"]["param_groups"]
    groups[1]["params"] = [*groups[1]["params"], groups[0]["params"][0]]


def lose_hyperparameters(state: State) -> None:
    group = state["optim"]["param_groups"][1]
    state["optim"]["param_groups"][1] = {"params": group["params"], "lr": group["lr"]}


def empty_group(state: State) -> None:
    groups = state["optim"]["param_groups"]
    groups[1]["params"] = [*groups[1]["params"], *groups[0]["params"]]
    groups[0]["params"] = []


def rename_model(state: State) -> None:
    for name in ("0.weight", "0.bias"):
        state["model"][f"fused.{name}"] = state["model"].pop(name)


def same_rng(state: State) -> None:
    state["rng"] = torch.get_rng_state()


CASES: dict[str, tuple[Callable[[State], Any], str, Severity]] = {
    "no model": (without("model"), "SR-RES-PARAMS", Severity.ERROR),
    "no optimizer": (without("optim"), "SR-OPT-MISSING", Severity.ERROR),
    "optimizer state empty": (drop_optimizer_state, "SR-OPT-MISSING", Severity.ERROR),
    "no groups": (drop_groups, "SR-GROUP-NONE", Severity.WARNING),
    "no scheduler": (without("scheduler"), "SR-SCHED-MISSING", Severity.WARNING),
    "no rng": (without("rng"), "SR-RNG-MISSING", Severity.WARNING),
    "no sampler": (without("sampler"), "SR-DATA-MISSING", Severity.WARNING),
    "state of two parameters lost": (drop_state, "SR-OPT-NOSTATE", Severity.WARNING),
    "slot of one lost": (each_state(lambda _, s: s.pop("exp_avg_sq"), ("2.weight",)), "SR-OPT-SLOT", Severity.ERROR),
    "moment flat": (
        each_state(lambda _, s: s.update(exp_avg=s["exp_avg"].flatten()), ("2.weight",)),
        "SR-OPT-SHAPE",
        Severity.ERROR,
    ),
    "moments narrow": (
        each_state(lambda _, s: s.update(exp_avg=s["exp_avg"].bfloat16())), "SR-OPT-DTYPE", Severity.WARNING,
    ),
    "model renamed": (rename_model, "SR-OPT-ORPHAN", Severity.WARNING),
    "group lost": (lose_group, "SR-GROUP-LOST", Severity.ERROR),
    "parameter in two groups": (list_twice, "SR-GROUP-TWICE", Severity.ERROR),
    "hyperparameters lost": (lose_hyperparameters, "SR-GROUP-HYPER", Severity.ERROR),
    "group emptied": (empty_group, "SR-GROUP-EMPTY", Severity.WARNING),
    "counters disagree": (change("sampler", samples=25), "SR-CNT-DISAGREE", Severity.ERROR),
    "epochs disagree": (change("sampler", epoch=1), "SR-CNT-DISAGREE", Severity.WARNING),
    "one step differs": (
        each_state(lambda _, s: s.update(step=torch.tensor(2.0)), ("1.bias",)), "SR-CNT-STEPS", Severity.WARNING,
    ),
    "steps are not the updates": (
        each_state(lambda _, s: s.update(step=torch.tensor(1.0))), "SR-CNT-OPTIMIZER", Severity.WARNING,
    ),
    "step in bfloat16": (
        each_state(lambda _, s: s.update(step=s["step"].bfloat16())), "SR-CNT-DTYPE", Severity.WARNING,
    ),
    "step stuck": (
        each_state(lambda _, s: s.update(step=torch.tensor(256.0).bfloat16())), "SR-CNT-DTYPE", Severity.ERROR,
    ),
    "scheduler once more": (change("scheduler", last_epoch=4), "SR-SCHED-POSITION", Severity.WARNING),
    "scheduler per process": (change("scheduler", last_epoch=6), "SR-SCHED-POSITION", Severity.WARNING),
    "scheduler's rates": (change("scheduler", _last_lr=[0.5, 0.5]), "SR-SCHED-LR", Severity.WARNING),
    "schedule is a function": (change("scheduler", lr_lambdas=[None, None]), "SR-SCHED-LAMBDA", Severity.NOTE),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_finding_is_made(name: str, tmp_path: Path):
    damage, code, severity = CASES[name]
    state = job_state()
    damage(state)
    report = inspect(state, tmp_path / "step-3")
    assert found(report)[code] is severity
    assert (report.resumable.verdict == "no") == any(s is Severity.ERROR for s in found(report).values())
    assert report.complete


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("momentum", [False, True])
def test_a_whole_job_has_no_finding(flatten: bool, momentum: bool, tmp_path: Path):
    report = inspect(job_state(flatten=flatten, momentum=momentum), tmp_path / "step-3", deep=True)
    # plain SGD keeps no step, so nothing but the progress counts
    assert found(report) == {}
    assert report.resumable.verdict == "yes"
    assert len(report.state.groups) == 2
    assert sorted(len(group.params) for group in report.state.groups) == [2, 4]


def test_nothing_counts_the_updates(tmp_path: Path):
    state = job_state(momentum=True)
    for section in ("progress", "sampler"):
        del state[section]
    report = inspect(state, tmp_path / "ckpt")
    assert "SR-CNT-MISSING" in found(report)
    assert report.state.progress.update is None
    assert "progress" in report.resumable.lack


def test_gradient_descent_without_momentum_needs_no_state(tmp_path: Path):
    model = nn.Linear(3, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed")
        optim = get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    report = inspect({"model": dict(model.state_dict()), "optim": optim}, tmp_path / "ckpt")
    assert "SR-OPT-MISSING" not in found(report)
    assert "optimizer" in report.resumable.have


def test_optimizer_by_position_is_named(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    report = inspect({"model": dict(model.state_dict()), "optim": optimizer.state_dict()}, tmp_path / "ckpt")
    assert found(report)["SR-OPT-POSITIONAL"] is Severity.ERROR
    assert "optim.exp_avg:#3" in report.state.tensors
    assert report.state.groups[0].params == ("#0", "#1", "#2", "#3")


def test_optimizer_by_position_with_names_is_read(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    report = inspect({"model": dict(model.state_dict()), "optim": optimizer.state_dict()}, tmp_path / "ckpt")
    assert "SR-OPT-POSITIONAL" not in found(report)
    assert report.state.groups[0].params == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert "optim.exp_avg:1.bias" in report.state.tensors


def test_name_of_the_directory_is_compared(tmp_path: Path):
    assert "SR-CNT-DIRECTORY" in found(inspect(job_state(), tmp_path / "step-4"))
    assert "SR-CNT-DIRECTORY" not in found(inspect(job_state(), tmp_path / "global_step003"))
    assert "SR-CNT-DIRECTORY" not in found(inspect(job_state(), tmp_path / "run-4"))


def test_a_directory_that_accelerate_numbers_by_saves_is_not_compared():
    """`automatic_checkpoint_naming`: checkpoints/checkpoint_1 is the second save, whatever the update."""
    state = replace(open_state(), progress=RecordedProgress(update=3))
    for format, name, differs in (("accelerate", "checkpoint_1", False), ("accelerate", "step_1", True),
                                  ("torch", "checkpoint_1", True)):  # fmt: skip
        codes = {problem.code for problem in check_counters(replace(state, format=format), name, {})}
        assert ("SR-CNT-DIRECTORY" in codes) is differs, (format, name)


def test_a_scheduler_that_evaluations_step_is_not_compared_with_updates():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau, stepped = (
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.StepLR(optimizer, 9),
    )
    plateau.step(1.0)
    plateau.step(1.0)
    for scheduler, differs in ((plateau, False), (stepped, True)):
        state = replace(open_state(), scheduler=scheduler.state_dict(), progress=RecordedProgress(update=4))
        assert ("SR-SCHED-POSITION" in {problem.code for problem in check_scheduler(state)}) is differs


def streams(rng: State, world_size: int, data: State | None = None, samples: int | None = None) -> set[str]:
    state = LogicalState(
        format="dcp",
        tensors=open_state().tensors,
        groups=open_state().groups,
        scheduler={"last_epoch": 3},
        progress=RecordedProgress(update=3, samples=samples),
        rng=rng,
        data=data or {},
        topology=Topology(world_size=world_size),
    )
    return {problem.code for problem in check_resume(state, "ckpt", {})}


_state: list[LogicalState] = []


@pytest.fixture(scope="module", autouse=True)
def state_of_a_job(tmp_path_factory: pytest.TempPathFactory):
    _state.append(open_checkpoint(save(job_state(), tmp_path_factory.mktemp("job") / "ckpt")).state)


def open_state() -> LogicalState:
    return _state[0]


def test_generators_are_counted_per_rank():
    per_rank = {f"rng_rank{rank}": {} for rank in range(4)}
    assert not streams(per_rank, 4) & {"SR-RNG-SHARED", "SR-RNG-RANKS", "SR-RNG-MISSING"}
    assert not streams({"rng": {str(rank): 0 for rank in range(4)}}, 4) & {"SR-RNG-SHARED", "SR-RNG-RANKS"}
    assert "SR-RNG-RANKS" in streams(per_rank, 8)
    assert "SR-RNG-SHARED" in streams({"rng": {"torch": 0}}, 4)
    assert not streams({"rng": {"torch": 0}}, 1) & {"SR-RNG-SHARED", "SR-RNG-RANKS"}
    assert "SR-RNG-MISSING" in streams({}, 4)


def test_a_position_saved_within_an_update_is_found():
    sampler = {"update": 3, "epoch": 0, "samples_in_epoch": 24, "samples": 24, "tokens": None, "order": {"kind": "x"}}
    for data in ({"sampler": sampler}, {"app": {"sampler": sampler}}, {f"s.{k}": v for k, v in sampler.items()}):
        assert "SR-ORDER-PHASE" not in streams({}, 4, data)
    for data in (
        {"sampler": {**sampler, "passes_taken": 2}},
        {"app": {"inner.sampler": {**sampler, "passes_taken": 1}}},
    ):
        assert "SR-ORDER-PHASE" in streams({}, 4, data)


def test_loader_positions_per_rank_need_a_global_count():
    loaders = {"dataloader": {"dp_rank_0": {}, "dp_rank_1": {}, "world_size": 2}}
    assert "SR-DATA-PERRANK" in streams({"rng": 0}, 2, loaders)
    assert "SR-DATA-PERRANK" not in streams({"rng": 0}, 2, loaders, samples=80)
    assert "SR-DATA-PERRANK" not in streams({"rng": 0}, 2, {"sampler": {"samples": 80}})


def test_values_are_looked_at_when_deep(tmp_path: Path):
    state = job_state()
    state["model"]["0.weight"][2, 3] = float("nan")
    state["model"]["2.bias"] = state["model"]["2.bias"].bfloat16()
    state["model"]["2.bias"][1] = float("-inf")
    state["optim"]["state"]["2.weight"]["exp_avg_sq"][0, 0] = -1e-9
    for slot in ("exp_avg", "exp_avg_sq"):
        state["optim"]["state"]["1.bias"][slot].zero_()
    report = inspect(state, tmp_path / "step-3", deep=True)
    places = {problem.code: problem.where["tensor"] for problem in reversed(report.problems)}
    assert places["SR-VAL-NONFINITE"] == "param:0.weight"
    assert places["SR-VAL-NEGATIVE"] == "optim.exp_avg_sq:2.weight"
    assert places["SR-VAL-ZERO"] == "optim.exp_avg:1.bias"
    assert found(report)["SR-VAL-ZERO"] is Severity.WARNING
    assert sum(problem.code == "SR-VAL-NONFINITE" for problem in report.problems) == 2


def test_a_mask_of_infinities_is_no_damage(tmp_path: Path):
    state = job_state()
    state["model"]["mask"] = torch.triu(torch.full((5, 5), float("-inf")), 1)
    report = inspect(state, tmp_path / "step-3", deep=True)
    assert found(report)["SR-VAL-NONFINITE"] is Severity.WARNING
    state["model"]["mask"][4, 0] = float("nan")
    assert found(inspect(state, tmp_path / "nan" / "step-3", deep=True))["SR-VAL-NONFINITE"] is Severity.ERROR


def test_all_moments_zero_after_updates_is_an_error(tmp_path: Path):
    state = job_state()
    each_state(lambda _, slots: [slots[name].zero_() for name in ("exp_avg", "exp_avg_sq")])(state)
    assert found(inspect(state, tmp_path / "step-3", deep=True))["SR-VAL-ZERO"] is Severity.ERROR


def test_destination_names_uneven_and_empty_shards(tmp_path: Path):
    report = inspect(job_state(), tmp_path / "step-3", to=Layout(dp_shard=6))
    assert report.destination is not None
    assert set(report.destination.uneven) == set()
    # 9 rows in chunks of two fill five shards of six; 5 rows in chunks of one fill five
    assert set(report.destination.empty) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert {"SR-TO-EMPTY", "SR-TO-RNG"} <= found(report).keys()
    even = inspect(job_state(), tmp_path / "even", to=Layout(dp_shard=1))
    assert not found(even).keys() & {"SR-TO-EMPTY", "SR-TO-UNEVEN", "SR-TO-RNG", "SR-TO-TP"}
    uneven = inspect(job_state(), tmp_path / "uneven", to=Layout(dp_shard=2, tp=4))
    assert {"SR-TO-UNEVEN", "SR-TO-TP"} <= found(uneven).keys()
    assert uneven.to_json()["destination"]["layout"] == {"dp_shard": 2, "tp": 4}


def test_a_pytorch_shard_is_what_the_destination_expects():
    from samerun.verify.inspection.destination import plan_destination

    state = open_state()
    for parts in range(1, 12):
        planned = plan_destination(state, Layout(dp_shard=parts))
        sizes = [[0] * parts for _ in range(1)]
        for entry in state.tensors.values():
            if entry.key.role.value == "param":
                chunks = torch.empty(entry.shape).chunk(parts)
                for rank, chunk in enumerate(chunks):
                    sizes[0][rank] += chunk.numel()
                assert (len(chunks) < parts) == (entry.key.fqn in planned.empty)
        assert max(sizes[0]) == planned.largest_rank_elements
        assert min(sizes[0]) == planned.smallest_rank_elements


@needs_corpus
def test_pipeline_stages_that_overwrite_groups_are_found():
    report = inspect_checkpoint(open_checkpoint(corpus("torch/dcp_pp2/naive_nonflat")))
    assert found(report)["SR-GROUP-LOST"] is Severity.ERROR
    assert report.resumable.verdict == "no"
    clean = inspect_checkpoint(open_checkpoint(corpus("torch/dcp_pp2/ckpt")))
    assert "SR-GROUP-LOST" not in found(clean)


@needs_corpus
@pytest.mark.parametrize(
    ("name", "complete", "intact"),
    [
        ("bitflip_emb_weight", True, False),
        ("truncated_half_rank1", False, None),
        ("mixed_generation_rank1_is_step8", True, None),
    ],
)
def test_damaged_real_checkpoints(name: str, complete: bool, intact: bool | None):
    report = inspect_checkpoint(open_checkpoint(corpus(f"torch-damaged/{name}")), deep=True)
    assert (report.complete, report.intact) == (complete, intact)


@needs_corpus
@pytest.mark.parametrize(
    "name", ["dcp_fsdp2_ws4/ckpt", "dcp_hsdp_2x2/ckpt", "dcp_tpfsdp_dp2tp2/ckpt", "dcp_single/ckpt"]
)
def test_real_checkpoints_are_complete_and_have_no_error(name: str):
    report = inspect_checkpoint(open_checkpoint(corpus(f"torch/{name}")), deep=True)
    assert not [problem for problem in report.problems if problem.severity is Severity.ERROR]
    assert report.complete
    assert report.intact is not False
    assert report.resumable.lack == ("data",)

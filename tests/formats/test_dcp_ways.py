"""The ways in which torch writes DCP directories, by real gloo ranks: flat keys, many files, no collectives, stages.

Each is read equal to the framework's own full state, at three ranks, which divide none of the sizes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.core.mesh import Layout
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support import toy
from support.gloo import run_ranks

pytestmark = pytest.mark.multiprocess

WAYS: dict[str, dict[str, Any]] = {
    "flat optimizer keys": {"flatten": True},
    "a file per item": {"single_file_per_rank": False},
    "three files per rank": {"thread_count": 3},
    "flat, a file per item": {"flatten": True, "single_file_per_rank": False},
    "no collectives": {"use_collectives": False},
}


def save(folder: str, state: dict[str, Any], way: dict[str, Any]) -> None:
    writer = dcp.FileSystemWriter(
        folder, single_file_per_rank=way.get("single_file_per_rank", True), thread_count=way.get("thread_count", 1)
    )
    with toy.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, use_collectives=way.get("use_collectives", True))


def write(rank: int, world_size: int, folder: str, way: dict[str, Any]) -> dict[str, np.ndarray]:
    job = toy.build(Layout(dp_shard=world_size))
    toy.train(job, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=way.get("flatten", False))
    with toy.quiet():
        model, optimizer = get_state_dict(job.model, job.optimizer, options=options)
    save(folder, {"model": model, "optim": optimizer, "progress": job.progress}, way)
    full = toy.full_state(job)
    return full if rank == 0 else {}


@pytest.mark.parametrize("name", WAYS)
def test_values_equal_the_full_state(name: str, tmp_path: Path):
    truth = run_ranks(3, write, str(tmp_path / "ckpt"), WAYS[name])[0]
    checkpoint = open_checkpoint(tmp_path / "ckpt")
    assert set(checkpoint.state.tensors) == set(truth)
    for key, value in truth.items():
        found = checkpoint.read(key)
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes()), key
    flat = WAYS[name].get("flatten", False)
    assert (checkpoint.state.written_by.get("optimizer_state") == "flattened") is flat
    rates = [group.hyperparameters["lr"] for group in checkpoint.state.groups]
    assert len(rates) == 2
    assert len(set(rates)) == 2
    report = inspect_checkpoint(checkpoint)
    assert report.complete
    files = len(list((tmp_path / "ckpt").glob("*.distcp")))
    assert files == {"three files per rank": 9}.get(name, files)
    assert (files > 20) is ("a file per item" in name)


class Stage(torch.nn.Module):
    """One of two pipeline stages; layers are named as in the whole model."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        sizes = ((7, 5), (5, 9)) if rank == 0 else ((9, 3),)
        first = 2 * rank
        self.layers = torch.nn.ModuleDict({str(first + i): torch.nn.Linear(*size) for i, size in enumerate(sizes)})
        self.register_buffer(f"scale{rank}", torch.full((3,), float(rank + 1)))


def write_stages(rank: int, world_size: int, folder: str, flatten: bool) -> dict[str, np.ndarray]:
    stage = Stage(rank)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01 / (rank + 1), foreach=False)
    for number in range(2):
        for parameter in stage.parameters():
            parameter.grad = torch.full_like(parameter, number + 1.0) * torch.randn_like(parameter)
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    with toy.quiet():
        model, state = get_state_dict(stage, optimizer, options=options)
    save(folder, {"model": model, "optim": state}, {})
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    mine = {f"param:{names[id(p)]}": p.detach().numpy() for p in stage.parameters()}
    mine |= {f"buffer:{name}": value.numpy() for name, value in stage.named_buffers()}
    for parameter, slots in optimizer.state.items():
        mine |= {f"optim.{slot}:{names[id(parameter)]}": value.numpy() for slot, value in slots.items()}
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, mine)
    return {key: value for part in every for key, value in part.items()}


@pytest.mark.parametrize("flatten", [True, False])
def test_two_pipeline_stages_are_one_model(flatten: bool, tmp_path: Path):
    truth = run_ranks(2, write_stages, str(tmp_path / "ckpt"), flatten)[0]
    checkpoint = open_checkpoint(tmp_path / "ckpt")
    kept = {key.replace("buffer:", "param:") for key in truth}
    assert {key.replace("buffer:", "param:") for key in checkpoint.state.tensors} == kept
    for key, value in truth.items():
        name = key if key in checkpoint.state.tensors else key.replace("buffer:", "param:")
        assert np.array_equal(checkpoint.read(name), value), key
    report = inspect_checkpoint(checkpoint)
    codes = {problem.code for problem in report.problems}
    assert report.complete
    # Nested, both stages' groups have one name and the first stage's survive: its parameters are in none then.
    assert ("SR-GROUP-LOST" in codes) is not flatten


def write_unflattened(rank: int, world_size: int, folder: str) -> None:
    job = toy.build(Layout(dp_shard=world_size))
    with toy.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": get_state_dict(job.model, ())[0], "progress": job.progress}
        dcp.save(state, checkpoint_id=folder, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))


def test_a_state_dict_that_was_saved_as_one_object_has_one_rank_s_part_only(tmp_path: Path):
    run_ranks(2, write_unflattened, str(tmp_path / "ckpt"))
    report = inspect_checkpoint(open_checkpoint(tmp_path / "ckpt"))
    found = [problem for problem in report.problems if problem.code == "SR-COV-RECORD"]
    assert [problem.where["tensor"] for problem in found] == ["model"]
    assert "DTensor, of one rank" in found[0].message
    assert not report.complete


@pytest.mark.parametrize("tied", [True, False])
def test_a_further_model_is_written_where_it_is_found_again(tied: bool, tmp_path: Path):
    torch.manual_seed(0)
    model, teacher = torch.nn.Linear(7, 5), torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(7, 3))
    if tied:
        teacher[1].weight = teacher[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    with toy.quiet():
        parts = get_state_dict(model, optimizer)
        state = {"model": parts[0], "optim": parts[1], "teacher": teacher.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    carry_out(prepare(open_checkpoint(tmp_path / "ckpt"), tmp_path / "moved", to="dcp", layout=Layout(dp_shard=3)))
    target = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(7, 3)).state_dict()
    with toy.quiet():
        dcp.load({"teacher": target}, checkpoint_id=tmp_path / "moved", no_dist=True)
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(target[name], tensor), name

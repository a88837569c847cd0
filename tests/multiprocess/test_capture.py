"""Captured state on real gloo ranks: against the files, and against the framework's own full state dict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from samerun.core.digest import digest_array
from samerun.core.mesh import Layout
from samerun.errors import VerificationError
from samerun.formats.detect import open_checkpoint
from samerun.train.capture import capture_state
from samerun.verify.load.check import check_loaded
from samerun.verify.state.digest import digest_checkpoint
from support import toy
from support.gloo import run_ranks

pytestmark = pytest.mark.multiprocess

DTYPES = (torch.float32, torch.bfloat16)
SOURCES = {
    "single": Layout(),
    "ddp2": Layout(dp_replicate=2),
    "fsdp2": Layout(dp_shard=2),
    "fsdp4": Layout(dp_shard=4),
    "hsdp": Layout(dp_replicate=2, dp_shard=2),
    "tp": Layout(tp=2, dp_shard=2),
}
MOVES = [
    ("fsdp4", Layout(dp_shard=3)),
    ("fsdp4", Layout(dp_shard=2)),
    ("fsdp2", Layout(dp_shard=4)),
    ("single", Layout(dp_shard=3)),
    ("hsdp", Layout(dp_shard=3)),
    ("tp", Layout(dp_shard=3)),
    ("fsdp4", Layout(tp=2, dp_shard=2)),
    ("ddp2", Layout(dp_replicate=2, dp_shard=2)),
]


def folder_of(top: Path, dtype: torch.dtype) -> Path:
    return top / str(dtype).removeprefix("torch.")


def capture(job: toy.Job) -> dict[str, Any]:
    captured = capture_state(job.model, job.optimizer, scheduler=job.scheduler, objects=job.objects, layout=job.layout)
    return captured.to_json() | {"update": job.progress["update"]}


def write(rank: int, world_size: int, layout: Layout, top: Path) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for dtype in DTYPES:
        job = toy.build(layout, dtype=dtype)
        toy.train(job, 2)
        toy.save(job, folder_of(top, dtype))
        states[str(dtype)] = toy.full_state(job)
    return states if rank == 0 else {}


def read(rank: int, world_size: int, layout: Layout, top: Path) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for dtype in DTYPES:
        job = toy.build(layout, dtype=dtype, seed=5)
        toy.load(job, folder_of(top, dtype))
        states[str(dtype)] = (capture(job), toy.full_state(job))
    return states if rank == 0 else {}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Returns (folder, the source's full states by dtype) for a source layout; each is trained and saved once."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in made:
            top = tmp_path_factory.mktemp(name)
            made[name] = (top, run_ranks(SOURCES[name].world_size, write, SOURCES[name], top)[0])
        return made[name]

    return make


def values(state: dict[str, np.ndarray]) -> dict[str, Any]:
    return {key: (str(array.dtype), array.shape, array.tobytes()) for key, array in state.items()}


@pytest.mark.parametrize(("source", "layout"), MOVES, ids=lambda value: str(value))
def test_moved_state_is_the_saved_one(source: str, layout: Layout, saved: Any) -> None:
    top, before = saved(source)
    after = run_ranks(layout.world_size, read, layout, top)[0]
    for dtype in DTYPES:
        found, full = after[str(dtype)]
        assert values(full) == values(before[str(dtype)]), "torch itself moved the state, element for element"
        tensors = {key: array for key, array in full.items() if not key.startswith("optim.step")}
        expected = {key: digest_array(key, array) for key, array in tensors.items()}
        assert {key: fact["digest"] for key, fact in found["tensors"].items()} == expected
        counters = {key: float(full[key]) for key in full if key.startswith("optim.step")}
        assert {key: body["value"] for key, body in found["counters"].items()} == counters
        checkpoint = open_checkpoint(folder_of(top, dtype))
        try:
            files = digest_checkpoint(checkpoint)
            rekeyed = {_as_in_job(key, expected): digest for key, digest in files.items()}
            same = {key: digest for key, digest in rekeyed.items() if key in expected and key in files}
            assert same == {key: expected[key] for key in same}
            assert len(same) >= len(expected) - 2, "all but the buffers whose role the file does not tell"
            assert check_loaded(checkpoint, found, declare={}, optimizer="AdamW") == []
        finally:
            checkpoint.close()


def _as_in_job(key: str, expected: dict[str, str]) -> str:
    other = key.replace("param:", "buffer:", 1)
    return other if key not in expected and other in expected else key


# --- replicas -----------------------------------------------------------------------------------------------------


def flip_one_bit(rank: int, world_size: int, layout: Layout, top: Path, where: str) -> dict[str, Any]:
    job = toy.build(layout, seed=5)
    toy.load(job, folder_of(top, torch.float32))
    if rank == world_size - 1:
        parameter = dict(job.model.named_parameters())["module.mlp.up.weight" if where == "ddp" else "mlp.up.weight"]
        tensor: Any = parameter if where != "moment" else job.optimizer.state[parameter]["exp_avg"]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        local.view(torch.int32)[-1, -1] ^= 1
        if where == "counter":
            local.view(torch.int32)[-1, -1] ^= 1
            job.optimizer.state[parameter]["step"] += 1
    return capture(job)


@pytest.mark.parametrize(
    ("layout", "where", "key", "lead"),
    [
        (Layout(dp_replicate=2, dp_shard=2), "parameter", "param:mlp.up.weight", 2),
        (Layout(dp_replicate=2, dp_shard=2), "moment", "optim.exp_avg:mlp.up.weight", 2),
        (Layout(dp_replicate=3), "ddp", "param:mlp.up.weight", 2),
        (Layout(dp_replicate=2, dp_shard=2), "counter", "optim.step:mlp.up.weight", 3),
    ],
    ids=["hsdp", "hsdp-moment", "ddp", "counter"],
)
def test_one_flipped_bit_on_one_replica_is_named(layout: Layout, where: str, key: str, lead: int, saved: Any) -> None:
    top, _ = saved("fsdp4")
    found = run_ranks(layout.world_size, flip_one_bit, layout, top, where)
    assert all(state == found[0] for state in found), "every rank knows the same"
    with_odd = {name for part in ("tensors", "counters") for name, body in found[0][part].items() if "odd" in body}
    assert with_odd == {key}
    problems = check_loaded(open_checkpoint(folder_of(top, torch.float32)), found[0], declare={})
    assert [(problem.code, problem.where["tensor"], problem.where["rank"]) for problem in problems] == [
        ("SR-LOAD-REPLICA", key, lead)
    ]


# --- meshes and placements that no trainer of ours uses ------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def place_everywhere(rank: int, world_size: int) -> dict[str, Any]:
    full = {(a, b): torch.arange(a * b, dtype=torch.float32).reshape(a, b) for a, b in ((7, 5), (2, 9), (1, 3))}
    cube = init_device_mesh("cpu", (2, 3), mesh_dim_names=("x", "y"))
    line = cube["y"]
    tensors: dict[str, torch.Tensor] = {}
    for (a, b), tensor in full.items():
        for name, mesh, placements in (
            ("rr", cube, (Replicate(), Replicate())),
            ("rs0", cube, (Replicate(), Shard(0))),
            ("s1r", cube, (Shard(1), Replicate())),
            ("s0s1", cube, (Shard(0), Shard(1))),
            ("s0s0", cube, (Shard(0), Shard(0))),
            ("line0", line, (Shard(0),)),
            ("line1", line, (Shard(1),)),
        ):
            tensors[f"{name}_{a}x{b}"] = distribute_tensor(tensor, mesh, placements)
    tensors["plain"] = torch.ones(3)
    captured = capture_state(Holder(tensors))
    return {key: (fact.digest, fact.replicas, fact.missing_elements) for key, fact in captured.tensors.items()}


def test_any_placement_on_any_mesh() -> None:
    found = run_ranks(6, place_everywhere)[0]
    replicas = {"rr": 6, "rs0": 2, "s1r": 3, "s0s1": 1, "s0s0": 1, "line0": 2, "line1": 2}
    for key, fact in found.items():
        name, _, shape = key.removeprefix("param:").partition("_")
        if name == "plain":
            assert fact == (digest_array(key, np.ones(3, np.float32)), 6, 0)
            continue
        a, b = map(int, shape.split("x"))
        array = np.arange(a * b, dtype=np.float32).reshape(a, b)
        assert fact == (digest_array(key, array), replicas[name], 0), key


def cut_unevenly(rank: int, world_size: int) -> dict[str, Any]:
    """FSDP2 over TP where neither divides: 7 rows in two TP parts, each over two FSDP ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    whole = {f"param:{name}": toy.as_numpy(p.detach().clone()) for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    captured = capture_state(model)
    return {key: (fact.digest, digest_array(key, whole[key])) for key, fact in captured.tensors.items()}


def test_uneven_strided_shards() -> None:
    for key, (found, expected) in run_ranks(6, cut_unevenly)[0].items():
        assert found == expected, key


def hold_a_sum(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    placements = [Partial() if rank == 1 else Replicate()]
    model = Holder({"w": DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)})
    try:
        capture_state(model)
    except VerificationError as error:
        return str(error)
    return "captured"


def test_a_rank_that_cannot_digest_stops_all_of_them() -> None:
    for message in run_ranks(2, hold_a_sum):
        assert "SR-DIGEST-PLACEMENT" in message
        assert "rank 1" in message


# --- pipeline stages, disagreement, ties --------------------------------------------------------------------------


def stage(rank: int, world_size: int) -> dict[str, Any]:
    """Two stages of two data-parallel ranks each, with different keys, hyperparameters and settings."""
    torch.manual_seed(rank // 2)
    part = nn.ModuleDict({f"layer{rank // 2}": nn.Linear(3, 4), **({"norm": nn.LayerNorm(4)} if rank >= 2 else {})})
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in part.parameters()).backward()
    optimizer.step()
    progress = {"update": 1 if rank != 3 else 2}
    captured = capture_state(part, optimizer, objects={"progress": progress}, layout=Layout(pp=2, dp_shard=2))
    own = {
        **{f"param:{name}": toy.as_numpy(p.detach()) for name, p in part.named_parameters()},
        **{
            f"optim.momentum_buffer:{name}": toy.as_numpy(optimizer.state[p]["momentum_buffer"])
            for name, p in part.named_parameters()
        },
    }
    return {"found": captured.to_json(), "own": {key: digest_array(key, array) for key, array in own.items()}}


def test_keys_that_only_some_ranks_have() -> None:
    results = run_ranks(4, stage)
    found = results[0]["found"]
    assert all(result["found"] == found for result in results)
    expected = results[0]["own"] | results[2]["own"]
    assert {key: fact["digest"] for key, fact in found["tensors"].items()} == expected
    assert {fact["replicas"] for fact in found["tensors"].values()} == {2}
    names = [name for group in found["groups"] for name in group["params"]]
    assert sorted(names) == sorted(key.partition(":")[2] for key in expected if key.startswith("param:"))
    assert [(body["what"], body["rank"]) for body in found["disagreements"]] == [("object progress", 3)]


def untie(rank: int, world_size: int) -> dict[str, Any]:
    """What tensor parallelism does to a tied head: new parameters for one of the two names."""
    job = toy.build(Layout(), seed=0)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    parallelize_module(job.model, mesh, {"head": RowwiseParallel()})
    tied = capture_state(toy.build(Layout(), seed=0).model).to_json()
    return {"untied": capture_state(job.model, layout=Layout(tp=2)).to_json(), "tied": tied}


def test_a_tie_that_tensor_parallelism_broke_is_reported(saved: Any) -> None:
    top, _ = saved("single")
    results = run_ranks(2, untie)[0]
    assert results["tied"]["tensors"]["param:tok.weight"]["aliases"] == ["head.weight"]
    assert "param:head.weight" not in results["tied"]["tensors"]
    assert results["untied"]["broken_ties"] == [["tok.weight", "head.weight"]]
    problems = check_loaded(open_checkpoint(folder_of(top, torch.float32)), results["untied"], declare={})
    assert [problem.where["tensor"] for problem in problems if problem.code == "SR-LOAD-TIE"] == ["param:tok.weight"]
    assert not any(
        problem.code == "SR-LOAD-TIE"
        for problem in check_loaded(open_checkpoint(folder_of(top, torch.float32)), results["tied"], declare={})
    )


def forward_only(rank: int, world_size: int) -> bool:
    """After a forward pass alone FSDP2 leaves the root gathered; that must not change what is captured."""
    job = toy.build(Layout(dp_shard=2))
    before = capture(job)
    with torch.no_grad():
        job.model(torch.zeros(1, toy.BLOCK, dtype=torch.int64))
    dist.barrier()
    return capture(job) == before


def test_a_forward_pass_leaves_no_trace() -> None:
    assert run_ranks(2, forward_only) == [True, True]

"""Clipping where gradients lie on several meshes, which torch's own function refuses: what the recorder says of it.

Tensor parallelism beside plain sharding (norms, embedding and head have no tensor-parallel part), and experts on a
mesh of their own. The batch is dealt unevenly; one replica has an empty pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from samerun.core.batch import Dealing
from samerun.trace import read_trace
from samerun.train import ContributionMean, Recorder
from support.contribution import Case, Toy, make_model, reference, run_update
from support.experts import EXPERTS, Experts, make_experts, shard
from support.gloo import run_ranks

DEALINGS = {2: ((5, 0), (3, 4), (1, 3)), 4: ((2, 0, 3, 1), (1, 4, 0, 5))}
"""By the number of replicas: samples in each pass of each."""


def clip_per_mesh(parameters: list[Any], fraction: float) -> float:
    """Shortens the whole gradient to `fraction` of its L2 norm, which it returns: the norm of each mesh is its own."""
    by_mesh: dict[DeviceMesh, list[Any]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in held]) for held in by_mesh.values()]
    assert len(norms) > 1
    whole = torch.stack([norm.full_tensor() for norm in norms if isinstance(norm, DTensor)])
    total = torch.linalg.vector_norm(whole)
    for held in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(held, total.item() * fraction, total)
    return total.item()


class SpreadExperts(Experts):
    """The same block; its parameters are tensors over all experts, of which each rank of a mesh has its own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(0, EXPERTS)
        for name in ("up", "down"):
            whole = getattr(self, name).detach()
            setattr(self, name, torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)))
        self.number, self.group = EXPERTS // mesh.size(), mesh.get_group()

    def apply_to(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        own = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down)]
        parts = zip(tokens.split(counts.tolist()), *own, strict=True)
        return torch.cat([torch.tanh(part @ up) @ down for part, up, down in parts])


def tensor_parallel(world_size: int) -> tuple[Toy, DeviceMesh, str]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp_shard", "tp"))
    model = make_model(torch.float64)
    parallelize_module(model, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    return shard(model, mesh["dp_shard"]), mesh["dp_shard"], "dp_shard=2,tp=2"


def expert_parallel(world_size: int) -> tuple[Toy, DeviceMesh, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    flat = mesh[("dp_shard_mod_ep", "ep")]._flatten("dp_shard")
    model = make_model(torch.float64)
    model.blocks[1] = SpreadExperts(mesh["ep"])
    fully_shard(model.blocks[1], mesh=mesh["dp_shard_mod_ep"])
    model.blocks[1].set_gradient_divide_factor(float(world_size))  # each expert has met the tokens of all ranks
    fully_shard(model, mesh=flat)
    for part in (model, model.blocks[1]):
        part.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model, flat, "dp_shard=4,ep=2"


def update(
    rank: int, world_size: int, make: Callable[[int], tuple[Toy, DeviceMesh, str]], told: bool, folder: Path
) -> tuple[float, dict[str, float]]:
    """One clipped update; returns the norm that the loop knows, and each gradient's as the step used it."""
    model, mesh, layout = make(world_size)
    replica = mesh.get_local_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recorder = Recorder(folder, norms="every")
    recorder.attach(model, optimizer, layout=layout)
    recorder.loaded(update=0)
    dealing = Dealing(DEALINGS[mesh.size()])
    loss = run_update(model, ContributionMean(mesh), Case("tokens", dealing), replica)
    recorder.samples([i for part in dealing.replica_positions(replica) for i in part], loss=loss)
    with pytest.raises(RuntimeError, match="mesh"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not told:
        recorder.grad_norm()
    norm = clip_per_mesh(list(model.parameters()), 1 / 3)
    if told:
        recorder.grad_norm(norm)
    used: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    lengths = {name: gradient.full_tensor().norm().item() for name, gradient in used.items()}
    optimizer.step()
    recorder.close()
    return norm, lengths


@pytest.mark.multiprocess
@pytest.mark.parametrize("told", [True, False], ids=["told", "measured"])
@pytest.mark.parametrize("make", [tensor_parallel, expert_parallel])
def test_the_gradient_before_and_after_clipping(
    make: Callable[[int], tuple[Toy, DeviceMesh, str]], told: bool, tmp_path: Path
) -> None:
    experts = make is expert_parallel
    batch = sum(map(sum, DEALINGS[4 if experts else 2]))
    expected, _ = reference("tokens", batch, make_experts if experts else make_model)
    lengths = {name: gradient.norm().item() for name, gradient in expected.items()}
    total = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt().item()
    results = run_ranks(4, update, make, told, tmp_path)
    for norm, used in results:
        assert norm == pytest.approx(total, rel=1e-12)
        assert used == pytest.approx({name: length / 3 for name, length in lengths.items()}, rel=1e-5)
    trace = read_trace(tmp_path)
    for rank in trace.ranks:
        (line,) = rank.updates
        assert line.grad_norm == pytest.approx(total, rel=1e-6)
        assert line.step_norm == pytest.approx(total / 3, rel=1e-5)
        assert line.update_norm == pytest.approx(total / 6, rel=1e-5)
    assert trace.lead.updates[0].gradients == pytest.approx(lengths, rel=1e-5)

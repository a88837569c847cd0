"""Puts the model on a mesh: fully sharded (FSDP2), hybrid sharded (HSDP), tensor parallel, and their combinations.

One path serves every layout. `dp_replicate=N` alone is plain data parallelism (every shard group has one rank), and one
rank alone is a mesh of size one, so a checkpoint looks the same wherever it was written.
"""

from __future__ import annotations

import math

import torch
from model import GPT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

AXES = ("dp_replicate", "dp_shard", "tp")


def parse_layout(text: str) -> dict[str, int]:
    """Reads "tp=2,dp_shard=2"; axes left out are 1."""
    given = dict(part.split("=") for part in text.replace(" ", "").split(","))
    if unknown := sorted(set(given) - {*AXES, "pp", "cp", "ep"}):
        raise SystemExit(f"--layout: there is no axis {', '.join(unknown)}; this model knows {', '.join(AXES)}")
    if more := [axis for axis in ("pp", "cp", "ep") if int(given.get(axis, 1)) != 1]:
        raise SystemExit(f"--layout: this model does not do {', '.join(more)}")
    return {axis: int(given.get(axis, 1)) for axis in AXES}


def make_mesh(layout: dict[str, int], device: str) -> DeviceMesh:
    """Returns the mesh of all ranks, `tp` innermost: ranks of one tensor-parallel group are neighbours."""
    wanted, have = math.prod(layout.values()), torch.distributed.get_world_size()
    if wanted != have:
        raise SystemExit(f"--layout {layout} needs {wanted} ranks, but {have} were started")
    mesh = init_device_mesh(device, tuple(layout.values()), mesh_dim_names=AXES)
    if layout["tp"] > 1:
        mesh["dp_shard", "tp"]._flatten()  # one reduction over both, so that every rank sees the same gradient norm
    return mesh


def parallelize(model: GPT, mesh: DeviceMesh, precision: str) -> None:
    """Cuts `model` up in place. Every rank calls it with the same whole model."""
    if mesh["tp"].size() > 1:
        cut_tensors(model, mesh["tp"])
    data_mesh = mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    # "mixed": parameters stay float32 (the optimizer's masters), compute runs in bfloat16, gradients add up in float32.
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if precision == "mixed"
        else MixedPrecisionPolicy(reduce_dtype=None if precision == "float64" else torch.float32)
    )
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh, mp_policy=policy)
    fully_shard(model, mesh=data_mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can only add
            module.set_gradient_divide_factor(1.0)  # gradients are added up; the loss already carries the division


def cut_tensors(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism: heads and MLP width are cut; embedding and head are cut along the model's width.

    (The vocabulary, 259, would not divide.)
    """
    tied = model.is_tied
    plan: dict[str, ParallelStyle] = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),
        "norm": Replicated(),
        "head": RowwiseParallel(input_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        plan |= {
            f"blocks.{i}.attention_norm": Replicated(),
            f"blocks.{i}.attention.query": ColwiseParallel(),
            f"blocks.{i}.attention.key": ColwiseParallel(),
            f"blocks.{i}.attention.value": ColwiseParallel(),
            f"blocks.{i}.attention.out": RowwiseParallel(),
            f"blocks.{i}.mlp_norm": Replicated(),
            f"blocks.{i}.mlp.gate": ColwiseParallel(),
            f"blocks.{i}.mlp.up": ColwiseParallel(),
            f"blocks.{i}.mlp.down": RowwiseParallel(),
        }
    parallelize_module(model, mesh, plan)
    if tied:
        # parallelize_module gives every module parameters of its own: without a word, the head is no longer tied.
        model.tie()
        weight = model.head.weight
        if not (model.is_tied and isinstance(weight, DTensor) and weight.placements == (Shard(1),)):
            raise RuntimeError("embedding and head must be cut the same way to be tied")


class Replicated(ParallelStyle):
    """Every rank holds the whole module and runs it on the whole input.

    Its parameters become DTensors like all the others, which clipping and the optimizer want.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs),
            output_fn=lambda _, output, __: output.to_local(),
        )

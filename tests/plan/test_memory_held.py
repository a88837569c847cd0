"""The memory estimate against the tensor storages that real gloo processes hold, within a tenth."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState
from samerun.plan.memory import MemoryEstimate, estimate_memory
from samerun.plan.migration import plan_memory
from support.gloo import run_ranks
from support.held import VOCAB, WIDTH, build_model, held_by, state_of, storage_bytes
from support.manifests import manifest
from support.states import tensor

pytestmark = pytest.mark.multiprocess


def whole_state(dtype: str = "float32") -> LogicalState:
    """The state of the toy after an update on one process: what a checkpoint of it says."""
    model = build_model(dtype)
    return state_of(model, update(model, model))


def update(model: Any, loss_of: Callable[[Any], Any]) -> Any:
    """Takes one update and returns the optimizer."""
    import torch

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loss_of(torch.arange(12).reshape(2, 6) % VOCAB).backward()
    optimizer.step()
    return optimizer


def sharded(rank: int, world_size: int, text: str, dtype: str) -> dict[str, int]:
    """FSDP2, on top of tensor parallelism where the layout has some."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layout = Layout.parse(text)
    torch.manual_seed(0)
    model = build_model(dtype)
    axes = [name for name in ("dp_replicate", "dp_shard", "tp") if getattr(layout, name) > 1]
    mesh = init_device_mesh("cpu", tuple(getattr(layout, name) for name in axes), mesh_dim_names=tuple(axes))
    if layout.tp > 1:
        cut_by_tensor(model, mesh["tp"])
    if data := tuple(name for name in axes if name != "tp"):
        for unit in (*model.layers, model):
            fully_shard(unit, mesh=mesh[data])
            unit.set_force_sum_reduction_for_comms(True)
    gathered: list[int] = []
    for inner, unit in ((model.layers[0].up, [model.layers[0]]), (model.gate, [model.embed, model.gate])):
        inner.register_forward_hook(lambda *_, unit=unit: gathered.append(unsharded(unit, data)))
    return held_by(model, update(model, model)) | {"gather": max(gathered)}


def unsharded(modules: list[Any], data: tuple[str, ...]) -> int:
    """Bytes of the parameters of a unit in the middle of its forward pass; nothing is gathered without data ranks."""
    return storage_bytes([p for module in modules for p in module.parameters()]) if data else 0


def cut_by_tensor(model: Any, mesh: Any) -> None:
    """Cuts every matrix on the first dimension that divides; the tie, which torch undoes silently, is made again."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"embed": ColwiseParallel(output_layouts=Replicate())}
    plan |= {"head": RowwiseParallel(input_layouts=Replicate()), "gate": ColwiseParallel(output_layouts=Replicate())}
    plan |= {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embed.weight


def piped(rank: int, world_size: int) -> dict[str, int]:
    """Two stages of torch.distributed.pipelining; the tied matrix is on both, as it has to be."""
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    model = build_model("float32")
    if rank == 0:
        for name in ("gate", "head", "shift", "scale"):
            delattr(model, name)
        del model.layers[1]
        model.forward = lambda ids: model.layers[0](model.embed(ids))
    else:
        del model.layers[0], model.embed
        model.forward = lambda x: (
            model.head(y := model.layers[0](x + model.shift)).logsumexp(-1, keepdim=True) + model.gate(y)
        )
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda found, wanted: (found - wanted).square().mean())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.arange(12).reshape(2, 6) % VOCAB
    if rank == 0:
        schedule.step(ids)
    else:
        schedule.step(target=torch.zeros(2, 6, 2))
    optimizer.step()
    return held_by(model, optimizer)


def assert_close(estimate: MemoryEstimate, held: list[dict[str, int]]) -> None:
    for rank, found in zip(estimate.per_rank, held, strict=True):
        for part, num_bytes in found.items():
            assert getattr(rank, f"{part}_bytes") == pytest.approx(num_bytes, rel=0.10), (rank.rank, part)


SHARDED = [
    ("dp_shard=3", "float32"),
    ("dp_shard=4", "bfloat16"),
    ("dp_replicate=2,dp_shard=2", "float32"),
    ("tp=2", "float32"),
    ("dp_shard=2,tp=2", "float32"),
]


@pytest.mark.parametrize(("layout", "dtype"), SHARDED)
def test_fsdp2_hsdp_and_tensor_parallelism(layout: str, dtype: str) -> None:
    for module in ("torch.distributed.fsdp", "torch._dynamo", "torch.distributed.tensor.parallel"):  # once, for all
        importlib.import_module(module)
    held = run_ranks(Layout.parse(layout).world_size, sharded, layout, dtype)
    assert_close(estimate_memory(whole_state(dtype), Layout.parse(layout)), held)


def test_a_pipeline() -> None:
    importlib.import_module("torch.distributed.pipelining")
    held = run_ranks(2, piped)
    assert_close(estimate_memory(whole_state(), Layout(pp=2)), held)
    with pytest.raises(AssertionError):  # stages differ, so which is which shows
        assert_close(estimate_memory(whole_state(), Layout(pp=2)), held[::-1])


def chain() -> Any:
    """Many layers of which none is large, as in a real model: ranks keep whole gradients where their parts meet."""
    from torch import nn

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(20)))
    model[0].weight.requires_grad_(False)
    return model


def with_zero(rank: int, ranks: int, stage: int, bf16: bool) -> dict[str, int]:
    """ZeRO in the middle of an accumulation, when it holds most gradients; the optimizer after the update."""
    import deepspeed
    import torch

    from support import dsjob

    job, model = dsjob.Job(stage, bf16=bf16), chain()
    dsjob._quiet()
    engine, *_ = deepspeed.initialize(model=model, optimizer=dsjob.make_optimizer(job, model), config=job.config(ranks))
    gradients, kind = 0, torch.bfloat16 if bf16 else torch.float32
    for last in (False, True):
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(engine(torch.ones(1, WIDTH, dtype=kind)).float().square().mean())
        gradients = gradients or gradients_of(engine)
    engine.step()
    optimizer, params = engine.optimizer, list(engine.module.parameters())
    inner = optimizer if stage == 0 and not bf16 else optimizer.optimizer
    slots = [value for state in inner.state.values() for value in state.values() if hasattr(value, "dim")]
    masters = next((getattr(optimizer, name) for name in MASTERS if getattr(optimizer, name, None)), [])
    return {
        "parameters": storage_bytes([p.ds_tensor for p in params] if stage == 3 else params),
        "gradients": gradients,
        "optimizer": storage_bytes(slots),
        "masters": storage_bytes([part for part in masters if hasattr(part, "dim")] or [p for g in masters for p in g]),
    }


MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups")


def gradients_of(engine: Any) -> int:
    """Bytes of the gradients, with the parameters or apart from them."""
    own = [p.grad for p in engine.module.parameters() if p.grad is not None]
    apart = [part for parts in getattr(engine.optimizer, "averaged_gradients", {}).values() for part in parts or ()]
    return storage_bytes([*own, *apart])


def zero_state(bf16: bool) -> LogicalState:
    """What a checkpoint of the DeepSpeed job says: moments and, in bf16, masters of what is trained."""
    entries: list[Any] = []
    for name, parameter in chain().named_parameters():
        shape = tuple(parameter.shape)
        entries.append(tensor(f"param:{name}", shape, "bfloat16" if bf16 else "float32"))
        if parameter.requires_grad:
            slots = ["optim.exp_avg", "optim.exp_avg_sq", *(["master"] if bf16 else [])]
            entries += [tensor(f"{slot}:{name}", shape) for slot in slots]
    return LogicalState(format="zero", tensors={str(entry.key): entry for entry in entries})


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, True), (2, False), (2, True), (3, False), (3, True)])
def test_zero(stage: int, bf16: bool) -> None:
    pytest.importorskip("deepspeed")
    held = run_ranks(3, with_zero, stage, bf16)
    said = manifest(run__framework="deepspeed", run__format="zero")  # a plan goes by what the checkpoint records
    state = replace(zero_state(bf16), objects={"ds_config": {"zero_optimization": {"stage": stage}}})
    assert_close(plan_memory(said, state, Layout(dp_shard=3)), held)
    other = estimate_memory(zero_state(bf16), Layout(dp_shard=3), stage=(stage + 1) % 4)
    with pytest.raises(AssertionError):
        assert_close(other, held)

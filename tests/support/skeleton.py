"""A model with the names, shapes and ties of a checkpoint, on any layout, loaded by torch's own state-dict APIs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.formats.base import Checkpoint
from support.toy import as_numpy

_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "initial_lr")


def build_model(state: LogicalState) -> nn.Module:
    """Returns nested modules that hold every model tensor under its own name and those of its aliases, as NaN or -1."""
    root = nn.Module()
    trained = {entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.OPTIM}
    for entry in state.tensors.values():
        if entry.key.role not in (Role.PARAM, Role.BUFFER):
            continue
        dtype = getattr(torch, entry.dtype.name)
        value = torch.full(entry.shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
        if entry.key.role is Role.BUFFER:
            _owner(root, entry.key.fqn).register_buffer(entry.key.fqn.rpartition(".")[2], value)
            continue
        parameter = nn.Parameter(value, requires_grad=entry.key.fqn in trained)
        for fqn in (entry.key.fqn, *entry.aliases):
            _owner(root, fqn).register_parameter(fqn.rpartition(".")[2], parameter)
    return root


def _owner(root: nn.Module, fqn: str) -> nn.Module:
    module = root
    for part in fqn.split(".")[:-1]:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


def distribute(model: nn.Module, layout: Layout) -> nn.Module:
    """Cuts the model up: tensor parallelism where dimensions divide, then FSDP2 or HSDP."""
    mesh = init_device_mesh(
        "cpu", (layout.dp_replicate, layout.dp_shard, layout.tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    )
    if layout.tp > 1:
        _cut_tensors(model, mesh["tp"], layout)
    data = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
    counts: dict[int, int] = {}
    for child in model.children():
        for parameter in set(child.parameters()):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    for child in model.children():
        own = set(child.parameters())
        if own and all(counts[id(parameter)] == 1 for parameter in own):
            fully_shard(child, mesh=data)
    fully_shard(model, mesh=data)
    return model


def _cut_tensors(model: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in replaced:
                tensor = distribute_tensor(parameter.data, mesh, [_placement(parameter, layout)])
                replaced[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            module.register_parameter(name, replaced[id(parameter)])


def _placement(parameter: nn.Parameter, layout: Layout) -> Shard | Replicate:
    shape = parameter.shape
    if len(shape) == 2 and shape[0] % (layout.tp * layout.dp_shard) == 0 and shape[0] > shape[1]:
        return Shard(0)
    return Shard(1) if len(shape) == 2 and shape[1] % layout.tp == 0 else Replicate()


def build_optimizer(model: nn.Module, state: LogicalState) -> torch.optim.Optimizer:
    """Returns AdamW over the checkpoint's groups, with rates that it must not keep."""
    named = dict(model.named_parameters(remove_duplicate=False))
    groups: list[dict[str, Any]] = []
    for group in state.groups:
        known = {key: group.hyperparameters[key] for key in _HYPERPARAMETERS if key in group.hyperparameters}
        settings = {**known, "lr": 77.0, "weight_decay": 0.5}
        groups.append({"params": [named[fqn] for fqn in group.params], **settings})
    return torch.optim.AdamW(groups)


def load_dcp(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, names: tuple[str, str] = ("model", "optim")
) -> dict[str, Any]:
    """Loads a directory as a stock script does; returns everything else in it, asked for name by name."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    saved = metadata.state_dict_metadata
    flattened = f"{names[1]}.param_groups.0.params" not in saved
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {names[0]: model_state, names[1]: optimizer_state}
    rest = {name for name in saved if not name.startswith((f"{names[0]}.", f"{names[1]}."))}
    for name in rest:
        size, properties = getattr(saved[name], "size", None), getattr(saved[name], "properties", None)
        state[name] = torch.empty(size, dtype=properties.dtype) if size is not None and properties else None
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state[names[0]],
        optim_state_dict=state[names[1]],
        options=options,
    )
    return {name: state[name] for name in rest}


def check_loaded(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> list[str]:
    """Returns what is not, bit for bit, as the source has it: tensors, hyperparameters, groups."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    state = checkpoint.state
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    wrong: list[str] = []
    for key, entry in state.tensors.items():
        if entry.key.role in (Role.MASTER, Role.EMA):
            continue
        found = [tensors[fqn] for fqn in (entry.key.fqn, *entry.aliases)]
        if entry.key.role is Role.OPTIM:
            found = [optimizer.state[tensors[entry.key.fqn]][entry.key.slot]]
        expected = checkpoint.read(key)
        wrong += [key for tensor in found if not _same(full(tensor), expected, entry)]
    return wrong + _check_groups(model, optimizer, state)


def full(tensor: torch.Tensor) -> np.ndarray:
    """Returns a whole tensor's values, gathered where it is distributed. Every rank calls it."""
    tensor = tensor.detach()
    return as_numpy(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def _same(found: np.ndarray, expected: np.ndarray, entry: TensorEntry) -> bool:
    if entry.key.slot == "step":  # torch keeps counters in float32 whatever was saved
        return float(found) == float(expected)
    if entry.key.role is Role.OPTIM:  # and moments in the parameter's type: of bf16 weights, rounded
        expected = expected.astype(found.dtype)
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def _check_groups(model: nn.Module, optimizer: torch.optim.Optimizer, state: LogicalState) -> list[str]:
    names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    wrong: list[str] = []
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, state.groups, strict=True)):
        if [names[id(parameter)] for parameter in group["params"]] != list(saved.params):
            wrong.append(f"members of group {number}")
        wrong += [
            f"{key} of group {number}"
            for key in ("lr", "weight_decay", "betas", "eps", "initial_lr")
            if saved.params and key in saved.hyperparameters and not _equal(group.get(key), saved.hyperparameters[key])
        ]
    return wrong


def _equal(a: Any, b: Any) -> bool:
    return list(a) == list(b) if isinstance(a, list | tuple) and isinstance(b, list | tuple) else a == b


def is_first() -> bool:
    """Whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0

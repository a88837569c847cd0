"""Names for what a job holds: parameters, saved buffers and optimizer state under their owners' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from samerun.core.state import normalize_fqn
from samerun.errors import Problem, UsageError
from samerun.train.boxpart import Part

if TYPE_CHECKING:
    import torch
    from torch import nn

# Slots that count optimizer steps. They are compared as numbers: formats keep them as tensors of several types, as
# plain numbers, or once per group.
COUNTER_SLOTS = frozenset({"step"})


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensors:
    """Tensors by the name of their owner, which is the first name under which the model lists them.

    `aliases` gives the further names under which a tensor appears (tied weights).
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, tuple[str, ...]]


def as_list(value: Any) -> list[Any]:
    """Returns one thing or several things (pipeline stages, several optimizers) as a list; None as an empty one."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return list(cast("Sequence[Any]", value))
    import torch

    return list(value) if isinstance(value, torch.nn.ModuleList) else [value]


def reshard(model: nn.Module | Sequence[nn.Module]) -> None:
    """Puts every FSDP2 module back into its sharded state, the one that is saved and that the optimizer steps.

    After a forward pass without a backward pass FSDP2 leaves the root's parameters gathered.
    """
    for part in as_list(model):
        for module in part.modules():
            if hasattr(module, "reshard") and type(module).__name__.startswith("FSDP"):
                module.reshard()


def named_parameters(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Returns every parameter once, by its owner's name with wrapper prefixes taken off, in the model's order."""
    return dict(own_parameters(model).tensors)


def own_parameters(model: nn.Module | Sequence[nn.Module]) -> NamedTensors:
    """Returns every parameter once, with the names that share it.

    Raises:
        UsageError: for FSDP1's flat parameters, which have no shape or name of their own.
    """
    reshard(model)
    pairs = [
        (name, parameter)
        for part in as_list(model)
        for name, parameter in part.named_parameters(remove_duplicate=False)
    ]
    flat = [name for name, parameter in pairs if type(parameter).__name__ == "FlatParameter"]
    if flat:
        raise UsageError(
            Problem(
                "SR-DIGEST-FLAT",
                f"the model holds {len(flat)} flat parameters of FullyShardedDataParallel",
                where={"tensor": flat[0]},
                hint="wrap with fully_shard (FSDP2), or pass use_orig_params=True and unsharded parameters",
            )
        )
    return _deduplicate(pairs)


def named_buffers(model: nn.Module | Sequence[nn.Module], *, persistent_only: bool = True) -> dict[str, torch.Tensor]:
    """Returns every buffer once, by its owner's name; by default only those that a checkpoint holds."""
    return dict(own_buffers(model, persistent_only=persistent_only).tensors)


def own_buffers(model: nn.Module | Sequence[nn.Module], *, persistent_only: bool = True) -> NamedTensors:
    """Returns every buffer once, with the names that share it."""
    pairs: list[tuple[str, torch.Tensor]] = []
    for part in as_list(model):
        for prefix, module in part.named_modules(remove_duplicate=False):
            hidden = module._non_persistent_buffers_set if persistent_only else set[str]()
            pairs += [
                (f"{prefix}.{name}" if prefix else name, buffer)
                for name, buffer in module._buffers.items()
                if buffer is not None and name not in hidden
            ]
    return _deduplicate(pairs)


def named_average(average: nn.Module | Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Returns the tensors of an average of the model by the averaged parameter's name, in its own order.

    Of a module (`torch.optim.swa_utils.AveragedModel`, a copy of the model) its parameters count.
    """
    if average is None:
        return {}
    if not isinstance(average, Mapping):
        return named_parameters(average)
    return {normalize_fqn(name): tensor for name, tensor in average.items()}


def _deduplicate(pairs: list[tuple[str, torch.Tensor]]) -> NamedTensors:
    owners: dict[Any, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, list[str]] = {}
    for original, tensor in pairs:
        name = normalize_fqn(original)
        owner = owners.setdefault(_identity(tensor), name)
        if owner == name:
            tensors.setdefault(name, tensor)
        elif name not in aliases.setdefault(owner, []):
            aliases[owner].append(name)
    return NamedTensors(tensors, {owner: tuple(names) for owner, names in aliases.items() if names})


def _identity(tensor: Any) -> Any:
    """Returns what two names must agree on to be one tensor: the memory itself, or the object if it has none."""
    if isinstance(tensor, Part):
        return id(tensor)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.numel() == 0 or local.device.type == "meta":
        return id(tensor)
    return (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride())


def parameter_names(model: nn.Module | Sequence[nn.Module]) -> dict[int, str]:
    """Returns the owner's name of every parameter object, by `id`."""
    parameters = own_parameters(model)
    by_memory = {_identity(tensor): name for name, tensor in parameters.tensors.items()}
    return {
        id(parameter): by_memory[_identity(parameter)] for part in as_list(model) for parameter in part.parameters()
    }


def named_optimizer_tensors(model: nn.Module | Sequence[nn.Module], optimizer: Any) -> dict[str, torch.Tensor | Part]:
    """Returns every tensor of the optimizer's state by key, step counters included, and masters where it has them."""
    import torch

    masters = {f"master:{name}": value for name, value in optimizer_masters(model, optimizer)}
    return masters | {
        f"optim.{slot}:{name}": value
        for name, slot, value in optimizer_slots(model, optimizer)
        if isinstance(value, torch.Tensor | Part)
    }


def optimizer_slots(model: nn.Module | Sequence[nn.Module], optimizer: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields (parameter name, slot, value) for everything in the optimizer's state; nested slots are joined by dots.

    Parameters that the model does not have are left out here; `groups_by_name` reports them.
    """
    names = parameter_names(model)
    for part in as_list(optimizer):
        for parameter, state in part.state.items():
            name = names.get(id(parameter))
            if name is not None and isinstance(state, Mapping):
                for slot, value in _flatten("", cast("Mapping[Any, Any]", state)):
                    yield name, slot, value


def optimizer_masters(
    model: nn.Module | Sequence[nn.Module], optimizer: Any
) -> Iterator[tuple[str, torch.Tensor | Part]]:
    """Yields (parameter name, master) of an optimizer that steps wider copies, and shows them as `masters`."""
    names = parameter_names(model)
    for part in as_list(optimizer):
        for parameter, master in getattr(part, "masters", {}).items():
            if (name := names.get(id(parameter))) is not None:
                yield name, master


def _flatten(prefix: str, state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        slot = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(f"{slot}.", cast("Mapping[Any, Any]", value))
        elif isinstance(value, list | tuple):
            yield from _flatten(f"{slot}.", dict(enumerate(cast("Sequence[Any]", value))))
        elif value is not None:
            yield slot, value

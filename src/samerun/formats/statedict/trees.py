"""The state dicts of a model and of an optimizer as trees that `emit_pickle` takes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.errors import Problem, Severity
from samerun.formats.statedict.optimizers import WrittenOptimizer
from samerun.formats.torchfile.nodes import Number, Tensor, whole


def write_model(state: LogicalState, *roles: Role) -> OrderedDict[str, Tensor]:
    """Returns a model's state dict: module by module in the state's order, buffers behind parameters, aliases last."""
    entries = [entry for entry in state.tensors.values() if entry.key.role in roles]
    first: dict[str, int] = {}
    for entry in entries:
        first.setdefault(entry.key.fqn.rpartition(".")[0], len(first))
    ordered = sorted(
        entries, key=lambda entry: (first[entry.key.fqn.rpartition(".")[0]], entry.key.role is Role.BUFFER)
    )
    model: OrderedDict[str, Tensor] = OrderedDict()
    aliases: list[tuple[str, Tensor]] = []
    for entry in ordered:
        tensor = whole(str(entry.key), entry.dtype, entry.shape)
        model[entry.key.fqn] = tensor
        aliases += [(alias, Tensor(tensor.storage, tensor.shape)) for alias in entry.aliases]
    model.update((name, tensor) for name, tensor in aliases if name not in model)
    return model


def write_optimizer(optimizer: WrittenOptimizer) -> dict[str, Any]:
    """Returns an optimizer's state dict: members numbered group by group, their names beside the numbers."""
    number = {fqn: i for i, fqn in enumerate(fqn for group in optimizer.groups for fqn in group.params)}
    for fqn in optimizer.slots:
        number.setdefault(fqn, len(number))
    if not number and not optimizer.groups:
        return {}
    states = {number[fqn]: _slots(slots) for fqn, slots in optimizer.slots.items()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.groups:
        named = not any(fqn.startswith("#") for fqn in group.params)
        names = {"param_names": list(group.params)} if named else {}
        groups.append({**group.settings, "params": [number[fqn] for fqn in group.params], **names})
    return {"state": states, "param_groups": groups}


def _slots(slots: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Returns one parameter's state. A counter that was an integer in the source is one again: torch converts it."""
    found: dict[str, Any] = {}
    for slot, entry in slots.items():
        counter = slot == "step" and entry.shape == () and entry.dtype.name == "int64"
        node = found
        *outer, last = slot.split(".")
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = Number(str(entry.key)) if counter else whole(str(entry.key), entry.dtype, entry.shape)
    return found


def check_positions(state: LogicalState) -> tuple[Problem, ...]:
    """Notes that positions hold for a job that fills its groups as the source did."""
    if not state.groups:
        return ()
    return (
        Problem(
            "SR-WRITE-POSITIONS",
            f"optimizer state is numbered in the order of the source's {len(state.groups)} parameter groups",
            severity=Severity.NOTE,
            hint="torch compares the number of parameters only: the job must build its optimizer over the same groups "
            "in the same order; the names lie beside the numbers as param_names",
        ),
    )

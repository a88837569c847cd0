"""An optimizer of the logical state, ready to be written: groups with their members, and each member's slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.errors import Problem, Severity
from samerun.formats.statedict.carry import writable_settings
from samerun.formats.statedict.optimizer import MASTER_SLOTS

# What torch.optim's Adam and AdamW (2.13) keep in a group beside what defines the update, with the value that means
# nothing special. AdamW sets `decoupled_weight_decay` itself whatever it loads.
_ADAM = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class WrittenGroup:
    """One parameter group: FQNs in order, and hyperparameters ready to be written."""

    params: tuple[str, ...]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class WrittenOptimizer:
    """All groups, and by parameter the slots: name to the tensor of the state. Masters are slots like others."""

    groups: tuple[WrittenGroup, ...]
    slots: Mapping[str, Mapping[str, TensorEntry]]
    dropped: Mapping[str, str]
    problems: tuple[Problem, ...]


def plan_optimizer(state: LogicalState) -> WrittenOptimizer:
    """Collects what an optimizer's state dict is made of. Members come in the order of the groups."""
    slots: dict[str, dict[str, TensorEntry]] = {}
    for entry in state.tensors.values():
        if entry.key.role in (Role.OPTIM, Role.MASTER):
            slots.setdefault(entry.key.fqn, {})[_slot_name(entry)] = entry
    groups: list[WrittenGroup] = []
    dropped: dict[str, str] = {}
    completed: set[str] = set()
    for number, group in enumerate(state.groups):
        settings, left_out = writable_settings(group.hyperparameters)
        dropped |= {f"group {number}: {name}": why for name, why in left_out.items()}
        if _is_adam(settings):
            added = {name: value for name, value in _ADAM.items() if name not in settings}
            completed |= added.keys()
            settings |= added
        groups.append(WrittenGroup(group.params, settings))
    listed = [fqn for group in groups for fqn in group.params]
    ordered = {fqn: _step_first(slots[fqn]) for fqn in dict.fromkeys([*listed, *slots]) if fqn in slots}
    problems = [_completed(sorted(completed))] if completed else []
    if loose := [fqn for fqn in ordered if fqn not in set(listed)]:
        problems.append(_without_group(loose, bool(groups)))
    if masters := [entry for entry in state.tensors.values() if entry.key.role is Role.MASTER]:
        problems.append(_masters_apart(masters))
    return WrittenOptimizer(tuple(groups), ordered, dropped, tuple(problems))


def _is_adam(settings: Mapping[str, Any]) -> bool:
    """Whether a group is one of Adam's. torch's NAdam, RAdam and Adamax have betas too, and never `amsgrad`."""
    of_torch = settings.keys() & {"maximize", "foreach", "momentum_decay"}
    return "betas" in settings and "eps" in settings and ("amsgrad" in settings or not of_torch)


def _slot_name(entry: TensorEntry) -> str:
    if entry.key.role is not Role.MASTER:
        return entry.key.slot or "state"
    last = entry.original.rpartition(".")[2]
    return last if last in MASTER_SLOTS else "master"


def _step_first(slots: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    return dict(sorted(slots.items(), key=lambda item: item[0] != "step"))


def _completed(names: list[str]) -> Problem:
    return Problem(
        "SR-WRITE-SETTINGS",
        f"the source's groups keep no {', '.join(names)}; torch's Adam does, so neutral values are written",
        severity=Severity.NOTE,
        hint="a job that wants other values sets them after loading",
    )


def _without_group(names: list[str], has_groups: bool) -> Problem:
    return Problem(
        "SR-WRITE-GROUPLESS",
        f"{len(names)} parameters have optimizer state but are in no parameter group, the first is {names[0]}",
        where={"tensor": names[0]},
        severity=Severity.ERROR if has_groups else Severity.WARNING,
        hint="optimizer state is loaded by group; convert from a checkpoint that holds the groups",
    )


def _masters_apart(masters: list[TensorEntry]) -> Problem:
    first = masters[0]
    return Problem(
        "SR-WRITE-MASTERS",
        f"torch.optim has no place for the {len(masters)} {first.dtype.name} masters",
        where={"tensor": str(first.key)},
        hint="--masters params makes them the parameters, for a job that keeps fp32 parameters (FSDP2 mixed precision, "
        "autocast); --masters drop leaves them out; --masters slots writes them as optimizer slots `master`, which a "
        "job has to copy from",
    )

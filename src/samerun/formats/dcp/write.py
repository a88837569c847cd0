"""Lays out a `torch.distributed.checkpoint` directory: `.metadata` and one `__<rank>_0.distcp` per rank.

Parameters and their optimizer state are cut along their first dimension as FSDP2 cuts them (`torch.chunk`), buffers and
scalars are whole. Any job loads any cut; a fitting one only saves each rank from reading what it does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role
from samerun.core.written import DestinationPlan
from samerun.errors import Problem
from samerun.formats.base import WriteSource
from samerun.formats.dcp.names import OptimizerNames, flatten_sections, model_paths
from samerun.formats.dcpfile.directory import Directory
from samerun.formats.statedict.carry import carry_objects
from samerun.formats.statedict.optimizers import plan_optimizer
from samerun.formats.torchfile.nodes import Number, Tensor
from samerun.formats.torchfile.write import gather_slots


def lay_out(source: WriteSource, layout: Layout | None = None) -> DestinationPlan:
    """Plans the directory. Without a layout it is cut as the source was, into one file if that is not known.

    Raises:
        PlanError: if two items would have one name.
    """
    state = source.state
    cut = layout or _cut_as_before(state)
    optimizer = plan_optimizer(state)
    names = OptimizerNames(state, optimizer)
    carried = carry_objects(state, numpy=True)
    directory = Directory(cut)
    for path, value in (*names.groups(optimizer.groups), *flatten_sections(carried.sections)):
        if not isinstance(value, Tensor):
            directory.add_object(path, value)
    for entry, path in model_paths(state):
        directory.add_tensor(path, entry)
    for fqn, slots in optimizer.slots.items():
        for slot, entry in slots.items():
            if state.format == "dcp" and entry.shape == () and entry.dtype.name == "int64":
                directory.add_object(names.slot(fqn, slot), Number(str(entry.key)))
            else:
                directory.add_tensor(names.slot(fqn, slot), entry)
    for path, value in (*names.groups(optimizer.groups), *flatten_sections(carried.sections)):
        if isinstance(value, Tensor):
            directory.add_known(path, value)
    files = directory.finish()
    return DestinationPlan(
        format="dcp",
        files=files,
        tensors=gather_slots([pieces.slots for pieces in directory.written]),
        dropped={**carried.dropped, **optimizer.dropped},
        problems=(*carried.problems, *optimizer.problems, *_check_names(state), *_check_slots(state, carried.sections)),
    )


def _cut_as_before(state: LogicalState) -> Layout:
    found = state.topology.layout
    return Layout(dp_shard=found.dp_shard, cp=found.cp) if found else Layout()


def _check_slots(state: LogicalState, sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Checks that no slot of the optimizer is an object under a position: a job asks for slots by FQN."""
    for name, section in sections.items() if state.format != "dcp" else ():
        held = section.get("state") if isinstance(section, Mapping) else None
        if isinstance(held, Mapping) and held and all(str(key).isdecimal() for key in held):
            slots = sorted({str(slot) for slots in held.values() if isinstance(slots, Mapping) for slot in slots})
            yield Problem(
                "SR-WRITE-OBJECT",
                f"{name}.state keeps {', '.join(slots)} beside tensors, by position: no job finds them in dcp",
                where={"key": f"{name}.state"},
                hint="convert to torch, which keeps them where they were, or allow it: --allow SR-WRITE-OBJECT",
            )


def _check_names(state: LogicalState) -> tuple[Problem, ...]:
    """Checks that every parameter with optimizer state has a name: DCP keeps nothing by position."""
    nameless = sorted(
        {
            entry.key.fqn
            for entry in state.tensors.values()
            if entry.key.role in (Role.OPTIM, Role.MASTER) and entry.key.fqn.startswith("#")
        }
    )
    if not nameless:
        return ()
    return (
        Problem(
            "SR-WRITE-NAMELESS",
            f"optimizer state of {len(nameless)} parameters is known by position only, the first is {nameless[0]}",
            where={"tensor": nameless[0]},
            hint="no job finds it under such a name; convert from a checkpoint that has names (param_names will do)",
        ),
    )

"""The order of parameters in their groups after a name map that cuts, joins or stacks tensors.

torch.optim and ZeRO know parameters by position. A map that only renames keeps the source's order; one that makes other
tensors cannot know the order in which the destination's model registers them, so the usual one is taken, and said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samerun.convert.view import StateView
from samerun.core.state import ParamGroup
from samerun.errors import Problem, Severity
from samerun.formats.base import Checkpoint
from samerun.formats.mapped import MappedCheckpoint
from samerun.formats.statedict.registration import usual_order

BY_POSITION = ("torch", "huggingface", "zero")


def settle_order(source: Checkpoint, to: str) -> tuple[Checkpoint, tuple[Problem, ...]]:
    """Returns the checkpoint with its groups in usual order, if a map made other tensors, and a finding if it matters.

    Megatron's own order is that of its rules, whatever the groups say.
    """
    if to == "megatron" or not any(_makes_others(mapped) for mapped in _maps(source)):
        return source, ()
    rank = {fqn: number for number, fqn in enumerate(usual_order(_members(source.state.groups)))}
    groups = tuple(
        replace(group, params=tuple(sorted(group.params, key=rank.__getitem__))) for group in source.state.groups
    )
    problems = (_usual(len(rank)),) if rank and to in BY_POSITION else ()
    return StateView(source, replace(source.state, groups=groups)), problems


def _maps(source: Checkpoint) -> Iterator[MappedCheckpoint]:
    while isinstance(source, MappedCheckpoint):
        yield source
        source = source.source


def _makes_others(mapped: MappedCheckpoint) -> bool:
    """Whether some parameter of a group becomes several, or several become one."""
    before = len(set(_members(mapped.source.state.groups)))
    renamed = [mapped.names.rename(fqn) for fqn in set(_members(mapped.source.state.groups))]
    return any(len(names) != 1 for names in renamed) or before != len(set(_members(mapped.state.groups)))


def _members(groups: tuple[ParamGroup, ...]) -> Iterator[str]:
    return (fqn for group in groups for fqn in group.params)


def _usual(count: int) -> Problem:
    return Problem(
        "SR-MAP-ORDER",
        f"the map makes other tensors, so the {count} parameters stand in their groups in the order in which models "
        "with such names usually register them; the destination keeps optimizer state by that position",
        severity=Severity.WARNING,
        where={"key": "param_groups"},
        hint="compare with the order of model.named_parameters() within each group: the names lie beside the numbers "
        "as param_names (torch, huggingface), in param_shapes (zero). `--to universal` and `--to dcp` go by name",
    )

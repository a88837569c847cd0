"""The two parameter groups of a stock Trainer, made of the groups that a state has.

Trainer (transformers 5.24, `create_optimizer`) deals the trained parameters, in the order in which the model names
them, to two groups: those that decay, then those that do not, which are every parameter of an `nn.LayerNorm` and every
one whose name says bias or norm. An optimizer's state dict knows positions only, so the deal decides what is loaded
where. Hyperparameters come from the checkpoint: dealing one group to two changes no update.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from samerun.core.state import LogicalState, ParamGroup, Role
from samerun.errors import Problem, Severity

# `get_decay_parameter_names` of transformers 5.24, searched for in the lower-case name.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Dealt:
    """The groups to write, and whether they are one of the source's dealt to two."""

    groups: tuple[ParamGroup, ...]
    split: bool = False
    problems: tuple[Problem, ...] = ()


def deal_groups(state: LogicalState) -> Dealt:
    """Returns a state's groups as Trainer has them. Where they cannot be, they stay as they are, with a finding."""
    groups = state.groups
    if not groups or any(fqn.startswith("#") for group in groups for fqn in group.params):
        return Dealt(groups)
    ndim = {entry.key.fqn: len(entry.shape) for entry in state.tensors.values() if entry.key.role is Role.PARAM}
    if len(groups) == 1:
        return _split(groups[0], ndim)
    if len(groups) == 2:
        first, second = groups
        for decaying, rest in ((first, second), (second, first)):
            if not _strays(decaying, rest, ndim):
                return Dealt((decaying, rest))
    return Dealt(groups, problems=(_other(groups, ndim),))


def _split(group: ParamGroup, ndim: Mapping[str, int]) -> Dealt:
    """Deals one group to two: optimizers kept by name lose the border between groups with equal settings."""
    unsure = [fqn for fqn in group.params if not _NO_DECAY.search(fqn.lower()) and ndim.get(fqn) == 1]
    guessed = frozenset(unsure)
    rest = tuple(fqn for fqn in group.params if fqn in guessed or _NO_DECAY.search(fqn.lower()))
    decaying = tuple(fqn for fqn in group.params if fqn not in set(rest))
    made = (ParamGroup(decaying, group.hyperparameters), ParamGroup(rest, group.hyperparameters))
    return Dealt(made, split=True, problems=(_dealt(made, unsure),))


def _strays(decaying: ParamGroup, rest: ParamGroup, ndim: Mapping[str, int]) -> list[str]:
    """Returns what Trainer would not have put where it is. A vector of any name may be an `nn.LayerNorm`'s."""
    wrong = [fqn for fqn in decaying.params if _NO_DECAY.search(fqn.lower())]
    return wrong + [fqn for fqn in rest.params if not _NO_DECAY.search(fqn.lower()) and ndim.get(fqn, 1) != 1]


def _dealt(groups: tuple[ParamGroup, ParamGroup], unsure: list[str]) -> Problem:
    first, second = (len(group.params) for group in groups)
    guess = (
        f"; {len(unsure)} vectors whose names do not say so are taken for those of an nn.LayerNorm: "
        f"{', '.join(unsure[:_SHOWN])}"
        if unsure
        else ""
    )
    return Problem(
        "SR-HFW-DEALT",
        f"the source's one parameter group is dealt to Trainer's two, {first} with decay and {second} without{guess}",
        severity=Severity.WARNING if unsure else Severity.NOTE,
        hint="settings are as in the source, so updates are; compare param_names in optimizer.pt with the groups of "
        "Trainer.create_optimizer where names do not tell",
    )


def _other(groups: tuple[ParamGroup, ...], ndim: Mapping[str, int]) -> Problem:
    if len(groups) == 2:
        first, second = groups
        strays = min(_strays(first, second, ndim), _strays(second, first, ndim), key=len)
        why = f"{', '.join(strays[:_SHOWN])} would be in the other one"
    else:
        why = f"there are {len(groups)} of them"
    return Problem(
        "SR-HFW-GROUPS",
        f"the source's parameter groups are not those that Trainer makes: {why}",
        severity=Severity.WARNING,
        hint="they are written as they are. A Trainer resumes from them only with an optimizer of the same groups, "
        "given as `optimizers=` or made in `create_optimizer`; a stock one refuses, or mixes up moments",
    )

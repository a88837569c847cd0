"""Parameter groups of an optimizer that was none of Megatron's, dealt as Megatron deals them.

Megatron makes its groups by rule (`samerun.formats.mcore.groups`): without experts, one of everything that decays and
one of what has a single dimension or is a bias. It finds a saved group by `wd_mult`, `lr_mult`, `is_expert_parallel`
and `is_decoupled_lr`, and takes every setting from it, so what its optimizer asks for must be there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from samerun.core.state import LogicalState, ParamGroup, Role
from samerun.errors import Problem, Severity
from samerun.formats.mcore.order import decays

IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_STACKED = re.compile(r"(?:^|\.)layers\.(?!\d)")
_RATES = ("lr", "betas", "eps")
_SHOWN = 3


def is_foreign(state: LogicalState) -> bool:
    """Whether no group says anything by which Megatron would find it."""
    return bool(state.groups) and not any(
        name in group.hyperparameters or f"pre_{name}" in group.hyperparameters
        for group in state.groups
        for name in IDENTITY
    )


def deal_foreign(state: LogicalState) -> tuple[tuple[ParamGroup, ...] | None, list[Problem]]:
    """Returns Megatron's groups with the source's settings, None where they cannot be dealt; findings."""
    ndim = {
        entry.key.fqn: len(entry.shape) - (_STACKED.search(entry.key.fqn) is not None)
        for entry in state.tensors.values()
        if entry.key.role is Role.PARAM
    }
    sides: dict[bool, list[tuple[str, Mapping[str, Any]]]] = {True: [], False: []}
    for group in state.groups:
        for fqn in group.params:
            sides[decays(fqn, ndim.get(fqn, 2))].append((fqn, group.hyperparameters))
    if problems := [problem for side, members in sides.items() for problem in _check_alike(members, decaying=side)]:
        return None, problems
    made = tuple(_made(members, decaying=side) for side, members in sides.items() if members)
    return made, [*_check_decay(sides[False]), *_check_rates(sides), _dealt(made)]


def _made(members: list[tuple[str, Mapping[str, Any]]], *, decaying: bool) -> ParamGroup:
    settings = dict(members[0][1])
    settings |= {"wd_mult": float(decaying), "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    settings["default_config"] = True
    if "betas" in settings:
        settings.setdefault("bias_correction", True)  # Adam's, which Apex and Transformer Engine keep in the group
    return ParamGroup(tuple(fqn for fqn, _ in members), settings)


def _check_alike(members: list[tuple[str, Mapping[str, Any]]], *, decaying: bool) -> list[Problem]:
    """Reports members of one of Megatron's groups that have different settings in the source."""
    if not members:
        return []
    first, settings = members[0]
    found: list[Problem] = []
    for name in (*_RATES, "weight_decay"):
        odd = [(fqn, other) for fqn, other in members if _plain(other.get(name)) != _plain(settings.get(name))]
        if not odd:
            continue
        what = "that decay" if decaying else "of one dimension, and biases"
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        shown = ", ".join(fqn for fqn, _ in odd[:_SHOWN]) + more
        found.append(
            Problem(
                "SR-MGW-GROUPS",
                f"Megatron has one group for all parameters {what}, and the source gives {shown} another {name} than "
                f"{first}",
                where={"tensor": f"param:{odd[0][0]}"},
                expected=settings.get(name),
                found=odd[0][1].get(name),
                hint="no setting is chosen for them: train on once with Megatron's groups (decay for matrices alone, "
                "one rate), or allow it (--allow SR-MGW-GROUPS) and load the weights alone (--no-load-optim)",
            )
        )
    return found


def _check_decay(members: list[tuple[str, Mapping[str, Any]]]) -> list[Problem]:
    decay = members[0][1].get("weight_decay") if members else 0
    if not decay:
        return []
    return [
        Problem(
            "SR-MGW-GROUPS",
            f"the source's parameters of one dimension decay ({members[0][0]}), and Megatron's never do",
            where={"tensor": f"param:{members[0][0]}"},
            expected="weight_decay 0",
            found=f"weight_decay {decay}",
            hint="the group is written with the source's setting, which Megatron's schedule overwrites with 0 at the "
            "first update. If that change is meant, allow it: --allow SR-MGW-GROUPS",
        )
    ]


def _check_rates(sides: Mapping[bool, list[tuple[str, Mapping[str, Any]]]]) -> list[Problem]:
    rates = [members[0][1].get("lr") for members in sides.values() if members]
    if len(rates) < 2 or rates[0] == rates[1]:
        return []
    return [
        Problem(
            "SR-MGW-GROUPS",
            "the source's matrices and its vectors have different rates, and Megatron's schedule gives both one",
            where={"key": "lr"},
            expected=rates[0],
            found=rates[1],
            hint="the groups are written with the source's rates, which the schedule overwrites at the first update. "
            "If that change is meant, allow it: --allow SR-MGW-GROUPS",
        )
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _dealt(groups: tuple[ParamGroup, ...]) -> Problem:
    shown = ", ".join(
        f"{len(group.params)} with weight_decay {group.hyperparameters.get('weight_decay')}" for group in groups
    )
    return Problem(
        "SR-MGW-REGROUPED",
        f"the source's parameter groups are dealt as Megatron deals them: {shown}",
        severity=Severity.NOTE,
        where={"key": "param_groups"},
        hint="settings are the source's; wd_mult, lr_mult and the like, by which Megatron finds a group, are added. "
        "Give the job the same --weight-decay, betas and eps",
    )

"""Parameter groups: Megatron saves their hyperparameters, and which parameters are in which follows from rules.

Rules of megatron.core 0.13 to 0.19 (`_get_param_groups`): one-dimensional parameters and biases have no weight decay,
experts under expert parallelism have groups of their own, and so have embedding and output layer with a rate of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.state import ParamGroup
from samerun.errors import Problem, Severity
from samerun.formats.mcore.order import decays

_OWN_RATE = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True, slots=True)
class Member:
    """A trained tensor as groups see it: its name, its number of dimensions on a rank, and whether it is an expert."""

    fqn: str
    ndim: int
    expert: bool


def assign_groups(
    saved: Sequence[Mapping[str, Any]], members: Iterable[Member], where: str
) -> tuple[tuple[ParamGroup, ...], list[Problem]]:
    """Returns the groups with their parameters. Parameters that fit no group, or several, are a finding."""
    own_rate = any(group.get("is_decoupled_lr") for group in saved)
    params: list[list[str]] = [[] for _ in saved]
    lost: list[str] = []
    for member in members:
        own = [number for number, group in enumerate(saved) if fits(group, member, own_rate)]
        if len(own) == 1:
            params[own[0]].append(member.fqn)
        else:
            lost.append(member.fqn)
    groups = tuple(
        ParamGroup(tuple(names), {str(key): value for key, value in group.items() if key != "params"})
        for names, group in zip(params, saved, strict=True)
    )
    return groups, [_unassigned(lost, len(saved), where)] if lost and saved else []


def fits(group: Mapping[str, Any], member: Member, own_rate: bool) -> bool:
    """Whether a parameter is in a group; `own_rate` tells whether embedding and output layer have groups of theirs."""
    apart = own_rate and member.fqn in _OWN_RATE
    return (
        bool(group.get("is_expert_parallel")) == member.expert
        and bool(group.get("is_decoupled_lr")) == apart
        and (group.get("wd_mult", 1.0) != 0.0) == decays(member.fqn, member.ndim)
    )


def saved_groups(value: Any) -> list[dict[str, Any]]:
    """Returns the parameter groups of an optimizer's state, or of several chained ones, in order."""
    if isinstance(value, list):
        return [group for item in value for group in saved_groups(item)]
    if not isinstance(value, dict):
        return []
    groups = value.get("param_groups")
    if isinstance(groups, list):
        return [group for group in groups if isinstance(group, dict)]
    return [
        group for key, item in value.items() if key == "optimizer" or is_number(key) for group in saved_groups(item)
    ]


def is_number(key: Any) -> bool:
    """Whether a key numbers one of several chained optimizers."""
    return isinstance(key, int) or (isinstance(key, str) and key.isdigit())


def merge_groups(found: Iterable[Sequence[dict[str, Any]]]) -> tuple[list[dict[str, Any]], bool]:
    """Returns the groups of all ranks, each once, and whether ranks agree. Every rank saves the same ones."""
    merged: list[dict[str, Any]] = []
    agree = True
    by_place: dict[tuple[bool, int], dict[str, Any]] = {}
    for groups in found:
        for number, group in enumerate(groups):
            settings = {str(key): value for key, value in group.items() if key != "params"}
            place = (bool(group.get("is_expert_parallel")), number)
            known = by_place.setdefault(place, settings)
            if known is settings:
                merged.append(settings)
            agree = agree and known == settings
    return merged, agree


def _unassigned(names: Sequence[str], num_groups: int, where: str) -> Problem:
    return Problem(
        "SR-MEG-GROUPS",
        f"which of {num_groups} parameter groups {len(names)} parameters are in cannot be told: "
        f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}",
        severity=Severity.WARNING,
        where={"file": where, "tensor": names[0]},
        hint="Megatron saves hyperparameters without names. The run has groups by rules of its own; compare weight "
        "decay and rate of these parameters after loading",
    )


def settings_problem(where: str) -> Problem:
    """Returns the finding for ranks that disagree about hyperparameters."""
    return Problem(
        "SR-MEG-SETTINGS",
        "ranks disagree about the hyperparameters of parameter groups",
        where={"file": where},
        hint="every rank must step with the same rate and decay; parts of two saves may be mixed in this directory",
    )

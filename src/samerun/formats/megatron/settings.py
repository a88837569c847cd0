"""Parameter groups as the distributed optimizer loads them: one optimizer, or a dense and an expert one in a chain.

Parameters of experts are apart only under expert parallelism (`allreduce` is not set, megatron.core 0.16), so the same
run has other groups at ep=1 and at ep>1. The step is part of every group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samerun.core.state import LogicalState, ParamGroup
from samerun.errors import Problem
from samerun.formats.megatron.foreign import IDENTITY, deal_foreign, is_foreign
from samerun.formats.statedict.carry import writable_settings

_EXPERT = "is_expert_parallel"


@dataclass(slots=True)
class Settings:
    """The groups of each optimizer of the chain; settings that differ from the source's by name, with why; findings."""

    chain: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    changed: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])


def is_expert(fqn: str) -> bool:
    """Whether a parameter is one of routed experts."""
    return ".experts." in fqn


def plan_settings(state: LogicalState, ep: int, step_of: Callable[[str], Any]) -> Settings:
    """Returns the groups for a job with that degree of expert parallelism. `step_of` gives a parameter's step."""
    found = Settings()
    groups: Sequence[ParamGroup] = state.groups
    if is_foreign(state):
        dealt, found.problems = deal_foreign(state)
        if dealt is None:
            for group in state.groups:
                _leave_out(found, group.params)
            return found
        groups = dealt
    experts = any(is_expert(fqn) for group in groups for fqn in group.params)
    dense: list[dict[str, Any]] = []
    routed: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        settings, left_out = writable_settings(group.hyperparameters)
        found.changed |= {f"group {number}: {name}": why for name, why in left_out.items()}
        if missing := [name for name in IDENTITY if name not in settings and f"pre_{name}" not in settings]:
            found.problems.append(_nameless(number, missing))
            _leave_out(found, group.params)
            continue
        if not _add_step(found, settings, group.params, step_of, number):
            continue
        if ep > 1 and experts:
            mine = [fqn for fqn in group.params if is_expert(fqn)]
            if settings[_EXPERT] or mine:
                _add(found, routed, {**settings, _EXPERT: True}, number)
            if not settings[_EXPERT]:
                dense.append(settings)
                _mark(found, mine)
            continue
        if settings[_EXPERT]:
            _mark(found, group.params)
        _add(found, dense, {**settings, _EXPERT: False}, number)
    found.chain = [dense, routed] if routed else [dense]
    return found


def _leave_out(found: Settings, params: Sequence[str]) -> None:
    """Says of members of a group that is not written that their step is nowhere: Megatron keeps it in the group."""
    found.changed |= {f"optim.step:{fqn}": "its parameter group is not written" for fqn in params}


def _mark(found: Settings, params: Sequence[str]) -> None:
    for fqn in params:
        found.changed[f"param:{fqn} {_EXPERT}"] = "experts are a group of their own under expert parallelism only"


def _add(found: Settings, groups: list[dict[str, Any]], settings: dict[str, Any], number: int) -> None:
    """Adds a group unless there is one of that identity, which must then have the same settings."""
    for known in groups:
        if all(known.get(name) == settings.get(name) for name in IDENTITY):
            if known != settings:
                found.problems.append(_disagree(number, known, settings))
            return
    groups.append(settings)


def _add_step(
    found: Settings, settings: dict[str, Any], params: Sequence[str], step_of: Callable[[str], Any], number: int
) -> bool:
    steps = {step for fqn in params if (step := step_of(fqn)) is not None}
    if len(steps) > 1:
        found.problems.append(_steps(number, sorted(steps)))
        return False
    if steps:
        step = steps.pop()
        settings["step"] = int(step) if float(step).is_integer() else step
    return True


def _nameless(number: int, missing: Sequence[str]) -> Problem:
    return Problem(
        "SR-MGW-GROUPS",
        f"parameter group {number} has no {', '.join(missing)}, by which Megatron tells groups apart",
        where={"key": f"group {number}"},
        hint="the source's optimizer was none of Megatron's; allow it and load the weights alone (--no-load-optim)",
    )


def _disagree(number: int, known: Mapping[str, Any], settings: Mapping[str, Any]) -> Problem:
    odd = sorted(name for name in {*known, *settings} if known.get(name) != settings.get(name))
    return Problem(
        "SR-MGW-GROUPS",
        f"parameter group {number} would become one with another that has other {', '.join(odd)}",
        where={"key": f"group {number}"},
        expected={name: known.get(name) for name in odd},
        found={name: settings.get(name) for name in odd},
        hint="at this degree of expert parallelism Megatron has one group for both; keep the source's --layout ep",
    )


def _steps(number: int, steps: Sequence[Any]) -> Problem:
    return Problem(
        "SR-MGW-STEPS",
        f"parameters of group {number} are at different steps, and Megatron's optimizer has one for all",
        where={"key": f"group {number}"},
        found=list(steps),
        hint="parts of two saves may be mixed in the source; bias correction would be wrong for some of them",
    )

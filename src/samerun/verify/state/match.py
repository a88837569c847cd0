"""Which tensor of a checkpoint is which tensor of a job: by name, whatever the role was taken for, through ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samerun.core.plain import plain
from samerun.core.state import LogicalState, Role, TensorEntry, TensorKey

COUNTER_SLOTS = frozenset({"step"})


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor of the job and the checkpoint's tensor of the same meaning.

    `copies` are further tensors of the checkpoint that the job's one tensor stands for: a tied tensor saved under
    each of its names.
    """

    key: str
    saved: str
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """How a job's tensors meet a checkpoint's. Keys, in the order of the side that they come from.

    `missing` are in the checkpoint only, `unexpected` in the job only. `untied` gives, by the checkpoint's key, several
    keys of the job that are one tensor in the checkpoint.
    """

    pairs: tuple[Pair, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    untied: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Names:
    """The checkpoint's keys by (part, fqn), where part is `model`, or `<role>.<slot>` for everything else."""

    by_owner: Mapping[tuple[str, str], str]
    by_alias: Mapping[tuple[str, str], str]

    def find(self, part: str, fqn: str) -> str | None:
        return self.by_owner.get((part, fqn)) or self.by_alias.get((part, fqn))


def match_tensors(state: LogicalState, tensors: Mapping[str, Mapping[str, Any]], *, counters: bool = False) -> Match:
    """Matches the tensors that a job holds (the `tensors` of a trace's state line) with a checkpoint's.

    A model tensor meets one of the same name even if one side calls it a parameter and the other a buffer: many
    formats do not tell, and the job does. Step counters of the checkpoint that meet nothing are missing only if
    `counters` says that `tensors` lists counters too.
    """
    names = _index(state)
    pairs: list[Pair] = []
    unexpected: list[str] = []
    owners: dict[str, list[str]] = {}
    for key in tensors:
        saved = _saved_under(TensorKey.parse(key), job_aliases(tensors, key), names)
        if not saved:
            unexpected.append(key)
            continue
        pairs.append(Pair(key, saved[0], tuple(saved[1:])))
        owners.setdefault(saved[0], []).append(key)
    used = {key for pair in pairs for key in (pair.saved, *pair.copies)}
    missing = tuple(
        key for key, entry in state.tensors.items() if key not in used and (counters or not is_counter(entry.key))
    )
    untied = {saved: tuple(keys) for saved, keys in owners.items() if len(keys) > 1}
    return Match(tuple(pairs), missing, tuple(unexpected), untied)


def is_counter(key: TensorKey) -> bool:
    """Returns whether a key names a step counter, which is compared as a number."""
    return key.role is Role.OPTIM and key.slot in COUNTER_SLOTS


def _part(key: TensorKey) -> str:
    if key.role in (Role.PARAM, Role.BUFFER):
        return "model"
    return f"{key.role}.{key.slot}" if key.slot else str(key.role)


def _index(state: LogicalState) -> _Names:
    by_owner: dict[tuple[str, str], str] = {}
    by_alias: dict[tuple[str, str], str] = {}
    for text, entry in state.tensors.items():
        part = _part(entry.key)
        by_owner[part, entry.key.fqn] = text
        for alias in model_aliases(state, entry):
            by_alias.setdefault((part, alias), text)
    return _Names(by_owner, by_alias)


def model_aliases(state: LogicalState, entry: TensorEntry) -> tuple[str, ...]:
    """Returns the other names of a tensor; optimizer state has those of its parameter."""
    if entry.aliases or entry.key.role in (Role.PARAM, Role.BUFFER):
        return entry.aliases
    owner = state.tensors.get(str(TensorKey(Role.PARAM, entry.key.fqn)))
    return owner.aliases if owner else ()


def job_aliases(tensors: Mapping[str, Mapping[str, Any]], key: str) -> tuple[str, ...]:
    """Returns the other names of a tensor of the job; optimizer state has those of its parameter."""
    owner = f"param:{key.partition(':')[2]}"
    fact = tensors[key] if key in tensors and not key.startswith("optim.") else tensors.get(owner, {})
    return tuple(fact.get("aliases", ()))


def _saved_under(key: TensorKey, aliases: tuple[str, ...], names: _Names) -> list[str]:
    """Returns the checkpoint's keys for one tensor of the job, the one under the owner's own name first."""
    found: list[str] = []
    for fqn in (key.fqn, *aliases):
        saved = names.find(_part(key), fqn)
        if saved is not None and saved not in found:
            found.append(saved)
    return found


def group_settings(state: LogicalState) -> dict[str, dict[str, Any]]:
    """Returns each parameter's hyperparameters as plain data, under its own name and those that it is tied to."""
    settings: dict[str, dict[str, Any]] = {}
    for group in state.groups:
        values = plain(dict(group.hyperparameters))
        for name in group.params:
            settings[name] = values
            entry = state.tensors.get(str(TensorKey(Role.PARAM, name)))
            for alias in entry.aliases if entry else ():
                settings.setdefault(alias, values)
    return settings

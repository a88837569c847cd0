"""Everything of a logical state that is neither tensor nor group, made ready to be written into pickles again.

Reading makes plain data of what it meets; this makes, as far as rules can, what was there before: tensors of arrays,
tuples where a loader insists on them. What no rule brings back (a class that is not known, a tensor too large to be
kept among the objects) is left out and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samerun.core.dtype import DTYPES
from samerun.core.schedule import schedulers_of
from samerun.core.state import LogicalState
from samerun.errors import Problem
from samerun.formats.statedict.progress import read_progress
from samerun.formats.statedict.tree import flatten
from samerun.formats.torchfile.emit import emit_pickle
from samerun.formats.torchfile.nodes import known
from samerun.formats.torchfile.values import Inert

_COUNTERS = ("update", "samples", "tokens", "epoch")

# Hyperparameters that torch.optim keeps as tuples: Adam and its kin, Rprop, Adafactor.
_TUPLES = frozenset({"betas", "etas", "step_sizes", "nus", "eps"})

# MultiStepLR looks its update up in this mapping, by number. DCP keeps the keys of mappings as text.
_BY_NUMBER = "milestones"


@dataclass(slots=True)
class Carried:
    """The sections by name. `scheduler` is the one among them that is the scheduler's, if any."""

    sections: dict[str, Any] = field(default_factory=dict[str, Any])
    scheduler: str | None = None
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])


class Unwritable(Exception):
    """A value that no rule makes writable; the message says which."""


def carry_objects(state: LogicalState, *, numpy: bool) -> Carried:
    """Returns the sections of a state, nested as far as dots in names tell.

    With `numpy`, the arrays in states of NumPy's generators stay NumPy's (which torch loads with `weights_only=False`
    only); without, they become tensors, which `numpy.random.set_state` takes as well. All other arrays become tensors.
    """
    carried = Carried()
    for name, value in dict(_sections(state, carried)).items():
        converted, left_out = _convert_all(value, name, numpy=numpy)
        for place, why in left_out.items():
            carried.dropped[place] = why
        if converted is not _NOTHING:
            _plant(carried.sections, name, converted)
    if carried.dropped:
        carried.problems.append(_left_out(carried.dropped))
    return carried


def _sections(state: LogicalState, carried: Carried) -> Iterator[tuple[str, Any]]:
    """Yields (name, value): whole sections where the state has them nested, single objects otherwise."""
    whole: dict[str, Any] = {**state.rng, **state.data}
    done: set[str] = set()
    found, listed = None, False
    if state.scheduler:  # the first that looks like one is taken for the scheduler
        found = _find_section(state.scheduler, state.objects)
        listed = found is not None and found.rpartition(".")[2].isdecimal()  # in a list, as Lightning keeps it
        carried.scheduler = found if found is not None and not listed else "lr_scheduler"
        several = schedulers_of(state.scheduler)
        whole[carried.scheduler] = list(several) if len(several) > 1 else state.scheduler  # a list again, as it was
        done.add(carried.scheduler)
        yield carried.scheduler, whole[carried.scheduler]
    covered = {inner for name, node in whole.items() for inner in _names_in(node, name)}
    moved = set(_names_in(state.scheduler, found)) if state.scheduler and listed and found is not None else set[str]()
    for name, value in state.objects.items():
        if name in moved:
            continue
        if name not in covered:
            yield name, value
            continue
        section = next(section for section in whole if name == section or name.startswith(f"{section}."))
        if section not in done:
            done.add(section)
            yield section, whole[section]
    for section, node in whole.items():
        if section not in done:
            yield section, node
    counted, _ = read_progress(state.objects, {name: node for name, node in state.data.items() if "." not in name})
    missing = {
        name: getattr(state.progress, name)
        for name in _COUNTERS
        if getattr(state.progress, name) is not None and getattr(counted, name) is None
    }
    for name, value in missing.items():
        if f"progress.{name}" not in state.objects:
            yield f"progress.{name}", value


def _names_in(node: Any, name: str) -> Iterator[str]:
    """Yields the name of a value and of everything inside: formats differ in how deep they flatten, lists above all."""
    yield name
    if isinstance(node, Mapping | list):
        for key, item in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _names_in(item, f"{name}.{key}")


def _find_section(node: Mapping[str, Any], objects: Mapping[str, Any]) -> str | None:
    """Returns the name under which the objects hold this mapping: what stands before its first key."""
    flat = [name for name, _ in flatten(node)]
    starts = {name[: i + 1] for name in objects for i, letter in enumerate(name) if letter == "."}
    for name in objects:
        prefix, found, _ = f"{name}.".rpartition(f".{flat[0]}.")
        if found and all(f"{prefix}.{key}" in objects or f"{prefix}.{key}." in starts for key in flat):
            return prefix
    return None


def _plant(tree: dict[str, Any], name: str, value: Any) -> None:
    """Puts a value into nested mappings by its dotted name, undivided where something else is in the way."""
    parts = name.split(".")
    node = tree
    for i, part in enumerate(parts[:-1]):
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            node[".".join(parts[i:])] = value
            return
        node = inner
    if isinstance(value, dict) and isinstance(node.get(parts[-1]), dict):
        node[parts[-1]] |= value
    else:
        node[parts[-1]] = value


_NOTHING = object()


def _convert_all(value: Any, name: str, *, numpy: bool) -> tuple[Any, dict[str, str]]:
    """Converts a section. Of a mapping, entries that cannot be written are left out one by one."""
    left_out: dict[str, str] = {}
    if isinstance(value, Mapping) and _PICKLED.search(name):
        emitted = _as_pickle(value)
        if emitted is not None:
            return emitted, left_out
    if isinstance(value, Mapping) and value:
        kept: dict[Any, Any] = {}
        for key, item in value.items():
            converted, inner = _convert_all(item, f"{name}.{key}", numpy=numpy)
            left_out |= inner
            if converted is not _NOTHING:
                kept[key] = _by_number(key, converted)
        return (kept if kept else _NOTHING), left_out
    try:
        return writable(value, numpy=numpy), left_out
    except Unwritable as error:
        return _NOTHING, {name: str(error)}


# torchtitan keeps each rank's loader state as a pickle of its own; readers look inside.
_PICKLED = re.compile(r"(?:^|\.)dp_rank_\d+$")


def _as_pickle(value: Any) -> bytes | None:
    try:
        emitted = emit_pickle(writable(value))
    except (Unwritable, TypeError):
        return None
    return emitted.pickle if not emitted.storages else None


def writable(value: Any, *, numpy: bool = False) -> Any:
    """Returns a plain value as `emit_pickle` takes it: arrays as tensors, states of generators as the tuples they are.

    Raises:
        Unwritable: for a record of a class that is not known.
    """
    if isinstance(value, Inert):
        what = "a tensor too large to be kept" if value.name == "tensor" else f"a record of {value.name}"
        raise Unwritable(f"{what} cannot be written as plain data")
    if isinstance(value, np.ndarray):
        if value.dtype.name not in DTYPES:
            raise Unwritable(f"an array of {value.dtype} has no form as a tensor")
        return known(value)
    if isinstance(value, Mapping):
        if numpy and value.get("bit_generator"):
            return _keep_arrays(value)
        return {key: _by_number(key, writable(item, numpy=numpy)) for key, item in value.items()}
    if isinstance(value, list):
        if _is_python_state(value):
            return (value[0], tuple(value[1]), value[2])
        if len(value) == 5 and isinstance(value[0], str) and value[0] == "MT19937":
            return tuple(value) if numpy else tuple(writable(item) for item in value)
        return [writable(item, numpy=numpy) for item in value]
    if isinstance(value, tuple):
        return tuple(writable(item, numpy=numpy) for item in value)
    return value


def _by_number(name: Any, value: Any) -> Any:
    if name != _BY_NUMBER or not isinstance(value, Mapping):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: item for key, item in value.items()}


def _keep_arrays(value: Any) -> Any:
    return {key: _keep_arrays(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _is_python_state(value: list[Any]) -> bool:
    """Whether this is what `random.getstate()` returns: version, words, and a pending Gaussian."""
    if len(value) != 3 or not isinstance(value[0], int) or not isinstance(value[1], list):
        return False
    return value[0] in (2, 3) and len(value[1]) == 625


def writable_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a group's hyperparameters ready to be written, and those that cannot be, with why."""
    kept: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in settings.items():
        try:
            ready = writable(value)
        except Unwritable as error:
            left_out[name] = str(error)
            continue
        numbers = isinstance(ready, list) and all(isinstance(item, int | float | None) for item in ready)
        kept[name] = tuple(ready) if numbers and name in _TUPLES else ready
    return kept, left_out


def _left_out(dropped: Mapping[str, str]) -> Problem:
    name, why = next(iter(dropped.items()))
    more = f", and {len(dropped) - 1} more" if len(dropped) > 1 else ""
    return Problem(
        "SR-WRITE-OBJECT",
        f"{len(dropped)} objects of the source cannot be written: {name}: {why}{more}",
        where={"key": name},
        hint="if the run can do without them, allow it: --allow SR-WRITE-OBJECT; they stay in the source",
    )

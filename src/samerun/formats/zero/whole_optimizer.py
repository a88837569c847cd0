"""Stage 0: torch's own optimizer state dict, whole, by number; 16-bit runs wrap it and add fp32 masters.

Numbers become names by laying the groups over the model's parameters (`positional`); where that leaves a choice,
masters decide it: the parameter is the one whose values are the rounded master's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from samerun.core.state import Role, TensorKey, normalize_fqn
from samerun.errors import Problem, Severity
from samerun.formats.base import Extent, numpy_dtype, view_extent
from samerun.formats.deepspeed.gather import Gatherer, pieces_of_tensor
from samerun.formats.deepspeed.masters import Counter
from samerun.formats.deepspeed.model_tensors import Cutter, Names
from samerun.formats.deepspeed.slices import whole
from samerun.formats.deepspeed.states import StateFile, as_count, as_dict, as_list, enum_number, plain_value
from samerun.formats.torchfile import TensorRef
from samerun.formats.zero.optimizer_tensors import Flat
from samerun.formats.zero.positional import match_groups, match_unique
from samerun.formats.zero.source import Source, without_role
from samerun.formats.zero.whole_states import WholeState, whole_states

_COMPARED_ELEMENTS = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """One parameter of a positional optimizer: its number, its shape where a slot or master has it, its master.

    `name` is set where values alone told which parameter it is.
    """

    number: int
    shape: tuple[int, ...] | None
    state: Mapping[Any, Any]
    master: Extent | None
    name: str | None = None


def add_whole_optimizer(source: Source, names: Names, cutter: Cutter, gatherer: Gatherer) -> Flat:
    """Adds the optimizer state that files keep whole. Pipeline stages are numbered each on its own."""
    flat = Flat()
    merged: dict[int, tuple[list[str], Mapping[str, Any]]] = {}
    for held in whole_states(source, names):
        _Adder(source, names, cutter, gatherer, flat, held).add(merged)
    flat.groups = [merged[number] for number in sorted(merged)]
    return flat


class _Adder:
    """Adds one optimizer state dict."""

    def __init__(
        self, source: Source, names: Names, cutter: Cutter, gatherer: Gatherer, flat: Flat, held: WholeState
    ) -> None:
        self.source = source
        self.names = names
        self.cutter = cutter
        self.gatherer = gatherer
        self.flat = flat
        self.held = held
        self.file: StateFile = held.file
        self.stage, self.rank = held.stage, held.rank

    def add(self, merged: dict[int, tuple[list[str], Mapping[str, Any]]]) -> None:
        state = dict(self.held.value)
        base = as_dict(state.get("optimizer_state_dict")) or state
        groups = [as_dict(group) for group in as_list(base.get("param_groups"))]
        flattened = "fp32_groups_flat" in state
        members = self._flat_members(state, base) if flattened else self._members(state, base, groups)
        labels = self._labels(members)
        unnamed = sum(label.startswith("#") for group in labels for label in group)
        if unnamed:
            self.flat.problems.append(_positional(self.file, unnamed))
        for number, (group, found) in enumerate(zip(groups, labels, strict=False)):
            known, _ = merged.setdefault(number, ([], self._settings(group)))
            known += [name for label in found if (name := normalize_fqn(label)) not in known]
            for member, label in zip(members[number], found, strict=True):
                self._add_member(label, member, group)

    def _settings(self, group: dict[Any, Any]) -> dict[str, Any]:
        settings = {str(key): value for key, value in group.items() if key != "params"}
        plain = without_role(plain_value(settings, self.file, self.source.files))
        return {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in plain.items()}

    def _members(
        self, state: dict[Any, Any], base: dict[Any, Any], groups: list[dict[Any, Any]]
    ) -> list[list[_Member]]:
        states = as_dict(base.get("state"))
        masters = as_list(state.get("fp32_groups"))
        found: list[list[_Member]] = []
        for number, group in enumerate(groups):
            own = as_list(masters[number]) if number < len(masters) else []
            members: list[_Member] = []
            for position, index in enumerate(as_list(group.get("params"))):
                master = own[position] if position < len(own) and isinstance(own[position], TensorRef) else None
                slots = as_dict(states.get(index)) if as_count(index) is not None else {}
                members.append(
                    _Member(
                        as_count(index) or 0,
                        master.shape if master is not None else _shape_of(slots),
                        slots,
                        self.file.extent(master) if master is not None else None,
                    )
                )
            found.append(members)
        return found

    def _flat_members(self, state: dict[Any, Any], base: dict[Any, Any]) -> list[list[_Member]]:
        """Cuts flattened groups (fused fp16) into parameters: each is the next of the model's whose values fit."""
        groups: list[list[_Member]] = []
        taken: set[str] = set()
        states = as_dict(base.get("state"))
        for number, flat in enumerate(as_list(state.get("fp32_groups_flat"))):
            extent = self.file.flat(flat) if isinstance(flat, TensorRef) else None
            members: list[_Member] = []
            for name, run in self._runs(extent, taken) if extent is not None else ():
                taken.add(name)
                slots = self._cut_slots(states.get(number), extent, run)
                members.append(_Member(len(members), run.shape, slots, run, name))
            groups.append(members)
        return groups

    def _runs(self, flat: Extent, taken: set[str]) -> Iterator[tuple[str, Extent]]:
        """Yields the parameters that a flat buffer holds, in order, as long as values say which comes next."""
        position = 0
        while position < flat.shape[0]:
            step = self._next_run(flat, position, taken)
            if step is None:
                return
            yield step
            position += math.prod(step[1].shape)

    def _next_run(self, flat: Extent, position: int, taken: set[str]) -> tuple[str, Extent] | None:
        for name, extent in self.held.candidates:
            run = _run(flat, position, extent.shape) if name not in taken and 0 not in extent.shape else None
            if run is not None and _rounds_to(run, extent, self.source):
                return name, run
        return None

    def _cut_slots(self, state: Any, flat: Extent | None, run: Extent) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for slot, value in as_dict(state).items():
            if isinstance(value, TensorRef) and flat is not None and value.shape == flat.shape:
                start = (run.offset_bytes - flat.offset_bytes) // flat.dtype.num_bytes
                found[str(slot)] = _run(self.file.extent(value), start, run.shape)
            else:
                found[str(slot)] = value
        return found

    def _labels(self, members: list[list[_Member]]) -> list[list[str]]:
        """Returns the names of members, `#number` for those that could be several parameters."""
        candidates = self.held.candidates
        tokens = [extent.shape for _, extent in candidates]
        shapes = [[member.shape for member in group] for group in members]
        found = match_groups(tokens, shapes) or match_unique(tokens, shapes)
        labels: dict[tuple[int, int], str] = {}
        for group, own in enumerate(members):
            for member, place in zip(own, found[group], strict=True):
                if member.name is not None or place is not None:
                    labels[(group, member.number)] = member.name or candidates[place or 0][0]
        taken = set(labels.values())
        for group, own in enumerate(members):
            for member in own:
                name = self._by_values(member, taken) if (group, member.number) not in labels else None
                if name is not None:
                    taken.add(name)
                    labels[(group, member.number)] = name
        return [
            [labels.get((group, member.number), f"#{self.held.mark}{member.number}") for member in own]
            for group, own in enumerate(members)
        ]

    def _by_values(self, member: _Member, taken: set[str]) -> str | None:
        if member.master is None:
            return None
        fits = [
            name
            for name, extent in self.held.candidates
            if name not in taken and extent.shape == member.shape and _rounds_to(member.master, extent, self.source)
        ]
        return fits[0] if len(fits) == 1 else None

    def _add_member(self, label: str, member: _Member, group: dict[Any, Any]) -> None:
        shape = member.shape or ()
        named = not label.startswith("#")
        full, cut = self.cutter.cut(label, self.stage, self.rank, shape) if named else (label, whole(shape))
        fqn = normalize_fqn(full)
        copy = (self.stage, self.rank if cut.replicated else 0, self.held.copy)
        if member.master is not None:
            self.flat.masters.setdefault(fqn, (label, member.master.dtype))
            self._put(TensorKey(Role.MASTER, fqn), label, member.master, copy, full)
        values = {**({"step": group["step"]} if "step" in group else {}), **member.state}
        for slot, value in values.items():
            key = TensorKey(Role.OPTIM, fqn, str(slot))
            extent = value if isinstance(value, Extent) else None
            if isinstance(value, TensorRef) and (value.shape == shape != () or math.prod(value.shape) > 1):
                extent = self.file.extent(value)
            if extent is not None:
                self._put(key, label, extent, copy, full)
                continue
            read = enum_number(value, self.file, self.source.files)
            if read is not None:
                held = self.file.extent(value) if isinstance(value, TensorRef) else None
                self.flat.counters.setdefault(str(key), (key, Counter(read, held)))
                if slot == "step":
                    place = (self.stage * self.source.degrees.tp + self.rank, self.held.copy, member.number)
                    self.flat.steps[place] = read

    def _put(self, key: TensorKey, label: str, extent: Extent, copy: tuple[int, ...], full: str) -> None:
        named = not label.startswith("#")
        same = extent.shape == self.names.shapes.get((self.stage, label), {}).get(self.rank)
        cut = self.cutter.cut(label, self.stage, self.rank, extent.shape)[1] if named and same else whole(extent.shape)
        self.gatherer.add(key, full, extent.dtype, cut.shape, copy, pieces_of_tensor(extent, cut))


def _shape_of(slots: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """Returns a parameter's shape from its slots: that of the largest tensor among them."""
    shapes = [value.shape for value in slots.values() if isinstance(value, TensorRef) and value.shape]
    return max(shapes, key=math.prod, default=None)


def _run(flat: Extent, start: int, shape: tuple[int, ...]) -> Extent | None:
    """Returns a tensor of this shape that begins at an element of a flat one; None if it does not fit."""
    if start + math.prod(shape) > flat.shape[0]:
        return None
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return replace(flat, offset_bytes=flat.offset_bytes + start * flat.dtype.num_bytes, shape=shape, strides=strides)


def _rounds_to(master: Extent, parameter: Extent, source: Source) -> bool:
    """Whether the first values of a master, rounded to the parameter's type, are the parameter's."""
    held = view_extent(source.files, parameter).reshape(-1)[:_COMPARED_ELEMENTS]
    full = view_extent(source.files, master).reshape(-1)[:_COMPARED_ELEMENTS]
    with np.errstate(all="ignore"):
        return np.array_equal(full.astype(numpy_dtype(parameter.dtype)).view(np.uint8), held.copy().view(np.uint8))


def _positional(file: StateFile, unnamed: int) -> Problem:
    return Problem(
        "SR-OPT-POSITIONAL",
        f"{unnamed} parameters of the optimizer are known by number only, and several of the model's could be meant",
        severity=Severity.ERROR,
        where={"file": str(file.path)},
        hint="stage 0 saves torch's own optimizer state, without names. It fits only an optimizer built over the same "
        "parameters in the same order; load it in such a job and save it with names",
    )

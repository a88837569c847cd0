"""What a run is to DeepSpeed: groups of trained parameters with masters, slots and one step each, and the rest.

Made from any logical state, before anything is laid out. What DeepSpeed's files cannot hold is a finding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samerun.core.dtype import DTYPES, DType
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role, TensorEntry, normalize_fqn
from samerun.errors import PlanError, Problem, Severity
from samerun.formats.base import Array, WriteSource
from samerun.formats.deepspeed.experts import expert_of
from samerun.formats.statedict.carry import writable_settings
from samerun.formats.torchfile.emit import Tensor, known

OWN_FORMATS = ("zero", "universal")
STEP = "step"
_SIXTEEN = ("bfloat16", "float16")
_LAYER = re.compile(r"(?:\d+|tied_modules)\.")


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A parameter that the optimizer trains. `masters` are its fp32 values (in fp32 runs the weights themselves).

    `slots` are its optimizer tensors by name, counters among them.
    """

    name: str
    weights: TensorEntry
    masters: TensorEntry
    slots: Mapping[str, TensorEntry]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.weights.shape


@dataclass(frozen=True, slots=True, eq=False)
class TrainedGroup:
    """One parameter group. `slots` gives the element type of each slot, `scalars` what is kept once for the group.

    `dealt` are, of a group of experts, what each expert-parallel rank holds, under that rank's own names.
    """

    members: tuple[Trained, ...]
    settings: dict[str, Any]
    slots: Mapping[str, DType]
    scalars: Mapping[str, Array]
    dealt: tuple[tuple[Trained, ...], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor of the model that the optimizer does not train, under DeepSpeed's name."""

    name: str
    entry: TensorEntry


@dataclass(slots=True)
class Training:
    """A whole run. `shared` gives tied names by alias; `precision` is `bf16`, `fp16` or empty (fp32).

    `layers` are the layers of experts with their numbers of experts, by what experts' names begin with; `ep` is over
    how many ranks the experts of a layer are dealt.
    """

    groups: list[TrainedGroup] = field(default_factory=list[TrainedGroup])
    frozen: list[Held] = field(default_factory=list[Held])
    buffers: list[Held] = field(default_factory=list[Held])
    shared: dict[str, str] = field(default_factory=dict[str, str])
    layers: dict[str, int] = field(default_factory=dict[str, int])
    ep: int = 1
    precision: str = ""
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def masterless(self) -> bool:
        """Whether 16-bit weights have no masters, so that masters are made from them."""
        return any(member.masters is member.weights for group in self.groups for member in group.members) and bool(
            self.precision
        )


def scalar_value(values: Array) -> Tensor | int:
    """Returns a counter as an optimizer keeps it: an integer where the source had a whole number, else a tensor."""
    return int(values.item()) if values.dtype.kind in "iu" and values.size == 1 else known(np.array(values))


def plan_training(source: WriteSource, layout: Layout | None, target: str) -> Training:
    """Sorts a state for DeepSpeed. Reads counters, no other tensor. `target` is the format's name, for messages."""
    state = source.state
    training = Training()
    if problems := check_parallel(state, layout, target):
        raise PlanError(problems)
    owners = {alias: entry.key.fqn for entry in state.tensors.values() for alias in entry.aliases}
    trained = _groups(source, training, owners, target)
    names = {entry.key.fqn: name_of(state, entry) for entry in state.tensors.values()}
    for entry in state.tensors.values():
        fqn = entry.key.fqn
        if entry.key.role is Role.BUFFER:
            training.buffers.append(Held(names[fqn], entry))
        elif entry.key.role is Role.PARAM and fqn not in trained:
            training.frozen.append(Held(names[fqn], entry))
        if entry.key.role is Role.PARAM:
            training.shared |= dict.fromkeys(entry.aliases, names[fqn])
    _leave_out(state, training, trained)
    return training


def name_of(state: LogicalState, entry: TensorEntry) -> str:
    """Returns the name under which the job knows a tensor: DeepSpeed's own sources keep it as it was."""
    own = state.format in OWN_FORMATS and normalize_fqn(entry.original) == entry.key.fqn
    return entry.original if own else entry.key.fqn


def check_parallel(state: LogicalState, layout: Layout | None, target: str) -> list[Problem]:
    """Returns what is not laid out: pipelines without their layers, experts in them, destinations cut otherwise.

    No decision of the user changes that: what would be written, no engine loads.
    """
    problems: list[Problem] = []
    fqns = [entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.PARAM]
    own = state.format in OWN_FORMATS
    held = (state.topology.layout if own else None) or Layout()
    layered = own and state.topology.pipeline is not None
    staged = layered or (own and target == "universal" and any(_LAYER.match(fqn) for fqn in fqns))
    if own and held.pp > 1 and any(_LAYER.match(fqn) for fqn in fqns) and not staged:
        why = "the source is a DeepSpeed pipeline, and what each stage and each layer's file holds is not known of it"
        problems.append(_parallel(why, target, {"key": "pp"}))
    experts = next((fqn for fqn in fqns if expert_of(fqn) is not None), None)
    if experts and ((held.tp, held.pp) != (1, 1) or layered):
        why = "the source has DeepSpeed's experts beside tensor or pipeline parallelism"
        problems.append(_parallel(why, target, {"tensor": f"param:{experts}"}))
    elif not experts and held.ep > 1:
        why = "the source has experts that are parts of fused tensors (AutoEP)"
        problems.append(_parallel(why, target, {"key": "ep"}))
    wanted = layout or Layout()
    if (wanted.tp, 1 if staged else wanted.pp, 1 if experts else wanted.ep) != (1, 1, 1):
        why = f"the destination {layout} is cut by tensor, pipeline or expert parallelism"
        problems.append(_parallel(why, target, {"key": "layout"}))
    ep = (layout or held).ep
    if experts and target == "universal" and ep > 1:
        problems.append(_unnumbered(ep))
    return problems


def _unnumbered(ep: int) -> Problem:
    return Problem(
        "SR-DSW-EXPERTS",
        f"a rank of a job with ep={ep} looks for its own experts under numbers from 0, so load_universal gives every "
        "rank the first rank's",
        where={"key": "layout"},
        hint=f"for a job with ep_size=1 write it with a layout that says so (--layout dp_shard=N); for ep={ep} use "
        f"`--to zero --layout dp_shard=N,ep={ep}`",
        expected="ep=1",
        found=f"ep={ep}",
    )


def _parallel(what: str, target: str, where: Mapping[str, Any]) -> Problem:
    return Problem(
        "SR-DSW-PARALLEL",
        f"{what}; `{target}` is not written for that",
        where=where,
        hint="no engine would load it, so --allow does not help. Convert to dcp or safetensors, which hold every "
        "tensor whole under its name, and load from there",
    )


def _groups(source: WriteSource, training: Training, owners: Mapping[str, str], target: str) -> set[str]:
    state, fqns = source.state, set[str]()
    slots = _slots_by_parameter(state)
    unknown: list[str] = []
    stateless: list[str] = []
    for number, group in enumerate(state.groups):
        if not group.params:  # FSDP1's ranks have such; DeepSpeed takes them out of an optimizer when it starts
            training.dropped[f"group {number}"] = "it has no parameters"
            continue
        members: list[Trained] = []
        for fqn in dict.fromkeys(owners.get(name, name) for name in group.params):
            weights = state.tensors.get(f"param:{fqn}")
            if weights is None:
                unknown.append(fqn)
            elif slots and fqn not in slots:
                stateless.append(fqn)
            elif fqn not in fqns:
                masters = state.tensors.get(f"master:{fqn}", weights)
                members.append(Trained(name_of(state, weights), weights, masters, slots.get(fqn, {})))
                fqns.add(fqn)
        training.groups.append(_group(source, training, number, members, group.hyperparameters))
    if unknown or not fqns:
        training.problems.append(_groupless(unknown, target))
    if stateless:
        training.problems.append(_stateless(stateless))
        training.dropped |= dict.fromkeys((f"param:{fqn} in a group" for fqn in stateless), "it is taken as frozen")
    kinds = {member.weights.dtype.name for group in training.groups for member in group.members}
    sixteen = sorted(kinds & set(_SIXTEEN))
    if sixteen:
        training.precision = {"bfloat16": "bf16", "float16": "fp16"}[sixteen[0]]
    if len(kinds) > 1:
        training.problems.append(_mixed(sorted(kinds), target))
    if training.masterless:
        training.problems.append(_masterless(sixteen[0]))
    if training.precision == "fp16":
        training.problems.append(_unverified())
    return fqns


def _slots_by_parameter(state: LogicalState) -> dict[str, dict[str, TensorEntry]]:
    found: dict[str, dict[str, TensorEntry]] = {}
    for entry in state.tensors.values():
        if entry.key.role is Role.OPTIM and entry.key.slot is not None:
            found.setdefault(entry.key.fqn, {})[entry.key.slot] = entry
    return found


def _group(
    source: WriteSource, training: Training, number: int, members: Sequence[Trained], hyperparameters: Mapping[str, Any]
) -> TrainedGroup:
    settings, left_out = writable_settings(hyperparameters)
    training.dropped |= {f"group {number}: {name}": why for name, why in left_out.items()}
    flat: dict[str, DType] = {}
    single: dict[str, list[TensorEntry]] = {}
    odd: list[str] = []
    for member in members:
        for slot, entry in member.slots.items():
            if slot != STEP and entry.shape == member.shape:
                flat.setdefault(slot, entry.dtype)
            elif math.prod(entry.shape) == 1:
                single.setdefault(slot, []).append(entry)
            else:
                odd.append(str(entry.key))
    for slot in flat.keys() & single.keys():  # parameters of one element, whose slots are as small as counters
        del single[slot]
    if odd:
        training.problems.append(_odd_slot(odd))
    lacking = [member.name for member in members if not flat.keys() <= member.slots.keys()]
    if lacking:
        training.problems.append(_lacking(lacking))
    scalars = dict(_scalars(source, training, number, single))
    return TrainedGroup(tuple(members), settings, flat, scalars)


def _scalars(
    source: WriteSource, training: Training, number: int, single: Mapping[str, Sequence[TensorEntry]]
) -> Iterator[tuple[str, Array]]:
    """Yields the numbers that a group keeps once. Every member's is read: they must agree."""
    for slot, entries in single.items():
        values = [source.scalar(str(entry.key)) for entry in entries]
        odd = [entry for entry, value in zip(entries, values, strict=True) if value.item() != values[0].item()]
        if odd:
            training.problems.append(_steps(number, slot, odd[0], values[0], values[entries.index(odd[0])]))
        yield slot, values[0]


def _leave_out(state: LogicalState, training: Training, trained: set[str]) -> None:
    """Names what DeepSpeed's files do not hold."""
    lost: list[str] = []
    for key, entry in state.tensors.items():
        role, fqn = entry.key.role, entry.key.fqn
        if role is Role.EMA or (role in (Role.OPTIM, Role.MASTER) and fqn not in trained):
            training.dropped[key] = "DeepSpeed's files hold no such tensor of a parameter that no group trains"
            lost.append(key)
        elif role is Role.OPTIM and entry.shape != state.tensors[f"param:{fqn}"].shape and math.prod(entry.shape) != 1:
            training.dropped[key] = "its shape is not its parameter's"
    if lost:
        training.problems.append(
            Problem(
                "SR-DSW-DROPPED",
                f"{len(lost)} tensors have no place in DeepSpeed's files: {_some(lost)}",
                where={"tensor": lost[0]},
                hint="averages and the optimizer state of parameters in no group stay in the source; keep it, or allow "
                "this with --allow SR-DSW-DROPPED",
            )
        )


def made_from_masters(training: Training) -> dict[str, str]:
    """Returns why 16-bit weights are not written where a loader makes them from masters."""
    return {
        str(member.weights.key): "DeepSpeed rounds it from the masters when it loads"
        for group in training.groups
        for member in group.members
        if member.masters is not member.weights
    }


def _groupless(unknown: Sequence[str], target: str) -> Problem:
    what = (
        f"{len(unknown)} members of the parameter groups are no parameters of the model: {_some(unknown)}"
        if unknown
        else "the source does not say which parameters its optimizer trains"
    )
    return Problem(
        "SR-DSW-GROUPS",
        f"{what}; `{target}` is flat buffers in the order of the groups",
        where={"tensor": unknown[0]} if unknown else {},
        hint="convert from a checkpoint that holds the optimizer with names. For weights alone use safetensors",
    )


def _mixed(kinds: Sequence[str], target: str) -> Problem:
    return Problem(
        "SR-DSW-MIXED",
        f"trained parameters are of several element types ({', '.join(kinds)}); `{target}` concatenates them into one "
        "buffer",
        hint="DeepSpeed casts the whole model to one type; convert with --dtype param=TYPE, or train it so",
    )


def _masterless(kind: str) -> Problem:
    return Problem(
        "SR-DSW-MASTERS",
        f"the source trains {kind} weights without masters; DeepSpeed keeps fp32 masters, made here from the weights",
        hint="the values are equal, but the next updates differ: masters keep what 16 bits round away. Allow it with "
        "--allow SR-DSW-MASTERS. It is laid out for stage 3",
        expected="fp32 masters",
        found=kind,
    )


def _unverified() -> Problem:
    return Problem(
        "SR-ZERO-UNVERIFIED",
        "fp16 files were never compared with a live run: DeepSpeed has no fp16 on CPU",
        severity=Severity.NOTE,
        hint="the layout is that of bf16; check the loss scale and the first loss after loading",
    )


def _odd_slot(keys: Sequence[str]) -> Problem:
    return Problem(
        "SR-DSW-SLOT",
        f"{len(keys)} optimizer tensors are not of their parameter's shape: {_some(keys)}",
        where={"tensor": keys[0]},
        hint="ZeRO cuts every slot as it cuts the parameter, so factored or quantised moments have no place in it",
    )


def _stateless(names: Sequence[str]) -> Problem:
    return Problem(
        "SR-DSW-STATELESS",
        f"{len(names)} members of the parameter groups have no optimizer state; they are taken as frozen: "
        f"{_some(names)}",
        where={"tensor": names[0]},
        hint="DeepSpeed keeps parameters with requires_grad=False out of its buffers, and these look like that. If "
        "the job "
        "freezes them, allow it: --allow SR-DSW-STATELESS. If it trains them and they never had a gradient, its "
        "buffers are "
        "longer than these: freeze them, or take one update first",
    )


def _lacking(names: Sequence[str]) -> Problem:
    return Problem(
        "SR-DSW-NOSTATE",
        f"{len(names)} parameters lack a slot that others in their group have; zeros are written: {_some(names)}",
        severity=Severity.WARNING,
        where={"tensor": names[0]},
        hint="a flat buffer has a place for every parameter. An optimizer that makes the slot at its first use begins "
        "with "
        "zeros as well",
    )


def _steps(number: int, slot: str, entry: TensorEntry, expected: Array, found: Array) -> Problem:
    return Problem(
        "SR-DSW-STEP",
        f"members of group {number} have different values of {slot}, and ZeRO keeps one for the whole group",
        where={"tensor": str(entry.key)},
        expected=expected.item(),
        found=found.item(),
        hint="some were stepped less often than others. Give them a group of their own, or convert to dcp",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def storage_dtype(member: Trained) -> DType:
    """Returns the element type in which masters are written: fp32, except where they are wider."""
    return member.masters.dtype if member.masters.dtype.num_bytes >= 4 else DTYPES["float32"]

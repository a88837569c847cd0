"""The optimizer's state in every rank's file: tensors by number, or the distributed optimizer's flat buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from samerun.core.state import Role, TensorKey
from samerun.errors import CorruptCheckpoint, FormatError, Problem
from samerun.formats.base import view_extent
from samerun.formats.deepspeed.states import as_dict, as_list, enum_number
from samerun.formats.mcore.flat import PartsOf, Slot, add_slot
from samerun.formats.mcore.groups import Member, fits, saved_groups
from samerun.formats.mcore.held import Collector
from samerun.formats.mcore.joined import JoinedBuffer, buffers_of, plan_joined, read_joined, split_dtypes
from samerun.formats.megatron_legacy.detect import OPTIMIZER_FILE
from samerun.formats.megatron_legacy.model import HeldTensor, Models, add_tensor
from samerun.formats.megatron_legacy.source import Place, RankFiles, Source
from samerun.formats.torchfile import TensorRef

_MASTERS = "fp32_from_fp16_params"
_SAMPLED_ELEMENTS = 64
_SAMPLED_SLOTS = 64


@dataclass(slots=True)
class OptimizerState:
    """What was found besides tensors: the encoding, groups as every rank saved them, steps by name, findings."""

    encoding: str = ""
    groups: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    steps: dict[str, int | float] = field(default_factory=dict[str, int | float])
    trained: set[str] = field(default_factory=set[str])
    problems: list[Problem] = field(default_factory=list[Problem])


def read_optimizer(source: Source, models: Models, collector: Collector) -> OptimizerState:
    """Files every optimizer tensor under its key."""
    state = OptimizerState()
    for place, rank in source.ranks.items():
        saved = rank.value.get("optimizer")
        chain: list[Any] = saved if isinstance(saved, list) else [saved]
        state.groups.append(saved_groups(saved))
        for one in chain:
            groups = saved_groups(one)
            expert = any(group.get("is_expert_parallel") for group in groups)
            members = _members(models, place, expert=expert and source.run.ep > 1, apart=source.run.ep > 1)
            if _by_number(one):
                state.encoding = "plain"
                _add_numbered(source, place, rank, as_dict(one), groups, members, collector, state)
        if source.run.flag("use_distributed_optimizer") or rank.flat is not None:
            state.encoding = "distributed"
            _add_flat(source, models, place, rank, collector, state)
    return state


def _by_number(value: Any) -> bool:
    table = as_dict(value)
    inner = as_dict(table.get("optimizer")) or table
    return bool(as_dict(inner.get("state")))


def _members(models: Models, place: Place, *, expert: bool, apart: bool) -> list[HeldTensor]:
    """Returns a rank's parameters in order of registration: those of experts, or the others, where these are apart."""
    return [
        held
        for chunk in models.by_rank[place]
        for held in chunk
        if not held.buffer and (held.expert and apart) == expert
    ]


def _add_numbered(
    source: Source,
    place: Place,
    rank: RankFiles,
    value: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[HeldTensor],
    collector: Collector,
    state: OptimizerState,
) -> None:
    """Files state that is kept by number: numbers run through the groups, and within one in order of registration."""
    inner = as_dict(value.get("optimizer")) or value
    numbered = as_dict(inner.get("state"))
    masters = as_list(value.get(_MASTERS))
    own_rate = any(group.get("is_decoupled_lr") for group in groups)
    for number, group in enumerate(groups):
        fitting = [
            held
            for held in members
            if fits(group, Member(held.local.name, held.ndim, held.expert and source.run.ep > 1), own_rate)
        ]
        identities = as_list(group.get("params"))
        if len(fitting) != len(identities):
            state.problems.append(_unordered(rank, len(identities), len(fitting)))
            continue
        copies = as_list(masters[number]) if number < len(masters) else []
        for position, (identity, held) in enumerate(zip(identities, fitting, strict=True)):
            slots: dict[str, Any] = dict(as_dict(numbered.get(identity)))
            if position < len(copies):
                slots[_MASTERS] = copies[position]
            _add_slots(source, rank, held, slots, group, collector, state)


def _add_slots(
    source: Source,
    rank: RankFiles,
    held: HeldTensor,
    slots: Mapping[str, Any],
    group: Mapping[str, Any],
    collector: Collector,
    state: OptimizerState,
) -> None:
    fqn = held.local.targets[0].fqn
    for slot, item in slots.items():
        if slot == "step":
            step = enum_number(item, rank.state, source.files)
            if step is not None:
                state.steps[fqn] = step
        elif isinstance(item, TensorRef):
            if item.shape != held.local.shape:
                state.problems.append(_other_shape(rank, held, slot, item))
                continue
            key = TensorKey(Role.MASTER, fqn) if slot == _MASTERS else TensorKey(Role.OPTIM, fqn, str(slot))
            add_tensor(collector, key, held.local, rank.state.extent(item))
            state.trained.add(fqn)
    step = group.get("step")
    if isinstance(step, int | float) and not isinstance(step, bool) and slots:
        state.steps.setdefault(fqn, step)


def _add_flat(
    source: Source, models: Models, place: Place, rank: RankFiles, collector: Collector, state: OptimizerState
) -> None:
    if rank.flat is None:
        if not (rank.folder / OPTIMIZER_FILE).exists():  # one that cannot be read is a finding already
            state.problems.append(_no_flat(rank))
        return
    value = rank.flat.value
    chain: list[Any] = value if isinstance(value, list) else [value]
    for number, one in enumerate(chain):
        if one is None:
            continue  # dense state is in the file of the first expert rank
        try:
            joined = read_joined(one, rank.flat.archive)
        except CorruptCheckpoint as error:
            state.problems.extend(error.problems)
            continue
        expert = source.run.ep > 1 and number == len(chain) - 1 and len(chain) > 1
        groups = _chained_groups(rank, number)
        if joined is None or not _place_joined(source, models, place, rank, joined, groups, collector, state, expert):
            state.problems.append(_no_plan(rank))


def _chained_groups(rank: RankFiles, number: int) -> list[dict[str, Any]]:
    saved = rank.value.get("optimizer")
    chain: list[Any] = saved if isinstance(saved, list) else [saved]
    return saved_groups(chain[number]) if number < len(chain) else []


def _place_joined(
    source: Source,
    models: Models,
    place: Place,
    rank: RankFiles,
    joined: Sequence[JoinedBuffer],
    groups: Sequence[Mapping[str, Any]],
    collector: Collector,
    state: OptimizerState,
    expert: bool,
) -> bool:
    apart = source.run.ep > 1
    buffers = iter(joined)
    steps = [step for group in groups if isinstance(step := group.get("step"), int | float)]
    sampled: list[bool] = []
    for chunk, tensors in enumerate(models.by_rank[place]):
        mine = [held for held in tensors if not held.buffer and (held.expert and apart) == expert]
        by_name = {held.local.name: held for held in mine}
        for _, params in split_dtypes([held.local for held in mine]):
            buffer = next(buffers, None)
            if buffer is None:
                return False
            slots = plan_joined(params, source.run, place.pp, chunk, buffer.num_elements)
            if slots is None:
                return False
            for slot in slots:
                parts = PartsOf(slot.local)
                for name, flat in buffers_of(buffer):
                    key = partial(_key, name)
                    add_slot(collector, slot, flat, key, slot.local.name, parts)
                fqn = slot.local.targets[0].fqn
                state.trained.add(fqn)
                if steps:
                    state.steps.setdefault(fqn, steps[0])
            sampled += _confirm(source, slots, by_name, buffer)
    if not all(sampled):
        state.problems.append(_unconfirmed(rank, sum(not same for same in sampled), len(sampled)))
    return next(buffers, None) is None


def _key(slot: str, fqn: str) -> TensorKey:
    return TensorKey(Role.MASTER, fqn) if slot == "param" else TensorKey(Role.OPTIM, fqn, slot)


def _confirm(
    source: Source, slots: Sequence[Slot], tensors: Mapping[str, HeldTensor], buffer: JoinedBuffer
) -> list[bool]:
    """Compares the first masters of a sample of parameters, rounded, with the weights in the same rank's file."""
    extent = buffer.slots.get("param")
    if extent is None:
        return []
    masters = view_extent(source.files, extent)
    found: list[bool] = []
    for slot in slots[:: max(1, -(-len(slots) // _SAMPLED_SLOTS))]:
        try:
            weights = view_extent(source.files, tensors[slot.local.name].extent)
        except FormatError:
            continue
        first = np.ascontiguousarray(weights.reshape(-1, weights.shape[-1])[0] if weights.ndim else weights.reshape(-1))
        first = first[:_SAMPLED_ELEMENTS]
        with np.errstate(all="ignore"):
            rounded = masters[slot.start : slot.start + len(first)].astype(first.dtype)
        found.append(np.array_equal(rounded.view(np.uint8), first.view(np.uint8)))
    return found


def _unordered(rank: RankFiles, expected: int, found: int) -> Problem:
    return Problem(
        "SR-MEG-LAYOUT",
        "the optimizer numbers another count of parameters than fit its groups' rules",
        where={"file": str(rank.state.path)},
        expected=expected,
        found=found,
        hint="the run has parameter groups by rules of its own, so numbers cannot be matched with names; the state of "
        "this group is not read",
    )


def _other_shape(rank: RankFiles, held: HeldTensor, slot: str, item: TensorRef) -> Problem:
    return Problem(
        "SR-MEG-LAYOUT",
        f"{slot} has another shape than the parameter that its number stands for",
        where={"file": str(rank.state.path), "tensor": held.local.name},
        expected=list(held.local.shape),
        found=list(item.shape),
        hint="parameters were registered in another order than the model file has them; this state is not read",
    )


def _no_flat(rank: RankFiles) -> Problem:
    return Problem(
        "SR-FILE-MISSING",
        "the distributed optimizer's file of this rank is not here",
        where={"file": str(rank.folder / OPTIMIZER_FILE)},
        hint="restore it from the source; masters and moments are in nothing else",
    )


def _no_plan(rank: RankFiles) -> Problem:
    return Problem(
        "SR-MEG-LAYOUT",
        "the flat optimizer state of this rank does not fit the parameters that its model file holds",
        where={"file": str(rank.folder / OPTIMIZER_FILE)},
        hint="model and optimizer files are of different models, or buffers were made by another rule; its values are "
        "not read",
    )


def _unconfirmed(rank: RankFiles, wrong: int, total: int) -> Problem:
    return Problem(
        "SR-MEG-ORDER",
        f"masters do not round to the weights at {wrong} of {total} sampled places",
        where={"file": str(rank.folder / OPTIMIZER_FILE)},
        hint="the two files of this rank are of different saves, masters were replaced, or parameters lie in another "
        "order than is known; which of these cannot be told",
    )

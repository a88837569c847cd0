"""The optimizer's state in a torch_dist directory, in every encoding that Megatron has had.

| encoding | what is stored |
|---|---|
| dp_reshardable | flat buckets per model-parallel rank, `...gbuf_idx_G.dtype_(..).bucket_idx_B.<slot>` |
| dp_zero_gather_scatter | one object per model-parallel rank with the same buckets, joined |
| fully_reshardable, plain | `optimizer.state.<slot>.<name>` in the shape of the parameter |
| fully_sharded_model_space | the same names; `[X/x, Y/y, ..., values of a rank's part]`, cut at any value |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from samerun.core.flat import Block, row_major_strides, run_parts
from samerun.core.state import Role, TensorKey
from samerun.errors import FormatError, Problem
from samerun.formats.dcpfile.index import NOWHERE, StoredTensor
from samerun.formats.mcore.flat import Buffer, Local, PartsOf, Slot, add_slot, add_slots, plan_slots
from samerun.formats.mcore.groups import is_number, saved_groups
from samerun.formats.mcore.held import Collector
from samerun.formats.mcore.joined import JoinedBuffer, buffers_of, plan_joined, read_joined
from samerun.formats.megatron.buffers import Owner, Plan, Planner, owner_of
from samerun.formats.megatron.source import ObjectShard, Source, unwrap
from samerun.formats.torchfile import read_value

MASTER_SLOTS = frozenset({"param", "fp32_param", "master_param"})
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_OF_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_[^/]+?\.bucket_idx_(\d+)\.(\w+)")


@dataclass(slots=True)
class RankState:
    """What is stored of one optimizer on one model-parallel rank: flat buckets, or one joined object; its groups."""

    buckets: dict[tuple[int, int], dict[str, StoredTensor]] = field(
        default_factory=dict[tuple[int, int], dict[str, StoredTensor]]
    )
    joined: ObjectShard | None = None
    settings: ObjectShard | None = None


@dataclass(slots=True)
class OptimizerState:
    """What was found besides tensors: encodings, groups as every rank saved them, plans that were made, findings.

    `alike` are the slots whose flat buffers are all cut as the masters' are: by the number (`id`) of the masters'
    stored tensor the slot's.
    """

    encodings: set[str] = field(default_factory=set[str])
    groups: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    step: int | float | None = None
    problems: list[Problem] = field(default_factory=list[Problem])
    alike: dict[str, dict[int, StoredTensor]] = field(default_factory=dict[str, dict[int, StoredTensor]])

    def slots_alike(self, key: TensorKey) -> list[tuple[TensorKey, Mapping[int, StoredTensor]]]:
        """Returns the slots that lie as a master does, which alone was filed. See `Collector.finish`."""
        if key.role is not Role.MASTER:
            return []
        return [(slot_key(slot, key.fqn), others) for slot, others in self.alike.items()]


def slot_key(slot: str, fqn: str) -> TensorKey:
    """Returns the key of an optimizer slot; what Megatron calls `param` there is the fp32 master."""
    return TensorKey(Role.MASTER, fqn) if slot in MASTER_SLOTS else TensorKey(Role.OPTIM, fqn, slot)


def read_optimizer(source: Source, planner: Planner, collector: Collector) -> OptimizerState:
    """Files every optimizer tensor under its key."""
    state = OptimizerState()
    ranks: dict[tuple[int, int], RankState] = {}
    shapes = {model.name: model.stored for model in planner.models}
    for tensor in source.index.tensors:
        match = _OF_GROUP.fullmatch(tensor.name)
        bucket = _BUCKET.fullmatch(match[3]) if match else None
        if match and bucket:
            place = (int(match[1] or 0), int(match[2]))
            buckets = ranks.setdefault(place, RankState()).buckets
            buckets.setdefault((int(bucket[1]), int(bucket[2])), {})[bucket[3]] = tensor
        elif named := _STATE.fullmatch(tensor.name):
            _add_named(state, collector, tensor, named[1], named[2], shapes.get(named[2]))
    _collect_objects(source, ranks)
    if not state.encodings and all(rank.joined is None for rank in ranks.values()):
        state.alike = _slots_alike([slots for rank in ranks.values() for slots in rank.buckets.values()])
    for (_, group), rank in sorted(ranks.items()):
        _add_rank(source, planner, collector, state, group, rank)
    common = source.common.get("optimizer")
    state.groups.append(saved_groups(common))
    state.step = _common_step(common)
    return state


def _slots_alike(buckets: Sequence[Mapping[str, StoredTensor]]) -> dict[str, dict[int, StoredTensor]]:
    """Returns the slots that are cut as the masters are in every bucket, as Megatron writes them."""
    if not all("param" in slots for slots in buckets):
        return {}
    names = {name for slots in buckets for name in slots} - {"param"}
    return {
        name: {id(slots["param"]): slots[name] for slots in buckets}
        for name in sorted(names)
        if len({slots[name].dtype for slots in buckets if name in slots}) == 1
        and all(name in slots and _cut_alike(slots["param"], slots[name]) for slots in buckets)
    }


def _cut_alike(one: StoredTensor, other: StoredTensor) -> bool:
    return (
        one.shape == other.shape
        and np.array_equal(one.tiling.offsets, other.tiling.offsets)
        and np.array_equal(one.tiling.sizes, other.tiling.sizes)
        and np.array_equal(one.rows == NOWHERE, other.rows == NOWHERE)
    )


def _collect_objects(source: Source, ranks: dict[tuple[int, int], RankState]) -> None:
    for key, shards in source.shards.items():
        match = _OF_GROUP.fullmatch(key)
        if match is None:
            continue
        rank = ranks.setdefault((int(match[1] or 0), int(match[2])), RankState())
        if match[3] == "param_state":
            rank.joined = shards[0]
        elif match[3] == "optimizer":
            rank.settings = shards[0]


def _add_named(
    state: OptimizerState,
    collector: Collector,
    tensor: StoredTensor,
    slot: str,
    fqn: str,
    model: StoredTensor | None,
) -> None:
    """Files a tensor that is stored under a parameter's name, in its shape or in fragments."""
    if model is None or model.shape == tensor.shape:
        state.encodings.add("fully_reshardable" if slot == "param" else "plain")
        collector.add_stored(slot_key(slot, fqn), tensor)
        return
    state.encodings.add("fully_sharded_model_space")
    part = _fragment(model.shape, tensor.shape)
    if part is None:
        state.problems.append(_fragments(tensor, model))
        return
    strides = row_major_strides(part)
    origin = (0,) * len(part)
    for piece, (at, size) in enumerate(zip(tensor.tiling.offsets.tolist(), tensor.tiling.sizes.tolist(), strict=True)):
        if any(count != 1 for count in size[:-1]):
            state.problems.append(_fragments(tensor, model))
            return
        target = tuple(number * extent for number, extent in zip(at, part, strict=False))
        collector.add_parts(
            slot_key(slot, fqn), tensor.name, model.shape, tensor.dtype, (0,), tensor, piece, 0, strides,
            run_parts(part, [Block(origin, target, part)], at[-1], size[-1]),
        )  # fmt: skip


def _fragment(shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of one rank's part of a tensor, from how many parts there are along each axis."""
    counts = stored[:-1]
    if len(counts) != len(shape) or any(count < 1 or size % count for size, count in zip(shape, counts, strict=True)):
        return None
    part = tuple(size // count for size, count in zip(shape, counts, strict=True))
    return part if math.prod(part) == stored[-1] else None


def _add_rank(
    source: Source, planner: Planner, collector: Collector, state: OptimizerState, group: int, rank: RankState
) -> None:
    settings = saved_groups(unwrap(source.value(rank.settings))) if rank.settings else []
    state.groups.append(settings)
    expert = any(item.get("is_expert_parallel") for item in settings)
    owner = owner_of(source.run, group, expert=expert)
    if rank.buckets:
        state.encodings.add("dp_reshardable")
        _add_buckets(planner, collector, state, owner, group, rank.buckets)
    if rank.joined is not None:
        state.encodings.add("dp_zero_gather_scatter")
        _add_joined(source, planner, collector, state, owner, group, rank.joined)


def _add_buckets(
    planner: Planner,
    collector: Collector,
    state: OptimizerState,
    owner: Owner | None,
    group: int,
    buckets: Mapping[tuple[int, int], Mapping[str, StoredTensor]],
) -> None:
    lengths: dict[int, list[int]] = {}
    for (number, bucket), slots in sorted(buckets.items()):
        if bucket != len(lengths.setdefault(number, [])):
            state.problems.append(_no_plan(planner.source, group, "a bucket is missing"))
            return
        lengths[number].append(max(tensor.shape[0] if len(tensor.shape) == 1 else 0 for tensor in slots.values()))
    flat = {
        (place, slot): _buffer(tensor)
        for place, slots in buckets.items()
        for slot, tensor in slots.items()
        if slot not in state.alike
    }
    masters = {place: flat[place, "param"] for place in buckets if (place, "param") in flat}
    plan = planner.plan(owner, lengths, masters, _in_buckets, aligned=True) if owner else None
    if not _accept(planner.source, state, plan, owner, group):
        return
    for number, slots in plan.slots.items() if plan else ():
        by_bucket: dict[int, list[Slot]] = {}
        for slot in slots:
            by_bucket.setdefault(slot.bucket, []).append(slot)
        for bucket, held in by_bucket.items():
            stored = {name: tensor for name, tensor in buckets[number, bucket].items() if name not in state.alike}
            left: dict[str, list[Slot]] = {}
            for name, tensor in stored.items():
                buffer = flat[(number, bucket), name]
                left[name] = add_slots(collector, held, buffer, _key_of(name), tensor.name)
            known = {id(slot): PartsOf(slot.local) for others in left.values() for slot in others}
            for name, others in left.items():
                for slot in others:
                    parts, buffer = known[id(slot)], flat[(number, bucket), name]
                    add_slot(collector, slot, buffer, _key_of(name), stored[name].name, parts)


def _each(plan: Plan | None) -> list[tuple[Slot, int]]:
    return [(slot, number) for number, slots in (plan.slots if plan else {}).items() for slot in slots]


def _key_of(slot: str) -> Callable[[str], TensorKey]:
    return partial(slot_key, slot)


def _in_buckets(params: Sequence[Local], pp: int, chunk: int, lengths: Sequence[int]) -> list[Slot] | None:
    return plan_slots(params, lengths)


def _buffer(tensor: StoredTensor) -> Buffer:
    placed = np.flatnonzero(tensor.rows != NOWHERE)
    tiling = tensor.tiling
    return Buffer(tensor, tiling.offsets.reshape(-1)[placed], tiling.sizes.reshape(-1)[placed], placed)


def _add_joined(
    source: Source,
    planner: Planner,
    collector: Collector,
    state: OptimizerState,
    owner: Owner | None,
    group: int,
    shard: ObjectShard,
) -> None:
    try:
        joined = _open_joined(source, shard)
    except FormatError as error:
        state.problems.extend(error.problems)
        return
    if joined is None:
        state.problems.append(_no_plan(source, group, "its object has another form than is known"))
        return
    by_number = {buffer.number: buffer for buffer in joined}
    lengths = {buffer.number: [buffer.num_elements] for buffer in joined}
    flat = {(buffer.number, slot): held for buffer in joined for slot, held in buffers_of(buffer)}
    masters = {(number, 0): flat[number, "param"] for number in by_number if (number, "param") in flat}

    def place(params: Sequence[Local], pp: int, chunk: int, numbers: Sequence[int]) -> list[Slot] | None:
        return plan_joined(params, source.run, pp, chunk, numbers[0])

    plan = planner.plan(owner, lengths, masters, place, aligned=False) if owner else None
    if not _accept(source, state, plan, owner, group):
        return
    for slot, number in _each(plan):
        parts = PartsOf(slot.local)
        for name in by_number[number].slots:
            add_slot(collector, slot, flat[number, name], _key_of(name), shard.item.name, parts)


def _open_joined(source: Source, shard: ObjectShard) -> list[JoinedBuffer] | None:
    name = shard.item.name
    archive = source.items.archive(shard.item.rows[0] if shard.item.rows else NOWHERE, name)
    decoded = read_value(source.files.map(archive.file), archive, name)
    return read_joined(unwrap(decoded.value), archive)


def _accept(source: Source, state: OptimizerState, plan: Plan | None, owner: Owner | None, group: int) -> bool:
    """Whether a plan may be used. Masters that do not round to the weights at a sample of places are a finding."""
    if owner is None:
        state.problems.append(_no_plan(source, group, "there are not that many model-parallel ranks"))
        return False
    if plan is None:
        state.problems.append(_no_plan(source, group, "no known order of parameters fills its buffers"))
        return False
    if plan.agreed == plan.sampled:
        return True
    state.problems.append(_unconfirmed(source, owner, plan))
    return plan.agreed * 2 >= plan.sampled


def _common_step(value: Any) -> int | float | None:
    """Returns the step that torch's own AdamW has once for all parameters, where the optimizer is not sharded."""
    if not isinstance(value, dict):
        return None
    state = value.get("state")
    step = state.get("common_step") if isinstance(state, dict) else None
    if step is not None:
        number = step.item() if hasattr(step, "item") and getattr(step, "size", 0) == 1 else step
        return number if isinstance(number, int | float) and not isinstance(number, bool) else None
    inner = [item for key, item in value.items() if key == "optimizer" or is_number(key)]
    return next((found for item in inner if (found := _common_step(item)) is not None), None)


def _fragments(tensor: StoredTensor, model: StoredTensor) -> Problem:
    return Problem(
        "SR-MEG-LAYOUT",
        "an optimizer tensor is neither in its parameter's shape nor in parts of it",
        where={"tensor": tensor.name},
        expected=list(model.shape),
        found=list(tensor.shape),
        hint="it belongs to another model, or to a release whose encoding is not known; its values are not read",
    )


def _no_plan(source: Source, group: int, why: str) -> Problem:
    return Problem(
        "SR-MEG-LAYOUT",
        f"the flat optimizer state of model-parallel rank {group} cannot be placed: {why}",
        where={"file": str(source.root), "key": f"dp_group_idx_{group}"},
        hint="the checkpoint does not store which element belongs to which parameter. Load it at the layout it was "
        "saved at and save it with --dist-ckpt-optim-fully-reshardable",
    )


def _unconfirmed(source: Source, owner: Owner, plan: Plan) -> Problem:
    return Problem(
        "SR-MEG-ORDER",
        f"masters do not round to the weights at {plan.sampled - plan.agreed} of {plan.sampled} sampled places of "
        f"{owner}",
        where={"file": str(source.root)},
        hint="model and optimizer files are of different saves, masters were replaced, or parameters lie in another "
        "order than is known; which of these cannot be told",
    )

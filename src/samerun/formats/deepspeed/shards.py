"""An optimizer file as flat shards: for every flattened group, its piece of masters and slots, and its counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samerun.formats.base import Extent
from samerun.formats.deepspeed.names import FileName
from samerun.formats.deepspeed.states import StateFile, as_count, as_dict, as_list
from samerun.formats.torchfile import Inert, TensorRef


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """One rank's piece of one flattened group. `scalars` are counters that hold for all of it (`step`).

    `length` is the length of the piece with the padding that was there while training. `odd` names slots whose shape
    fits neither.
    """

    masters: Extent | None
    slots: Mapping[str, Extent]
    scalars: Mapping[str, Any]
    length: int
    odd: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class OptimStates:
    """One optimizer file. `groups` are the optimizer's parameter groups with everything but their members.

    `members` gives for each of them the flat shards that are its own. `alignment` is, by group, the padding after each
    parameter. `mappings` are what the rank itself believes to hold: by group, name to (start, number of elements).
    """

    name: FileName
    file: StateFile
    stage: int | None
    shards: tuple[FlatShard, ...]
    partitions: tuple[int, ...]
    groups: tuple[Mapping[str, Any], ...]
    members: tuple[tuple[int, ...], ...]
    alignment: tuple[tuple[int, ...], ...] | None = None
    mappings: tuple[Mapping[str, tuple[int, int]], ...] | None = None
    layout: str = "partitioned"
    scaler: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])


# Keys of an optimizer's state that the reader itself takes apart.
_TAKEN = frozenset({
    "base_optimizer_state", "single_partition_of_fp32_groups", "optimizer_state_dict", "fp32_flat_groups",
    "group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings", "zero_stage",
    "loss_scaler", "ds_version", "universal_checkpoint_info",
})  # fmt: skip

_OWN_KEYS = frozenset({"partition_count", "zero_stage", "fp32_flat_groups", "group_paddings"})


def read_optim(name: FileName, file: StateFile) -> OptimStates:
    """Sorts the content of an optimizer file. Anything malformed is treated as absent."""
    whole = as_dict(file.value)
    bare = not _OWN_KEYS.isdisjoint(whole)  # a conversion keeps the optimizer's state without the file around it
    inner = whole if bare else as_dict(whole.get("optimizer_state_dict")) or whole
    whole_groups = enum_value(inner.get("zero_stage")) in (1, 2)
    if not whole_groups and ("fp32_flat_groups" in inner or isinstance(inner.get("optimizer_state_dict"), dict)):
        return _stage3(name, file, inner)
    return _stage12(name, file, inner)


def _stage12(name: FileName, file: StateFile, inner: dict[Any, Any]) -> OptimStates:
    base = inner.get("base_optimizer_state")
    elastic = isinstance(base, list)
    masters = as_list(inner.get("single_partition_of_fp32_groups"))
    paddings = as_list(inner.get("group_paddings"))
    own_layout = "zero_stage" in inner  # BF16_Optimizer records no stage and keeps the padding of its masters
    groups = [] if elastic else [as_dict(group) for group in as_list(as_dict(base).get("param_groups"))]
    states = as_list(base) if elastic else _states_by_group(as_dict(base), groups, len(masters))
    shards: list[FlatShard] = []
    for number, master in enumerate(masters):
        padding = (as_count(paddings[number]) or 0) if own_layout and number < len(paddings) else 0
        state = as_dict(states[number]) if number < len(states) else {}
        shards.append(_shard(file, master, state, padding))
    counts = inner.get("partition_count")
    alignment = inner.get("param_alignment_paddings")
    return OptimStates(
        name,
        file,
        stage=as_count(enum_value(inner.get("zero_stage"))),
        shards=tuple(shards),
        partitions=tuple(
            as_count(count) or 0 for count in (counts if isinstance(counts, list) else [counts] * len(masters))
        ),
        groups=tuple(_settings(group) for group in groups),
        members=tuple((number,) for number in range(len(masters))),
        alignment=_alignment(alignment),
        mappings=_mappings(inner.get("param_slice_mappings")),
        layout="elastic" if elastic else "partitioned" if own_layout else "bf16-optimizer",
        scaler=inner.get("loss_scaler"),
        extras={str(key): value for key, value in inner.items() if key not in _TAKEN},
    )


def _stage3(name: FileName, file: StateFile, inner: dict[Any, Any]) -> OptimStates:
    base = as_dict(inner.get("optimizer_state_dict"))
    masters = as_list(inner.get("fp32_flat_groups"))
    groups = [as_dict(group) for group in as_list(base.get("param_groups"))]
    states = as_dict(base.get("state"))
    members = _sub_groups(groups, max(len(masters), len(states)))
    count = as_count(inner.get("partition_count")) or 0
    shards = [
        _shard(file, masters[number] if number < len(masters) else None, as_dict(states.get(number)), 0)
        for number in range(max(len(masters), len(states)))
    ]
    return OptimStates(
        name,
        file,
        stage=3,
        shards=tuple(shards),
        partitions=_partitions(inner, count, len(shards)),
        groups=tuple(_settings(group) for group in groups),
        members=members,
        layout="sub-groups",
        scaler=inner.get("loss_scaler"),
        extras={str(key): value for key, value in inner.items() if key not in _TAKEN},
    )


def _partitions(inner: dict[Any, Any], count: int, num_shards: int) -> tuple[int, ...]:
    """Returns by sub-group how many ranks share it: the data-parallel degree, unless recorded otherwise."""
    recorded = [as_dict(group) for group in as_list(inner.get("ds_zero_partition_groups"))]
    own = [as_count(group.get("partition_count")) or count for group in recorded]
    return tuple(own[number] if number < len(own) else count for number in range(num_shards))


def _sub_groups(groups: Sequence[Mapping[Any, Any]], num_shards: int) -> tuple[tuple[int, ...], ...]:
    """Returns the sub-groups of each group; the optimizer's state numbers them through, in order."""
    listed = [
        tuple(number for number in as_list(group.get("params")) if as_count(number) is not None) for group in groups
    ]
    if [number for numbers in listed for number in numbers] == list(range(num_shards)):
        return tuple(listed)
    return tuple((number,) for number in range(num_shards))


def _states_by_group(base: dict[Any, Any], groups: list[dict[Any, Any]], count: int) -> list[Any]:
    """Returns the optimizer's state of each group's one flat parameter."""
    state = as_dict(base.get("state"))
    found: list[Any] = []
    for number in range(max(count, len(groups))):
        listed = as_list(groups[number].get("params")) if number < len(groups) else []
        found.append(state.get(listed[0] if len(listed) == 1 and as_count(listed[0]) is not None else number))
    return found


def _shard(file: StateFile, master: Any, state: dict[Any, Any], padding: int) -> FlatShard:
    masters = file.flat(master) if isinstance(master, TensorRef) else None
    flats = {str(slot): value for slot, value in state.items() if isinstance(value, TensorRef) and value.shape}
    length = masters.shape[0] + padding if masters is not None else _longest(flats)
    lean = length - padding
    slots: dict[str, Extent] = {}
    odd: list[str] = []
    for slot, value in flats.items():
        extent = file.flat(value)
        if extent is not None and extent.shape[0] in (length, lean):
            slots[slot] = extent
        elif _one(value):
            continue
        else:
            odd.append(slot)
    scalars = {str(slot): value for slot, value in state.items() if str(slot) not in slots and str(slot) not in odd}
    return FlatShard(masters, slots, scalars, length, tuple(odd))


def _one(value: TensorRef) -> bool:
    return all(size == 1 for size in value.shape)


def _longest(flats: Mapping[str, TensorRef]) -> int:
    return max((value.shape[0] for value in flats.values() if len(value.shape) == 1), default=0)


def _settings(group: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in group.items() if key != "params"}


def _alignment(value: Any) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(value, list):
        return None
    return tuple(tuple(as_count(padding) or 0 for padding in as_list(group)) for group in value)


def _mappings(value: Any) -> tuple[Mapping[str, tuple[int, int]], ...] | None:
    if not isinstance(value, list):
        return None
    return tuple(
        {str(name): place for name, item in as_dict(group).items() if (place := _fragment(item)) is not None}
        for group in value
    )


def _fragment(item: Any) -> tuple[int, int] | None:
    state = as_dict(item.state) if isinstance(item, Inert) else {}
    start, count = as_count(state.get("start")), as_count(state.get("numel"))
    return None if start is None or count is None else (start, count)


def enum_value(value: Any) -> Any:
    """Returns the value of an enumeration's record, other values as they are."""
    return value.args[0] if isinstance(value, Inert) and len(value.args) == 1 else value

"""From opened files to logical state: slots by parameter, model files for the rest, and one rank's shard to compare."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from samerun.core.dtype import DTYPES, DType
from samerun.core.flat import row_major_strides
from samerun.core.state import LogicalState, ParamGroup, RecordedProgress, Role, TensorKey, normalize_fqn
from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.base import Extent
from samerun.formats.deepspeed.client import Sections, read_sections
from samerun.formats.deepspeed.gather import Gatherer, Replica, parts_of_run, pieces_of_run, pieces_of_tensor
from samerun.formats.deepspeed.layout import partitioned_segments
from samerun.formats.deepspeed.masters import Counter, Gathered, add_counters, by_role, settle_masters
from samerun.formats.deepspeed.model import Shapes
from samerun.formats.deepspeed.model_tensors import Cutter, Names, add_model, aliases_by_owner, collect_names
from samerun.formats.deepspeed.opened import topology
from samerun.formats.deepspeed.slices import whole
from samerun.formats.deepspeed.states import StateFile, as_dict, enum_number, plain_value
from samerun.formats.placement import Placement, place
from samerun.formats.torchfile import TensorRef
from samerun.formats.universal.source import Source

MASTERS = "fp32"
LABEL = "the optimizer's own masters"
RANK_ZERO = "rank 0's shard"


@dataclass(slots=True)
class Slots:
    """What was read from parameters' folders: masters and counters, and what does not fit.

    `flat` are the slots that hold a tensor of their parameter's size.
    """

    flat: frozenset[str] = frozenset()
    masters: dict[str, tuple[str, DType]] = field(default_factory=dict[str, tuple[str, DType]])
    counters: dict[str, tuple[TensorKey, Counter]] = field(default_factory=dict[str, tuple[TensorKey, Counter]])
    lost: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    misshapen: list[Problem] = field(default_factory=list[Problem])


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The logical state with what is needed to read it and to check its values.

    `replicas` are values kept twice: masters beside weights, and rank 0's shard of everything (from stage 3). Buffers
    are not among them: each rank may well have its own.
    """

    state: LogicalState
    placements: Mapping[str, Placement]
    constants: Mapping[str, int | float]
    replicas: tuple[Replica, ...]
    names: Names
    slots: Slots
    source: Source


def assemble(source: Source, recognised: str) -> Assembled:
    """Builds the logical state of an opened directory. Findings are the caller's to add."""
    names = collect_names(source)
    cutter = Cutter(source, names)
    gatherer = Gatherer()
    add_model(source, names, cutter, gatherer)
    slots = _add_slots(source, names, gatherer)
    gathered = Gathered(*gatherer.finish(aliases_by_owner(names.shared)))
    gathered.replicas[:] = [copy for copy in gathered.replicas if not copy.key.startswith(Role.BUFFER.value)]
    gathered.replicas += _rank_zero(source, gathered)
    settle_masters(gathered, slots.masters, names, source.config, LABEL)
    constants = add_counters(gathered, {**slots.counters, **_common_counters(source, gathered)})
    sections = read_sections(list(source.models.values()), source.degrees, source.files) if source.models else None
    state = LogicalState(
        format="universal",
        tensors=by_role(gathered.tensors),
        groups=_groups(source, names),
        progress=sections.progress if sections else RecordedProgress(),
        scheduler=sections.scheduler if sections else None,
        rng=sections.rng if sections else {},
        data=sections.data if sections else {},
        objects=_objects(source, sections),
        topology=topology(source.degrees, sharded=True),
        written_by=_written_by(source, recognised),
        problems=(*source.problems, *gatherer.problems, *slots.misshapen, *(sections.problems if sections else ())),
    )
    return Assembled(state, gathered.placements, constants, tuple(gathered.replicas), names, slots, source)


def _add_slots(source: Source, names: Names, gatherer: Gatherer) -> Slots:
    """Adds every slot of every trained parameter. Parameters are trained if a model file lists them as flattened."""
    trained = names.trained or set(source.slots)
    slots = Slots(flat=_flat_slots(source, trained))
    kinds = _slot_sets(source, trained)
    for name in [*(name for name in names.order if name in trained), *sorted(trained - set(names.order))]:
        held = source.slots.get(name, {})
        for slot, file in held.items():
            _add_slot(source, names, gatherer, slots, name, slot, file)
        absent = sorted(frozenset[str]().union(*(kind for kind in kinds if kind >= held.keys())) - held.keys())
        if absent:
            slots.lost[name] = absent
            _announce(names, gatherer, slots, name, [slot for slot in absent if slot != "step"])
    return slots


def _slot_sets(source: Source, trained: set[str]) -> set[frozenset[str]]:
    """Returns the sets of slots that parameters have here: one optimizer may keep several kinds (Muon beside Adam)."""
    return {frozenset({MASTERS, *source.slots.get(name, {})}) for name in trained}


def _add_slot(
    source: Source, names: Names, gatherer: Gatherer, slots: Slots, name: str, slot: str, file: StateFile
) -> None:
    value = stored_value(file)
    fqn = normalize_fqn(name)
    if slot in slots.flat:
        extent = _extent_of(names, slots, name, slot, file, value)
        if extent is None:
            _announce(names, gatherer, slots, name, [slot])
            return
        key = TensorKey(Role.MASTER, fqn) if slot == MASTERS else TensorKey(Role.OPTIM, fqn, slot)
        pieces = pieces_of_tensor(extent, whole(extent.shape))
        gatherer.add(key, name, extent.dtype, extent.shape, (0, 0, 0), pieces)
        if slot == MASTERS:
            slots.masters[fqn] = (name, extent.dtype)
        return
    read = enum_number(value, file, source.files)
    if read is not None:
        key = TensorKey(Role.OPTIM, fqn, slot)
        slots.counters[str(key)] = (key, Counter(read, file.extent(value) if isinstance(value, TensorRef) else None))


def stored_value(file: StateFile) -> Any:
    """Returns what a slot's file holds: the tensor or number itself, or the `param` of a mapping."""
    return as_dict(file.value).get("param") if isinstance(file.value, dict) else file.value


def _flat_slots(source: Source, trained: set[str]) -> frozenset[str]:
    """Returns the slots that are tensors of their parameter's size, not counters: those that any parameter has so."""
    found = {MASTERS}
    for name in trained:
        for slot, file in source.slots.get(name, {}).items():
            value = stored_value(file)
            if isinstance(value, TensorRef) and math.prod(value.shape) > 1:
                found.add(slot)
    return frozenset(found)


def _extent_of(names: Names, slots: Slots, name: str, slot: str, file: StateFile, value: Any) -> Extent | None:
    """Returns where a slot's values lie, in its parameter's shape; None, and a finding, if they are not that."""
    shape = _shape_of(names, name)
    try:
        extent = _shaped(file.extent(value), shape) if isinstance(value, TensorRef) else None
    except CorruptCheckpoint as error:
        slots.misshapen += error.problems
        return None
    if extent is None:
        slots.misshapen.append(_misshapen(file, name, slot, value, shape))
    return extent


def _announce(names: Names, gatherer: Gatherer, slots: Slots, name: str, absent: list[str]) -> None:
    """Makes slots known that a parameter should have and has no file for, so that their values are missed."""
    shape = _shape_of(names, name)
    fqn = normalize_fqn(name)
    for slot in absent if shape is not None else ():
        key = TensorKey(Role.MASTER, fqn) if slot == MASTERS else TensorKey(Role.OPTIM, fqn, slot)
        gatherer.add(key, name, DTYPES["float32"], shape or (), (0, 0, 0), ())
        if slot == MASTERS:
            slots.masters[fqn] = (name, DTYPES["float32"])


def _shape_of(names: Names, name: str) -> tuple[int, ...] | None:
    """Returns a parameter's shape where one rank holds it whole; None where it is cut over tensor-parallel ranks."""
    found = [held for (_, known), held in names.shapes.items() if known == name]
    shapes = {shape for held in found for shape in held.values()}
    ranks = {rank for held in found for rank in held}
    return shapes.pop() if len(shapes) == 1 and ranks == {0} else None


def _shaped(extent: Extent, shape: tuple[int, ...] | None) -> Extent | None:
    """Returns a stored tensor in its parameter's shape (stage 3 stores it flat); None if it cannot have it."""
    if shape is None or extent.shape == shape:
        return extent
    if len(extent.shape) == 1 and extent.contiguous and math.prod(shape) == extent.shape[0]:
        return replace(extent, shape=shape, strides=row_major_strides(shape))
    return None


def _misshapen(file: StateFile, name: str, slot: str, value: Any, shape: tuple[int, ...] | None) -> Problem:
    return Problem(
        "SR-UNI-SHAPE",
        f"{slot} of a parameter has another number of elements than the parameter",
        where={"file": str(file.path), "tensor": name},
        expected=list(shape or ()),
        found=list(value.shape) if isinstance(value, TensorRef) else "no tensor",
        hint="the converter read files of two saves, or of two models; convert again into an empty folder",
    )


def _rank_zero(source: Source, gathered: Gathered) -> list[Replica]:
    """Returns rank 0's own shard, which a conversion from stage 3 leaves in the common file, as copies to compare."""
    common, first = source.common, source.first
    if common is None or common.stage != 3 or first is None or first.groups is None or source.degrees.tp > 1:
        return []
    found: list[Replica] = []
    for number, shapes in enumerate(first.groups[: len(common.shards)]):
        shard, partitions = common.shards[number], common.partitions[number] if common.partitions else 0
        flats = {**shard.slots, **({MASTERS: shard.masters} if shard.masters is not None else {})}
        for segment in partitioned_segments(shapes, partitions, 0) if partitions else ():
            cut = whole(segment.shape)
            parts = parts_of_run(segment.shape, cut, segment.first, segment.count)
            for slot, extent in flats.items():
                key = _key_of(normalize_fqn(segment.name), slot)
                if key in gathered.tensors and segment.start + segment.count <= extent.shape[0]:
                    pieces = pieces_of_run(extent, segment.start, segment.shape, cut, parts, None)
                    found.append(Replica(key, place(pieces, len(segment.shape)), RANK_ZERO))
    return found


def _key_of(fqn: str, slot: str) -> str:
    return f"master:{fqn}" if slot == MASTERS else f"optim.{slot}:{fqn}"


def _common_counters(source: Source, gathered: Gathered) -> dict[str, tuple[TensorKey, Counter]]:
    """Returns the counters that a conversion from stage 3 keeps in the common file only, for each parameter."""
    common, first = source.common, source.first
    found: dict[str, tuple[TensorKey, Counter]] = {}
    if common is None or first is None or first.groups is None:
        return found
    for shapes, shard in zip(first.groups, common.shards, strict=False):
        for slot, value in shard.scalars.items():
            read = enum_number(value, common.file, source.files)
            for name, _ in shapes if read is not None else ():
                key = TensorKey(Role.OPTIM, normalize_fqn(name), slot)
                extent = common.file.extent(value) if isinstance(value, TensorRef) else None
                if str(key) not in gathered.tensors and read is not None:
                    found[str(key)] = (key, Counter(read, extent))
    return found


def _groups(source: Source, names: Names) -> tuple[ParamGroup, ...]:
    """Returns the groups: hyperparameters from the common file, members from the model file's flattened groups."""
    common = source.common
    if common is None:
        return ()
    settings = source.group_settings or [dict(group) for group in common.groups]
    members = common.members if common.stage == 3 else tuple((number,) for number in range(len(settings)))
    groups: list[ParamGroup] = []
    for number, group in enumerate(settings):
        fqns: dict[str, None] = {}
        for flattened in _flattened(source):
            for sub in members[number] if number < len(members) else ():
                if sub < len(flattened):
                    fqns.update(dict.fromkeys(_in_order(source, names, flattened[sub])))
        plain = plain_value(group, common.file, source.files)
        plain = {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in plain.items()}
        plain.pop("moe", None)
        groups.append(ParamGroup(tuple(fqns), plain))
    return tuple(groups)


def _flattened(source: Source) -> Iterator[tuple[Shapes, ...]]:
    """Yields the flattened groups of every model-parallel rank's first model file."""
    seen: set[int] = set()
    for (mp, _), model in source.models.items():
        if mp not in seen and model.groups is not None:
            seen.add(mp)
            yield model.groups


def _in_order(source: Source, names: Names, shapes: Shapes) -> list[str]:
    """Returns a group's names; in the model's order where the run shuffled the flattened one."""
    listed = [name for name, _ in shapes]
    if as_dict(source.config.get("zero_optimization")).get("round_robin_gradients") is True:
        rank = {name: place for place, name in enumerate(names.order)}
        listed.sort(key=lambda name: rank.get(name, len(rank)))
    return [normalize_fqn(name) for name in listed]


def _objects(source: Source, sections: Sections | None) -> dict[str, object]:
    kept: dict[str, object] = dict(sections.objects) if sections else {}
    if source.common is not None:
        scaler = as_dict(source.common.file.value).get("loss_scaler")
        if scaler is not None:
            kept["loss_scaler"] = plain_value(scaler, source.common.file, source.files)
    return kept


def _written_by(source: Source, recognised: str) -> dict[str, str]:
    version = str(source.first.value.get("ds_version") or "") if source.first is not None else ""
    name = f"DeepSpeed universal checkpoint, from ZeRO stage {source.stage}"
    reason = f"looks like a universal checkpoint, because {recognised}"
    return {**({"deepspeed": version} if version else {}), "format": name, "recognised": reason}

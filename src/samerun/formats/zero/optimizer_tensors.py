"""Masters, slots and counters of every parameter, from the flat shards of stages 1 to 3; and the parameter groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from samerun.core.dtype import DType
from samerun.core.state import Role, TensorKey, normalize_fqn
from samerun.errors import Problem
from samerun.formats.base import Extent
from samerun.formats.deepspeed.experts import fused_slice, global_name, local_experts
from samerun.formats.deepspeed.gather import Gatherer, parts_of_run, pieces_of_run
from samerun.formats.deepspeed.layout import (
    ALIGNMENT_ELEMENTS,
    Segment,
    concatenated_elements,
    concatenated_segments,
    partitioned_elements,
    partitioned_segments,
)
from samerun.formats.deepspeed.masters import Counter
from samerun.formats.deepspeed.model import Shapes
from samerun.formats.deepspeed.model_tensors import Cutter, Names
from samerun.formats.deepspeed.shards import FlatShard, OptimStates
from samerun.formats.deepspeed.slices import Slice
from samerun.formats.deepspeed.states import enum_number
from samerun.formats.torchfile import TensorRef
from samerun.formats.zero.source import Source, is_expert_group


@dataclass(slots=True)
class Flat:
    """What was collected: counters by key with every rank's reading of them, groups, findings.

    `masters` are the keys' parameters with the element type of their masters.
    """

    counters: dict[str, tuple[TensorKey, Counter]] = field(default_factory=dict[str, tuple[TensorKey, Counter]])
    steps: dict[tuple[int, int, int], int | float] = field(default_factory=dict[tuple[int, int, int], int | float])
    groups: list[tuple[list[str], Mapping[str, Any]]] = field(default_factory=list[tuple[list[str], Mapping[str, Any]]])
    masters: dict[str, tuple[str, DType]] = field(default_factory=dict[str, tuple[str, DType]])
    problems: list[Problem] = field(default_factory=list[Problem])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank stands in one group: which part it holds, of how many, which experts, and which copy it is."""

    partition: int
    partitions: int
    ep_rank: int
    copy: int


def add_flat(source: Source, names: Names, cutter: Cutter, gatherer: Gatherer) -> Flat:
    """Adds what the optimizer files of all ranks hold."""
    flat = Flat()
    sizes = _shard_lengths(source)
    for (mp, dp), optim in sorted(source.optims.items()):
        shapes = shapes_for(source, mp, dp)
        if shapes is None:
            flat.problems.append(_no_shapes(optim))
            continue
        if len(shapes) != len(optim.shards):
            flat.problems.append(_other_groups(optim, len(shapes)))
        for group, members in enumerate(optim.members):
            settings = optim.groups[group] if group < len(optim.groups) else {}
            for number in members:
                if number < len(shapes) and number < len(optim.shards):
                    adder = _Adder(source, names, cutter, gatherer, flat, optim, settings)
                    adder.add(number, shapes[number], sizes.get((mp, number), 0))
    return flat


def shapes_for(source: Source, mp: int, dp: int) -> tuple[Shapes, ...] | None:
    """Returns the flattened order that holds for a rank: its own model file's (stage 3), else its pipeline stage's."""
    for place in ((mp, dp), (mp, None)):
        model = source.models.get(place)
        if model is not None and model.groups is not None:
            return model.groups
    model = source.model_of(mp)
    if model is not None and model.groups is not None:
        return model.groups
    return None


def _shard_lengths(source: Source) -> dict[tuple[int, int], int]:
    """Returns by (model-parallel rank, group) the length of a shard with its padding: what most ranks agree on."""
    seen: dict[tuple[int, int], list[int]] = {}
    for (mp, _), optim in source.optims.items():
        for number, shard in enumerate(optim.shards):
            if shard.length:
                seen.setdefault((mp, number), []).append(shard.length)
    return {
        place: max(set(lengths), key=lambda length: (lengths.count(length), length)) for place, lengths in seen.items()
    }


def place_of(source: Source, optim: OptimStates, number: int, settings: Mapping[str, Any]) -> _Place:
    """Returns which part of a flattened group a rank holds.

    Experts are shared by the ranks that hold the same ones: those with equal rank modulo the expert degree, or
    neighbours where the run put data parallelism before expert parallelism.
    """
    dp, rank = source.degrees.dp, optim.name.dp or 0
    partitions = optim.partitions[number] if number < len(optim.partitions) else dp
    if not partitions or partitions >= dp or dp % partitions:
        return _Place(rank, dp, 0, 0)
    others = dp // partitions
    if not is_expert_group(settings):
        return _Place(rank % partitions, partitions, 0, rank // partitions)
    if source.config.get("use_data_before_expert_parallelism") is True:
        return _Place(rank % partitions, partitions, rank // partitions, 0)
    return _Place(rank // others, partitions, rank % others, 0)


class _Adder:
    """Adds one rank's shards of one parameter group."""

    def __init__(
        self,
        source: Source,
        names: Names,
        cutter: Cutter,
        gatherer: Gatherer,
        flat: Flat,
        optim: OptimStates,
        settings: Mapping[str, Any],
    ) -> None:
        self.source = source
        self.names = names
        self.cutter = cutter
        self.gatherer = gatherer
        self.flat = flat
        self.optim = optim
        self.settings = settings
        self.stage, self.rank = source.degrees.position(optim.name.mp)

    def add(self, number: int, shapes: Shapes, usual_length: int) -> None:
        """Adds the shard of one group (stages 1 and 2) or sub-group (stage 3)."""
        shard = self.optim.shards[number]
        place = place_of(self.source, self.optim, number, self.settings)
        length = shard.length
        problem = check_length(self.optim, number, shapes, place.partitions, usual_length)
        if problem is not None:
            self.flat.problems.append(problem)
            return
        counters = self._counters(number, shard)
        counts = local_experts(name for name, _ in shapes)
        for name, shape in shapes:
            self._announce(shard, global_name(name, counts, place.ep_rank), shape, place, counters)
        for segment in self._segments(number, shapes, place, length):
            self._add_segment(shard, segment, global_name(segment.name, counts, place.ep_rank), place)

    def _announce(
        self, shard: FlatShard, name: str, shape: tuple[int, ...], place: _Place, counters: Mapping[str, Counter]
    ) -> None:
        """Makes every tensor of the group known, so that one whose only file is missing is missed in values."""
        full, cut = self._cut(name, shape, place)
        fqn = normalize_fqn(full)
        copy = (self.stage, self.rank if cut.replicated else 0, place.copy)
        for key, extent, _ in self._keys(shard, fqn):
            self.gatherer.add(key, name, extent.dtype, cut.shape, copy, ())
        if shard.masters is not None:
            self.flat.masters.setdefault(fqn, (name, shard.masters.dtype))
        for slot, counter in counters.items():
            key = TensorKey(Role.OPTIM, fqn, slot)
            self.flat.counters.setdefault(str(key), (key, counter))

    def _cut(self, name: str, shape: tuple[int, ...], place: _Place) -> tuple[str, Slice]:
        fused = fused_slice(name, shape, self.names.fused, place.ep_rank)
        return fused or self.cutter.cut(name, self.stage, self.rank, shape)

    def _keys(self, shard: FlatShard, fqn: str) -> list[tuple[TensorKey, Extent, str | None]]:
        """Returns what a shard holds of each of its parameters: key, flat buffer, and slot."""
        found: list[tuple[TensorKey, Extent, str | None]] = [
            (TensorKey(Role.OPTIM, fqn, slot), extent, slot) for slot, extent in shard.slots.items()
        ]
        if shard.masters is not None:
            found.append((TensorKey(Role.MASTER, fqn), shard.masters, None))
        return found

    def _segments(self, number: int, shapes: Shapes, place: _Place, length: int) -> Iterator[Segment]:
        if self.optim.stage == 3:
            return partitioned_segments(shapes, place.partitions, place.partition)
        return concatenated_segments(shapes, alignment_of(self.optim, number), length, place.partition)

    def _add_segment(self, shard: FlatShard, segment: Segment, name: str, place: _Place) -> None:
        full, cut = self._cut(name, segment.shape, place)
        copy = (self.stage, self.rank if cut.replicated else 0, place.copy)
        parts = parts_of_run(segment.shape, cut, segment.first, segment.count)
        for key, extent, slot in self._keys(shard, normalize_fqn(full)):
            if segment.start + segment.count > extent.shape[0]:
                self.flat.problems.append(_too_short(self.optim, str(key), extent))
                continue
            pieces = pieces_of_run(extent, segment.start, segment.shape, cut, parts, slot)
            self.gatherer.add(key, name, extent.dtype, cut.shape, copy, pieces)

    def _counters(self, number: int, shard: FlatShard) -> dict[str, Counter]:
        """Returns a shard's counters; a step that the group keeps counts where its state has none."""
        found: dict[str, Counter] = {}
        values = {**({"step": self.settings["step"]} if "step" in self.settings else {}), **shard.scalars}
        for slot, value in values.items():
            read = enum_number(value, self.optim.file, self.source.files)
            if read is None:
                continue
            extent = self.optim.file.extent(value) if isinstance(value, TensorRef) else None
            found[slot] = Counter(read, extent)
            if slot == "step":
                self.flat.steps[(self.optim.name.mp, self.optim.name.dp or 0, number)] = read
        return found


def alignment_of(optim: OptimStates, number: int) -> tuple[int, ...]:
    """Returns the padding after each parameter of a group."""
    return optim.alignment[number] if optim.alignment and number < len(optim.alignment) else ()


def check_length(optim: OptimStates, number: int, shapes: Shapes, partitions: int, usual_length: int) -> Problem | None:
    """Checks that a group's parameters fill a shard, neither too many nor far too few, and that shards are alike."""
    if optim.stage == 3:
        needed = most = partitioned_elements(shapes, partitions)
    else:
        needed = -(-concatenated_elements(shapes, alignment_of(optim, number)) // partitions)
        most = needed + ALIGNMENT_ELEMENTS * partitions
    found = optim.shards[number].length
    if needed <= found <= most and found == usual_length:
        return None
    return Problem(
        "SR-ZERO-LAYOUT",
        f"the parameters of group {number} do not fill its flat buffer: it is of another save or another model",
        where={"file": str(optim.file.path), "rank": optim.name.dp},
        expected=f"{needed} elements on each of {partitions} ranks",
        found=f"{found} elements",
        hint="the files come from saves with another world size, another model or other groups; restore the directory",
    )


def _no_shapes(optim: OptimStates) -> Problem:
    return Problem(
        "SR-META-SHAPES",
        "no model file says which parameters this optimizer file holds",
        where={"file": str(optim.file.path)},
        hint="flat optimizer files hold numbers only; their names and shapes are in the model files. Restore those",
    )


def _other_groups(optim: OptimStates, expected: int) -> Problem:
    return Problem(
        "SR-ZERO-LAYOUT",
        "the optimizer file has another number of flattened groups than the model file lists",
        where={"file": str(optim.file.path), "rank": optim.name.dp},
        expected=f"{expected} groups",
        found=f"{len(optim.shards)} groups",
        hint="the files come from different saves or different models; restore the whole directory from one of them",
    )


def _too_short(optim: OptimStates, key: str, extent: Extent) -> Problem:
    return Problem(
        "SR-ZERO-LAYOUT",
        "a flat buffer ends before the values that belong into it",
        where={"file": str(optim.file.path), "tensor": key, "rank": optim.name.dp},
        found=f"{extent.shape[0]} elements",
        hint="the file is of a save with another world size or of another model; restore the whole directory",
    )

"""Flat buffers to be written: which elements of which parameters a rank holds, as parts of storages.

The inverse of what readers do with `layout`: the same segments, from the state's boxes into a rank's buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samerun.core.dtype import DType
from samerun.core.flat import flat_boxes
from samerun.core.state import TensorEntry
from samerun.formats.deepspeed.layout import (
    ALIGNMENT_ELEMENTS,
    Segment,
    concatenated_elements,
    concatenated_segments,
    partitioned_elements,
    partitioned_segments,
)
from samerun.formats.deepspeed.training import Trained
from samerun.formats.torchfile.emit import Part, Storage, Tensor

_BYTES_ALIGNED = 16


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """One rank's part of one flattened group: `length` elements, of which the last `padding` are no parameter's."""

    members: tuple[Trained, ...]
    segments: tuple[Segment, ...]
    length: int
    padding: int = 0

    def masters(self, dtype: DType, *, lean: bool = False) -> Tensor:
        """Returns the fp32 values, without the padding at the end if `lean`."""
        entries = {member.name: member.masters for member in self.members}
        return self._flat(dtype, entries, self.length - (self.padding if lean else 0))

    def slot(self, name: str, dtype: DType) -> Tensor:
        """Returns a slot's values; zeros for parameters that lack it."""
        entries = {member.name: member.slots[name] for member in self.members if name in member.slots}
        return self._flat(dtype, entries, self.length)

    def _flat(self, dtype: DType, entries: dict[str, TensorEntry], length: int) -> Tensor:
        parts = tuple(
            part
            for segment in self.segments
            if segment.name in entries
            for part in parts_of(entries[segment.name], segment.first, segment.count, segment.start)
        )
        return Tensor(Storage(dtype, length, parts), (length,))


def parts_of(entry: TensorEntry, first: int, count: int, start: int) -> Iterator[Part]:
    """Yields the boxes of elements `first` to `first + count` of a tensor, from element `start` of a storage on."""
    for box in flat_boxes(entry.shape, first, first + count):
        yield Part(str(entry.key), box.offsets, box.sizes, start + box.start - first)


def shapes_of(members: Sequence[Trained]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns names and shapes in flattened order."""
    return tuple((member.name, member.shape) for member in members)


def round_robin(members: Sequence[Trained], ranks: int) -> tuple[Trained, ...]:
    """Returns the order in which `round_robin_gradients` flattens a group (`_round_robin_reorder`).

    It depends on the number of ranks: every `ranks`-th parameter first, then those after them.
    """
    return tuple(member for rank in range(ranks) for member in members[rank::ranks])


def alignment_gaps(members: Sequence[Trained], *, aligned: bool) -> tuple[int, ...]:
    """Returns the padding after each parameter but the last, in elements: to 16 bytes with `parameter_alignment`."""
    gaps: list[int] = []
    position = 0
    for number, member in enumerate(members):
        width = member.weights.dtype.num_bytes
        position += math.prod(member.shape)
        last = number == len(members) - 1
        gaps.append(-position % (_BYTES_ALIGNED // math.gcd(_BYTES_ALIGNED, width)) if aligned and not last else 0)
        position += gaps[-1]
    return tuple(gaps)


def concatenated_buffer(members: Sequence[Trained], gaps: Sequence[int], ranks: int, rank: int) -> Buffer:
    """Returns a rank's part of a group at stages 1 and 2: an equal part of all parameters one after the other."""
    shapes = shapes_of(members)
    held = concatenated_elements(shapes, gaps)
    length = -(-held // (ALIGNMENT_ELEMENTS * ranks)) * ALIGNMENT_ELEMENTS
    padding = min(length, max(0, (rank + 1) * length - held))
    return Buffer(tuple(members), tuple(concatenated_segments(shapes, gaps, length, rank)), length, padding)


def partitioned_buffer(members: Sequence[Trained], ranks: int, rank: int) -> Buffer:
    """Returns a rank's part of a sub-group at stage 3: an equal part of every parameter, padding kept."""
    shapes = shapes_of(members)
    segments = tuple(partitioned_segments(shapes, ranks, rank))
    return Buffer(tuple(members), segments, partitioned_elements(shapes, ranks))


def sub_groups(members: Sequence[Trained], ranks: int, size: int) -> list[tuple[Trained, ...]]:
    """Cuts a group into sub-groups that a rank holds at least `size` elements of, the last one less (stage 3)."""
    counts = [-(-math.prod(member.shape) // ranks) for member in members]
    if size >= sum(counts):
        return [tuple(members)] if members else []
    found: list[tuple[Trained, ...]] = []
    current: list[Trained] = []
    held = 0
    for number, (member, count) in enumerate(zip(members, counts, strict=True)):
        current.append(member)
        held += count
        if held >= size or number == len(members) - 1:
            found.append(tuple(current))
            current, held = [], 0
    return found

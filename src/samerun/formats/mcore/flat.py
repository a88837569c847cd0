"""Megatron's flat buffers: which element of which buffer belongs to which parameter.

The distributed optimizer lays parameters out in reversed order of registration, each start aligned to 64 elements, in
buckets whose ends are padded to lcm(DP, 128) (megatron.core 0.13 to 0.19, `_ParamAndGradBuffer`). Checkpoints keep the
buckets without that end padding, and not the map: it is worked out here, and readers confirm it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from samerun.core.flat import Block, Part, row_major_strides, run_parts
from samerun.core.state import TensorKey, Tiling
from samerun.formats.mcore.held import Collector, Pieces, Source

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ALIGNMENT = 64
_LEAST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the model that a rank's parameter is part of. `blocks` lead from the rank's to the whole one."""

    fqn: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter as one rank holds it. `name` orders it, `shape` and `num_elements` are the rank's own.

    It is part of one tensor of the model, of two where the checkpoint files gate and projection apart. `copy` tells
    apart ranks that hold the same values. `own_bucket` is set for an embedding that pipeline stages share.
    """

    name: str
    shape: tuple[int, ...]
    targets: tuple[Target, ...]
    dtype: str
    copy: tuple[int, ...] = ()
    own_bucket: bool = False

    @property
    def num_elements(self) -> int:
        """Number of elements the rank holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place: the bucket, and the element of the bucket where it begins."""

    local: Local
    bucket: int
    start: int

    @property
    def stop(self) -> int:
        """The element after the parameter's last."""
        return self.start + self.local.num_elements


def align(position: int, multiple: int = ALIGNMENT) -> int:
    """Returns the next multiple at or after a position.

    >>> align(65), align(128)
    (128, 128)
    """
    return -(-position // multiple) * multiple


def plan_slots(params: Sequence[Local], bucket_elements: Sequence[int]) -> list[Slot] | None:
    """Places parameters, given in order of registration, in buckets of these lengths (without padding at the end).

    None if they do not fill the buckets exactly: another order, another model, or another division.
    """
    slots: list[Slot] = []
    bucket = position = 0
    for local in reversed(params):
        start, count = align(position), local.num_elements
        if bucket < len(bucket_elements) and max(start, position) >= bucket_elements[bucket]:
            if bucket_elements[bucket] not in (position, start):
                return None
            bucket, start = bucket + 1, 0
        if bucket == len(bucket_elements) or start + count > bucket_elements[bucket]:
            return None
        slots.append(Slot(local, bucket, start))
        position = start + count
    if not slots:
        return None if bucket_elements else []
    return slots if bucket == len(bucket_elements) - 1 and position == bucket_elements[bucket] else None


def plan_buckets(params: Sequence[Local], bucket_size: int | None) -> list[int]:
    """Returns the lengths of the buckets that DDP makes of parameters, given in order of registration.

    A bucket is closed once it holds `bucket_size` elements; never where that is None. An embedding that pipeline
    stages share has a bucket of its own.
    """
    lengths: list[int] = []
    position = 0
    is_open = False
    for local in reversed(params):
        position = align(position)
        if local.own_bucket and is_open:
            lengths.append(position)
            position = 0
        position += local.num_elements
        is_open = not (local.own_bucket or (bucket_size is not None and position >= bucket_size))
        if not is_open:
            lengths.append(position)
            position = 0
    return [*lengths, position] if is_open else lengths


def default_bucket_size(dp: int) -> int:
    """Returns the bucket size, in elements, that DDP uses where none is given and gradients are overlapped."""
    return max(_LEAST_BUCKET, _BUCKET_PER_RANK * dp)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a buffer: element `start` of the buffer is the first element of chunk `chunk` of a source."""

    start: int
    num_elements: int
    source: Source
    chunk: int = 0


class Buffer:
    """One slot of one bucket: runs of elements, each a chunk of its source, in order of place.

    `start`, `stop` and `chunk` are columns with a row per run.
    """

    def __init__(self, source: Source, start: Ints, num_elements: Ints, chunk: Ints) -> None:
        order = np.argsort(start, kind="stable")
        self.source = source
        self.start, self.chunk = start[order], chunk[order]
        self.stop = self.start + num_elements[order]

    @cached_property
    def _rows(self) -> tuple[list[int], list[int], list[int]]:
        return self.start.tolist(), self.stop.tolist(), self.chunk.tolist()

    def runs(self, start: int, stop: int) -> Iterator[tuple[Segment, int, int]]:
        """Yields the segments that hold elements `start` to `stop`, and which elements of the buffer they hold."""
        starts, stops, chunks = self._rows
        for row in range(max(0, bisect_right(starts, start) - 1), len(starts)):
            if starts[row] >= stop:
                return
            low, high = max(start, starts[row]), min(stop, stops[row])
            if low < high:
                yield Segment(starts[row], stops[row] - starts[row], self.source, chunks[row]), low, high

    def single(self, start: Ints, stop: Ints) -> tuple[Mask, Ints]:
        """Returns of elements `start` to `stop`, columns both, which lie in one segment alone, and its row."""
        row = np.searchsorted(self.start, start, side="right") - 1
        edges = np.append(self.start, np.iinfo(np.int64).max)
        inside = (row >= 0) & (stop > start) & (edges[row + 1] >= stop)
        inside[inside] = self.stop[row[inside]] >= stop[inside]
        return inside, row


class PartsOf:
    """The parts of one local parameter's runs. Slots of a parameter are cut alike, so each run is worked out once."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._known: dict[tuple[int, int, int], list[Part]] = {}

    def __call__(self, target: int, first: int, count: int) -> list[Part]:
        """Returns where elements `first` to `first + count` of the local parameter lie in one of its targets."""
        known = self._known.get((target, first, count))
        if known is None:
            shape, blocks = self._local.shape, self._local.targets[target].blocks
            whole = first == 0 and count == self._local.num_elements
            known = _every_part(shape, blocks) if whole else run_parts(shape, blocks, first, count)
            self._known[target, first, count] = known
        return known


def _every_part(shape: tuple[int, ...], blocks: Sequence[Block]) -> list[Part]:
    """Returns what `run_parts` does for all elements, the usual case, without cutting them into boxes."""
    strides = row_major_strides(shape)
    return [
        Part(block.target, block.sizes, sum(map(int.__mul__, block.source, strides)), number)
        for number, block in enumerate(blocks)
    ]


def add_slots(
    collector: Collector, slots: Sequence[Slot], buffer: Buffer, key_of: Callable[[str], TensorKey], original: str
) -> list[Slot]:
    """Files the parameters that are part of one tensor and lie in one segment, as nearly all do, all at once.

    Returns the other slots.
    """
    start = np.array([slot.start for slot in slots], np.int64)
    inside, row = buffer.single(start, np.array([slot.stop for slot in slots], np.int64))
    chunk, first = buffer.chunk[row], start - buffer.start[row]
    left: list[Slot] = []
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for number, (slot, alone) in enumerate(zip(slots, inside.tolist(), strict=True)):
        local = slot.local
        if alone and len(local.targets) == 1:
            alike.setdefault((local.targets[0].fqn, local.shape, local.copy), []).append(number)
        else:
            left.append(slot)
    for (fqn, shape, copy), numbers in alike.items():
        targets = [slots[number].local.targets[0] for number in numbers]
        blocks = [block for target in targets for block in target.blocks]
        times = np.repeat(numbers, [len(target.blocks) for target in targets])
        strides, ndim = np.array(row_major_strides(shape), np.int64), len(shape)
        source, offsets, sizes = (
            np.array(boxes, np.int64).reshape(-1, ndim)
            for boxes in (
                [block.source for block in blocks],
                [block.target for block in blocks],
                [block.sizes for block in blocks],
            )
        )
        pieces = Pieces(
            Tiling(offsets, sizes), chunk[times], first[times] + source @ strides, np.tile(strides, (len(blocks), 1))
        )
        dtype = buffer.source.dtype
        collector.add_pieces(key_of(fqn), original, targets[0].shape, dtype, copy, buffer.source, pieces)
    return left


def add_slot(
    collector: Collector,
    slot: Slot,
    buffer: Buffer,
    key_of: Callable[[str], TensorKey],
    original: str,
    parts: PartsOf,
) -> None:
    """Files the values of one parameter in one buffer under the tensors that they are part of."""
    strides = row_major_strides(slot.local.shape)
    keys = [key_of(target.fqn) for target in slot.local.targets]
    for segment, low, high in buffer.runs(slot.start, slot.stop):
        for number, target in enumerate(slot.local.targets):
            collector.add_parts(
                keys[number],
                original,
                target.shape,
                segment.source.dtype,
                slot.local.copy,
                segment.source,
                segment.chunk,
                low - segment.start,
                strides,
                parts(number, low - slot.start, high - low),
            )

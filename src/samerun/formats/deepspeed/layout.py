"""Which elements of which parameter lie where in a flat shard. Pure: shapes and counts in, segments out.

Stages 1 and 2 concatenate a group's parameters, pad the end, and cut the whole into equal parts. Stage 3 cuts every
parameter by itself, into parts of `ceil(elements / ranks)`, and a rank concatenates its parts, their padding kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samerun.formats.deepspeed.model import Shapes

# What the length of a flattened group is a multiple of, per rank, in elements (DeepSpeed's NCCL start alignment).
ALIGNMENT_ELEMENTS = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` elements of a parameter: from element `first` of it, at element `start` of the shard."""

    name: str
    shape: tuple[int, ...]
    start: int
    first: int
    count: int


def concatenated_segments(
    shapes: Shapes, alignment: Sequence[int], partition_elements: int, partition: int
) -> Iterator[Segment]:
    """Yields what part `partition` of a concatenated group holds. `alignment` is the padding after each parameter.

    >>> list(concatenated_segments((("a", (3,)), ("b", (4,))), (0, 0), 4, 1))
    [Segment(name='b', shape=(4,), start=0, first=1, count=3)]
    """
    low, high = partition * partition_elements, (partition + 1) * partition_elements
    position = 0
    for number, (name, shape) in enumerate(shapes):
        count = math.prod(shape)
        first, stop = max(position, low), min(position + count, high)
        if first < stop:
            yield Segment(name, shape, first - low, first - position, stop - first)
        position += count + (alignment[number] if number < len(alignment) else 0)


def concatenated_elements(shapes: Shapes, alignment: Sequence[int]) -> int:
    """Returns the length of a concatenated group without the padding at its end."""
    return sum(math.prod(shape) for _, shape in shapes) + sum(alignment[: len(shapes)])


def partitioned_segments(shapes: Shapes, partitions: int, partition: int) -> Iterator[Segment]:
    """Yields what rank number `partition` holds of a group whose parameters are cut one by one.

    >>> list(partitioned_segments((("a", (3,)), ("b", (4,))), 2, 1))
    [Segment(name='a', shape=(3,), start=0, first=2, count=1), Segment(name='b', shape=(4,), start=2, first=2, count=2)]
    """
    start = 0
    for name, shape in shapes:
        total = math.prod(shape)
        part = -(-total // partitions)
        first = min(partition * part, total)
        count = min(part, total - first)
        if count:
            yield Segment(name, shape, start, first, count)
        start += part


def partitioned_elements(shapes: Shapes, partitions: int) -> int:
    """Returns the length of a rank's shard of a group whose parameters are cut one by one."""
    return sum(-(-math.prod(shape) // partitions) for _, shape in shapes)


def partitioned_padding(shapes: Shapes, partitions: int, partition: int) -> Iterator[tuple[str, int, int]]:
    """Yields the padding in a rank's shard: after which parameter, where in the shard, how many elements."""
    start = 0
    for name, shape in shapes:
        total = math.prod(shape)
        part = -(-total // partitions)
        held = min(part, max(0, total - partition * part))
        if held < part:
            yield name, start + held, part - held
        start += part

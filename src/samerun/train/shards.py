"""Which elements of a global tensor this rank holds, for plain tensors and for any DTensor on any mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from samerun.errors import Problem, UsageError
from samerun.train.boxpart import Part
from samerun.train.flatpart import is_partitioned, partitioned_part

if TYPE_CHECKING:
    import torch

# Half-open ranges of global indices along one dimension, in local order.
Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One cut of a dimension: into `parts`, of which this rank has number `index`.

    `strided` is the split factor of a strided shard: the dimension is first cut into that many stretches, each
    stretch is cut into `parts`, and the rank has its part of every stretch. 1 is an ordinary shard. `axis` names the
    axis of the mesh that the parts lie along; None for a mesh without names.
    """

    parts: int
    index: int
    strided: int = 1
    axis: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """The part of a tensor that lies on this rank.

    `shape` is global. `intervals` has one entry per dimension, which together with their order say where each row of
    `local` belongs. `lead` is the lowest rank among those that together hold this replica of the tensor (this rank,
    for a tensor that it holds whole), which is what tells replicas apart. `cuts` lists the cuts of each dimension in
    the order in which they are made.
    """

    shape: tuple[int, ...]
    local: torch.Tensor
    intervals: tuple[Intervals, ...]
    lead: int
    cuts: tuple[tuple[Split, ...], ...] = ()

    @classmethod
    def whole(cls, tensor: torch.Tensor, *, rank: int = 0) -> Self:
        """Returns the shard of a tensor that lies on this rank whole."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.detach(), tuple(((0, size),) for size in shape), rank)

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.local.dtype

    @property
    def num_elements(self) -> int:
        """Elements that this rank holds."""
        return self.local.numel()

    def describe_cuts(self) -> list[list[Any]] | None:
        """Returns [mesh axis, dimension, strided] of every cut, the same on every rank; None if an axis has no name.

        A tensor that every rank holds whole has none. Axes along which there is one part only are left out.
        """
        cuts = [(dim, cut) for dim, made in enumerate(self.cuts) for cut in made if cut.parts > 1]
        return None if any(cut.axis is None for _, cut in cuts) else [[cut.axis, dim, cut.strided] for dim, cut in cuts]

    def boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yields (global offsets, values) for each box that the shard consists of; one unless it is strided."""
        per_dim = [_with_local_start(intervals) for intervals in self.intervals]
        for choice in itertools.product(*per_dim):
            part = self.local
            for dim, (start, stop, local_start) in enumerate(choice):
                part = part.narrow(dim, local_start, stop - start)
            if part.numel():
                yield tuple(start for start, _, _ in choice), part


Shard = LocalShard | Part


def _with_local_start(intervals: Intervals) -> list[tuple[int, int, int]]:
    rows: list[tuple[int, int, int]] = []
    local_start = 0
    for start, stop in intervals:
        rows.append((start, stop, local_start))
        local_start += stop - start
    return rows


def whole_shape(tensor: torch.Tensor | Part) -> tuple[int, ...]:
    """Returns a tensor's global shape, also of a parameter that ZeRO 3 has partitioned."""
    held: Any = tensor
    return tuple(held.ds_shape if is_partitioned(tensor) else held.shape)


def local_shard(tensor: torch.Tensor | Part, *, rank: int = 0) -> Shard | None:
    """Returns the part of `tensor` on this rank; None for a DTensor whose mesh this rank is not part of.

    Local: no communication. `rank` is this process's global rank.

    Raises:
        UsageError: for a DTensor whose placement is pending reduction or unknown, or whose local shape is not what
            its placements imply.
    """
    if isinstance(tensor, Part):
        return tensor
    if is_partitioned(tensor):
        return partitioned_part(tensor, rank)
    if not hasattr(tensor, "device_mesh") or not hasattr(tensor, "placements"):
        return LocalShard.whole(tensor, rank=rank)
    sharded: Any = tensor
    coordinate = sharded.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    shape = tuple(sharded.shape)
    local = sharded.to_local().detach()
    splits = _splits_per_dim(sharded, coordinate)
    for order in (_as_cut, list[Split]):
        cuts = tuple(tuple(order(made)) for made in splits)
        intervals = tuple(held_intervals(size, made) for size, made in zip(shape, cuts, strict=True))
        if all(_count(held) == size for held, size in zip(intervals, local.shape, strict=True)):
            return LocalShard(shape, local, intervals, _lead_rank(sharded, coordinate), cuts)
    raise UsageError(
        Problem(
            "SR-DIGEST-PLACEMENT",
            f"a local shard has shape {tuple(local.shape)}, which is not what {sharded.placements} give",
            where={"rank": rank},
            expected=[_count(held) for held in intervals],
            found=list(local.shape),
        )
    )


def _splits_per_dim(sharded: Any, coordinate: Sequence[int]) -> list[list[Split]]:
    splits: list[list[Split]] = [[] for _ in sharded.shape]
    names = sharded.device_mesh.mesh_dim_names
    for mesh_dim, placement in enumerate(sharded.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise UsageError(
                Problem(
                    "SR-DIGEST-PLACEMENT",
                    f"a tensor with placement {placement} has no values of its own to digest",
                    hint="reduce it first, or give it a sharded or replicated placement",
                )
            )
        splits[placement.dim].append(
            Split(
                parts=sharded.device_mesh.size(mesh_dim),
                index=coordinate[mesh_dim],
                strided=int(getattr(placement, "split_factor", 1)),
                axis=names[mesh_dim] if names else None,
            )
        )
    return splits


def _as_cut(splits: list[Split]) -> list[Split]:
    """Returns the cuts of one dimension in the order in which they were made.

    FSDP2 over tensor parallelism cuts for TP first and then shards each TP part, but lists FSDP's mesh axis first and
    marks it as strided by the number of TP parts. Undoing that gives the rows that the rank really has, also where
    the dimension does not divide evenly and the strided reading, left to right, would name other rows.
    """
    if not splits:
        return []
    first, rest = splits[0], splits[1:]
    if first.strided > 1 and first.strided == math.prod(split.parts for split in rest):
        return [*_as_cut(rest), replace(first, strided=1)]
    return [first, *_as_cut(rest)]


def held_intervals(size: int, splits: Sequence[Split]) -> Intervals:
    """Returns the global indices that remain of a dimension of `size` after each of `splits` in turn.

    Parts are torch's chunks: all of ceil(n / parts) but the last ones, which may be shorter or empty.

    >>> held_intervals(10, [Split(parts=4, index=3)])
    ((9, 10),)
    >>> held_intervals(8, [Split(parts=2, index=1, strided=2)])
    ((2, 4), (6, 8))
    """
    held: Intervals = ((0, size),)
    for split in splits:
        stretches = [_chunk(held, split.strided, number) for number in range(split.strided)]
        held = tuple(piece for stretch in stretches for piece in _chunk(stretch, split.parts, split.index))
    return _join(held)


def _count(intervals: Intervals) -> int:
    return sum(stop - start for start, stop in intervals)


def _chunk(intervals: Intervals, parts: int, index: int) -> Intervals:
    length = -(-_count(intervals) // parts)
    first, last = index * length, (index + 1) * length
    kept: list[tuple[int, int]] = []
    passed = 0
    for start, stop in intervals:
        low, high = max(first - passed, 0), min(last - passed, stop - start)
        if low < high:
            kept.append((start + low, start + high))
        passed += stop - start
    return tuple(kept)


def _join(intervals: Intervals) -> Intervals:
    joined: list[tuple[int, int]] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _lead_rank(sharded: Any, coordinate: Sequence[int]) -> int:
    """Returns the lowest global rank that holds a part of this rank's replica."""
    index = tuple(
        coordinate[mesh_dim] if placement.is_replicate() else slice(None)
        for mesh_dim, placement in enumerate(sharded.placements)
    )
    return int(sharded.device_mesh.mesh[index].min())

"""Pickled distributed tensors: which boxes of the global tensor a rank's part is.

DTensor (torch 2.0 to 2.13) carries its mesh and placements, ShardedTensor the boxes of all ranks. Both come out of the
restricted reader as records; what they mean is put together here, following `torch.distributed.tensor._utils` for
uneven shards (`torch.chunk`: equal chunks of the ceiling, a shorter one, then empty ones).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from samerun.core.dtype import DType, parse_dtype
from samerun.errors import FormatError
from samerun.formats.base import Extent
from samerun.formats.statedict.stored import Stored, read_stored
from samerun.formats.torchfile.values import Inert
from samerun.stores.local import MappedFiles

Run = tuple[int, int]  # start and stop along one dimension
Box = tuple[tuple[int, ...], tuple[int, ...], Extent]

_DTENSOR = frozenset({"torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor"})
_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


class GeometryError(ValueError):
    """A distributed tensor's record does not say where its values belong; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One rank's part of a distributed tensor.

    `rank` is the rank as recorded, None where it is not; `num_ranks` how many ranks there were; `placements` its mesh
    and placements in words; `mesh` the mesh's dimensions by name.
    """

    shape: tuple[int, ...]
    dtype: DType
    boxes: tuple[Box, ...]
    rank: int | None
    num_ranks: int
    placements: str
    mesh: tuple[tuple[str, int], ...] = ()


def is_distributed(value: Any) -> bool:
    """Whether a value is the record of a DTensor or ShardedTensor."""
    return isinstance(value, Inert) and (value.name in _DTENSOR or value.name == _SHARDED)


def find_distributed(tree: Any) -> Inert | None:
    """Returns the first record of a distributed tensor in nested mappings, None if there is none."""
    if is_distributed(tree):
        return tree
    if isinstance(tree, dict):
        return next((found for item in tree.values() if (found := find_distributed(item)) is not None), None)
    return None


Meshes = dict[int, "_Mesh"]


def read_part(value: Inert, rank: int, files: MappedFiles, meshes: Meshes) -> Part:
    """Returns the part that a record describes. `rank` is the file's, used where the record has none.

    `meshes` keeps what was understood of the meshes of one file, which its tensors share.

    Raises:
        GeometryError: if the record lacks or contradicts itself about where the part belongs.
    """
    try:
        return _dtensor_part(value, rank, files, meshes) if value.name in _DTENSOR else _sharded_part(value)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, FormatError) as error:
        if isinstance(error, GeometryError):
            raise
        raise GeometryError(f"its record is not one that is known ({type(error).__name__}: {error})") from None


def _fields(record: Any) -> dict[str, Any]:
    """Returns the attributes of a record, whichever way its class was pickled."""
    state = record.state
    if isinstance(state, dict):
        return state
    if isinstance(state, list):
        return {key: item for part in state if isinstance(part, dict) for key, item in part.items()}
    return {}


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise GeometryError("a shape or offset in it is no list of sizes")
    return tuple(value)


def _sharded_part(value: Inert) -> Part:
    shards, metadata, group, *_ = value.state
    described = _fields(metadata)
    shape = _sizes(described["size"])
    dtype = parse_dtype(described["tensor_properties"].state[0])
    boxes: list[Box] = []
    rank: int | None = None
    for shard in shards:
        fields = _fields(shard)
        place = _fields(fields["metadata"])
        offsets, sizes = _sizes(place["shard_offsets"]), _sizes(place["shard_sizes"])
        tensor = fields["tensor"]
        rank = _fields(place["placement"]).get("_rank", rank)
        if len(offsets) != len(shape) or not isinstance(tensor, Stored) or tensor.shape != sizes:
            raise GeometryError(f"a shard of {list(sizes)} at {list(offsets)} does not hold what it says")
        boxes += [(offsets, sizes, tensor.extents[0])] if tensor.extents else []
    world = _fields(group).get("global_world_size", len(described["shards_metadata"]))
    own = _fields(group).get("global_rank", rank)
    return Part(shape, dtype, tuple(boxes), own, int(world), "shards listed in the file")


def _dtensor_part(value: Inert, rank: int, files: MappedFiles, meshes: Meshes) -> Part:
    fields = _fields(value)
    local, spec = fields["_local_tensor"], _fields(fields["_spec"])
    mesh = meshes.get(id(spec["mesh"]))
    if mesh is None:
        mesh = meshes[id(spec["mesh"])] = _read_mesh(_fields(spec["mesh"]), rank, files)
    meta = spec.get("tensor_meta")
    shape = _sizes(meta.args[0] if isinstance(meta, Inert) and meta.args else value.args[2])
    if not isinstance(local, Stored):
        raise GeometryError("its local tensor is not in the file")
    placements = [_placement(item) for item in spec["placements"]]
    if len(placements) != len(mesh.shape):
        raise GeometryError(f"{len(placements)} placements on a mesh of {len(mesh.shape)} dimensions")
    order = _shard_order(spec, placements)
    runs = _local_runs(shape, mesh, placements, order)
    if tuple(map(_length, runs)) != local.shape:
        runs = _local_runs(shape, mesh, [replace(p, split_factor=0) for p in placements], _right_to_left(placements))
    if tuple(map(_length, runs)) != local.shape:
        raise GeometryError(
            f"its local shape {list(local.shape)} is not that of coordinate {list(mesh.coordinate)} of "
            f"{_in_words(mesh, placements)} of a tensor of {list(shape)}"
        )
    boxes = _cut(runs, local.extents[0]) if local.extents else ()
    return Part(
        shape,
        local.dtype,
        boxes,
        mesh.rank,
        mesh.num_ranks,
        _in_words(mesh, placements),
        tuple(zip(mesh.names, mesh.shape, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _Mesh:
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    names: tuple[str, ...]
    rank: int | None
    num_ranks: int


def _read_mesh(fields: Mapping[str, Any], rank: int, files: MappedFiles) -> _Mesh:
    own = fields.get("_rank")
    own = own if type(own) is int else None
    coordinate: Any = fields.get("_coordinate_on_dim")
    ranks = _mesh_ranks(fields, own if own is not None else rank, files)
    here = np.argwhere(ranks == (own if own is not None else rank))
    if isinstance(coordinate, list) and len(coordinate) == ranks.ndim:
        found = tuple(int(c) for c in coordinate)
        own = int(ranks[found]) if own is None else own
    elif len(here) == 1:
        found = tuple(int(c) for c in here[0])
    else:
        raise GeometryError(f"rank {own if own is not None else rank} is not in its mesh")
    names: Any = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
    named = tuple(map(str, names)) if isinstance(names, list) and len(names) == ranks.ndim else ("",) * ranks.ndim
    whole = fields.get("_flatten_rank_map", fields.get("_flatten_mesh_list"))
    return _Mesh(ranks.shape, found, named, own, len(whole) if isinstance(whole, list) else ranks.size)


def _mesh_ranks(fields: Mapping[str, Any], rank: int, files: MappedFiles) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns the ranks of the mesh as an array of its shape.

    Since 2.9 a mesh is a layout (sizes and strides per dimension) over a map of ranks, and may be one of several slices
    of a larger mesh: the one that has `rank`.
    """
    held = fields.get("mesh", fields.get("_mesh"))
    if isinstance(held, Stored):
        return read_stored(held, files)
    ranks: Any = fields.get("_flatten_rank_map")
    if not isinstance(ranks, list):
        ranks = read_stored(fields["_rank_map"], files).reshape(-1).tolist()
    axes = [_fields(axis) for axis in _fields(fields["_layout"])["axes"]]
    sizes = [size for axis in axes for size in _as_list(axis["shape"])]
    strides = [stride for axis in axes for stride in _as_list(axis["stride"])]
    index = np.zeros((1,) * len(sizes) if sizes else (), np.int64)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        index = index + (np.arange(size) * stride).reshape([-1 if i == dim else 1 for i in range(len(sizes))])
    at = ranks.index(rank) if rank in ranks else -1
    origin = at - sum((at // stride % size) * stride for size, stride in zip(sizes, strides, strict=True))
    if at < 0 or int(index.max(initial=0)) + origin >= len(ranks):
        raise GeometryError(f"rank {rank} is not in its mesh")
    shape = [int(np.prod(_as_list(axis["shape"]), dtype=np.int64)) for axis in axes]
    return np.array(ranks, np.int64)[index + origin].reshape(shape)


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list) else [value]


@dataclass(frozen=True, slots=True)
class _Placement:
    """`dim` is None for a replicated mesh dimension; `split_factor` is 0 for an ordinary shard."""

    dim: int | None
    split_factor: int = 0


def _placement(item: Any) -> _Placement:
    kind = item.name.rpartition(".")[2] if isinstance(item, Inert) else ""
    fields = {**_fields(item), **dict(zip(("dim", "split_factor"), item.args, strict=False))} if kind else {}
    if kind == "Replicate":
        return _Placement(None)
    if kind == "Shard" and type(fields.get("dim")) is int:
        return _Placement(fields["dim"])
    if kind == "_StridedShard" and type(fields.get("dim")) is int:
        factor = fields.get("split_factor", fields.get("sf"))
        if type(factor) is int and factor > 0:
            return _Placement(fields["dim"], factor)
    if kind in ("Partial", "_Partial"):
        raise GeometryError("it is a partial sum: its values are pending a reduction over ranks")
    raise GeometryError(f"its placement {kind or item!r} is unknown")


def _shard_order(spec: Mapping[str, Any], placements: Sequence[_Placement]) -> list[int]:
    """Returns the mesh dimensions in the order in which they cut: as recorded, from left to right otherwise."""
    recorded = spec.get("shard_order")
    if isinstance(recorded, list) and not any(placement.split_factor for placement in placements):
        order = [dim for entry in recorded if isinstance(entry, Inert) for dim in _as_list(entry.args[1])]
        if sorted(order) == [i for i, placement in enumerate(placements) if placement.dim is not None]:
            return order
    return list(range(len(placements)))


def _right_to_left(placements: Sequence[_Placement]) -> list[int]:
    return list(reversed(range(len(placements))))


def _local_runs(
    shape: tuple[int, ...], mesh: _Mesh, placements: Sequence[_Placement], order: Sequence[int]
) -> list[list[Run]]:
    """Returns, per dimension of the tensor, the ranges that this coordinate holds, in local order."""
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for mesh_dim in order:
        placement = placements[mesh_dim]
        if placement.dim is None:
            continue
        if not -len(shape) <= placement.dim < len(shape):
            raise GeometryError(f"it is sharded along dimension {placement.dim} of {len(shape)}")
        held = runs[placement.dim]
        pieces = _chunk(_length(held), mesh.shape[mesh_dim], mesh.coordinate[mesh_dim], placement.split_factor)
        runs[placement.dim] = [run for piece in pieces for run in _select(held, piece)]
    return runs


def _length(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _chunk(length: int, count: int, number: int, split_factor: int) -> list[Run]:
    """Returns which positions of `length` chunk `number` of `count` takes: of the whole, or of each of the blocks."""
    blocks = (
        [chunk_run(length, split_factor, block) for block in range(split_factor)] if split_factor else [(0, length)]
    )
    taken = [(start, chunk_run(stop - start, count, number)) for start, stop in blocks]
    return [(start + first, start + last) for start, (first, last) in taken if last > first]


def chunk_run(length: int, count: int, number: int) -> Run:
    """Returns the range of chunk `number` (from 0) when `torch.chunk` cuts `length` into `count`; it may be empty.

    >>> [chunk_run(5, 4, number) for number in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-length // count)
    return min(number * size, length), min((number + 1) * size, length)


def _select(runs: Sequence[Run], piece: Run) -> list[Run]:
    """Returns the ranges that positions `piece` of concatenated ranges are."""
    found: list[Run] = []
    before = 0
    for start, stop in runs:
        first, last = max(piece[0], before), min(piece[1], before + stop - start)
        if last > first:
            found.append((start + first - before, start + last - before))
        before += stop - start
    return found


def _cut(runs: Sequence[Sequence[Run]], local: Extent) -> tuple[Box, ...]:
    """Returns the boxes that a local tensor consists of, each with its part of the local extent."""
    axes: list[list[tuple[int, int, int]]] = []
    for held in runs:
        before = 0
        axis: list[tuple[int, int, int]] = []
        for start, stop in held or [(0, 0)]:
            axis.append((start, stop - start, before))
            before += stop - start
        axes.append(axis)
    boxes: list[Box] = []
    for corner in product(*axes):
        sizes = tuple(size for _, size, _ in corner)
        shift = sum(before * stride for (_, _, before), stride in zip(corner, local.strides, strict=True))
        extent = replace(local, offset_bytes=local.offset_bytes + shift * local.dtype.num_bytes, shape=sizes)
        boxes.append((tuple(start for start, _, _ in corner), sizes, extent))
    return tuple(boxes)


def _in_words(mesh: _Mesh, placements: Sequence[_Placement]) -> str:
    parts = [
        f"{name or f'dim {i}'}={size} "
        + (
            "replicated"
            if placement.dim is None
            else f"{'strided ' if placement.split_factor else ''}shard {placement.dim}"
        )
        for i, (name, size, placement) in enumerate(zip(mesh.names, mesh.shape, placements, strict=True))
    ]
    return ", ".join(parts)

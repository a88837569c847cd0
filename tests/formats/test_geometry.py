"""Where a rank's part of a distributed tensor belongs: against torch's own way of cutting tensors."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from samerun.core.dtype import DTYPES
from samerun.formats.base import Extent
from samerun.formats.statedict.geometry import GeometryError, chunk_run, read_part
from samerun.formats.statedict.stored import Stored, store_whole
from samerun.formats.torchfile.values import Inert
from samerun.stores.local import MappedFiles

PLACED = "torch.distributed.tensor.placement_types"


def record(kind: str, **fields: Any) -> Inert:
    return Inert(kind, (), fields)


def placement_record(placement: Any) -> Inert:
    if isinstance(placement, _StridedShard):
        return record(f"{PLACED}._StridedShard", dim=placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return record(f"{PLACED}.Shard", dim=placement.dim)
    return Inert(f"{PLACED}.Replicate")


def mesh_record(shape: tuple[int, ...], rank: int, names: list[str] | None = None) -> Inert:
    strides = [int(np.prod(shape[i + 1 :], dtype=int)) for i in range(len(shape))]
    axes = [
        record("torch.distributed._mesh_layout._FlatLayout", shape=[size], stride=[stride])
        for size, stride in zip(shape, strides, strict=True)
    ]
    return record(
        "torch.distributed.device_mesh.DeviceMesh",
        _layout=record("torch.distributed._mesh_layout._MeshLayout", axes=axes),
        _flatten_rank_map=list(range(int(np.prod(shape)))),
        _mesh_dim_names=names,
        _rank=rank,
    )


def dtensor_record(local: Stored, shape: tuple[int, ...], mesh: Inert, placements: list[Inert], **spec: Any) -> Inert:
    meta = Inert("torch.distributed.tensor._dtensor_spec.TensorMeta", (list(shape), [], "float32"))
    fields = {"mesh": mesh, "placements": placements, "tensor_meta": meta, **spec}
    state = [
        None,
        {"_local_tensor": local, "_spec": record("torch.distributed.tensor._dtensor_spec.DTensorSpec", **fields)},
    ]
    return Inert("torch.distributed.tensor.DTensor", (), state)


def stored(shape: tuple[int, ...]) -> Stored:
    strides = [int(np.prod(shape[i + 1 :], dtype=int)) for i in range(len(shape))]
    return store_whole(Extent(Path("f"), 0, DTYPES["int64"], shape, tuple(strides)))


def cut(whole: torch.Tensor, placements: list[Any], mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> torch.Tensor:
    """Cuts as DTensor does since 2.9: from the first mesh dimension to the last."""
    local = whole
    for placement, size, at in zip(placements, mesh, coordinate, strict=True):
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, size, with_padding=False)[0][at]
    return local.contiguous()


def put_together(part: Any, local: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Writes a part's boxes into a tensor of -1."""
    whole = np.full(shape, -1, np.int64)
    flat = local.reshape(-1)
    for offsets, sizes, extent in part.boxes:
        strides = tuple(stride * 8 for stride in extent.strides)
        values = np.ndarray(sizes, np.int64, flat.tobytes(), extent.offset_bytes, strides) if 0 not in sizes else None
        if values is not None:
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = values
    return whole


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Any] = []
    for _ in mesh:
        kind = draw(st.sampled_from(("replicate", "shard", "strided")))
        dim = draw(st.integers(0, len(shape) - 1))
        factor = draw(st.integers(2, 3))
        placements.append(
            Replicate()
            if kind == "replicate"
            else Shard(dim)
            if kind == "shard"
            else _StridedShard(dim, split_factor=factor)
        )
    return shape, mesh, placements


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_parts_are_placed_where_torch_cut_them(layout: tuple[tuple[int, ...], tuple[int, ...], list[Any]]):
    shape, mesh, placements = layout
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    seen = np.full(shape, -1, np.int64)
    for rank, coordinate in enumerate(product(*map(range, mesh))):
        local = cut(whole, placements, mesh, coordinate).numpy()
        item = dtensor_record(
            stored(local.shape), shape, mesh_record(mesh, rank), [placement_record(p) for p in placements]
        )
        part = read_part(item, rank, MappedFiles(), {})
        placed = put_together(part, local, shape)
        held = placed >= 0
        assert np.array_equal(placed[held], whole.numpy()[held])
        assert held.sum() == local.size
        assert (part.rank, part.num_ranks) == (rank, int(np.prod(mesh)))
        seen = np.maximum(seen, placed)
    assert np.array_equal(seen, whole.numpy())


def test_two_shards_of_one_dimension_cut_from_left_to_right_unless_an_order_is_recorded():
    placements = [placement_record(Shard(0)), placement_record(Shard(0))]
    entry = Inert("torch.distributed.tensor._dtensor_spec.ShardOrderEntry", (0, [1, 0]))
    starts: dict[str, list[int]] = {"left to right": [], "recorded": []}
    for rank in range(4):
        plain = dtensor_record(stored((2,)), (8,), mesh_record((2, 2), rank), placements)
        ordered = dtensor_record(stored((2,)), (8,), mesh_record((2, 2), rank), placements, shard_order=[entry])
        starts["left to right"].append(read_part(plain, rank, MappedFiles(), {}).boxes[0][0][0])
        starts["recorded"].append(read_part(ordered, rank, MappedFiles(), {}).boxes[0][0][0])
    assert starts == {"left to right": [0, 2, 4, 6], "recorded": [0, 4, 2, 6]}


def test_a_slice_of_a_larger_mesh_is_the_one_with_the_rank():
    """Under tensor parallelism alone, a DTensor lives on one row of the whole mesh."""
    layout = record(
        "torch.distributed._mesh_layout._MeshLayout",
        axes=[record("torch.distributed._mesh_layout._FlatLayout", shape=[2], stride=[1])],
    )
    for rank in range(6):
        mesh = record(
            "torch.distributed.device_mesh.DeviceMesh", _layout=layout, _flatten_rank_map=list(range(6)),
            _mesh_dim_names=["tp"], _rank=rank,
        )  # fmt: skip
        part = read_part(
            dtensor_record(stored((3, 2)), (3, 4), mesh, [placement_record(Shard(1))]), rank, MappedFiles(), {}
        )
        assert part.boxes[0][0] == (0, 2 * (rank % 2))
        assert part.mesh == (("tp", 2),)


def test_meshes_of_torch_before_2_9_hold_a_tensor(tmp_path: Path):
    file = tmp_path / "mesh"
    np.array([0, 1, 2, 3], np.int64).tofile(file)
    mesh = record(
        "torch.distributed.device_mesh.DeviceMesh",
        mesh=store_whole(Extent(file, 0, DTYPES["int64"], (2, 2), (2, 1))),
        mesh_dim_names=["dp", "tp"],
        _coordinate_on_dim=[1, 0],
    )
    placements = [placement_record(Shard(0)), placement_record(Shard(1))]
    part = read_part(dtensor_record(stored((2, 3)), (5, 6), mesh, placements), 9, MappedFiles(), {})
    assert part.rank == 2
    assert part.boxes[0][0] == (3, 0)


@pytest.mark.parametrize(
    ("placements", "local", "message"),
    [
        ([Inert(f"{PLACED}.Partial")], (8,), "partial sum"),
        ([Inert("somewhere.Interleaved")], (4,), "unknown"),
        ([placement_record(Shard(3))], (4,), "dimension 3"),
        ([placement_record(Shard(0))], (5,), "local shape"),
        ([placement_record(Shard(0)), placement_record(Shard(0))], (4,), "2 placements"),
    ],
)
def test_what_cannot_be_placed_says_why(placements: list[Inert], local: tuple[int, ...], message: str):
    with pytest.raises(GeometryError, match=message):
        read_part(dtensor_record(stored(local), (8,), mesh_record((2,), 0), placements), 0, MappedFiles(), {})


@pytest.mark.parametrize("state", [None, [], {"_local_tensor": 3}, [None, {"_spec": 1, "_local_tensor": 2}]])
def test_broken_records_are_refused(state: Any):
    with pytest.raises(GeometryError):
        read_part(Inert("torch.distributed.tensor.DTensor", (), state), 0, MappedFiles(), {})
    name = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
    with pytest.raises(GeometryError):
        read_part(Inert(name, (), state), 0, MappedFiles(), {})


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(length: int, count: int):
    ours = [stop - start for number in range(count) for start, stop in [chunk_run(length, count, number)]]
    theirs = [len(chunk) for chunk in torch.arange(length).chunk(count)] if length else []
    assert ours == theirs + [0] * (count - len(theirs))

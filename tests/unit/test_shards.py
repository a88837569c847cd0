"""Which global indices a shard holds: against torch's own chunks, and against what FSDP2 over TP really does."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from samerun.train.shards import LocalShard, Split, _as_cut, held_intervals


def rows(size: int, splits: list[Split]) -> list[int]:
    return [row for start, stop in held_intervals(size, splits) for row in range(start, stop)]


@given(st.integers(0, 40), st.integers(1, 9))
def test_an_ordinary_shard_is_a_torch_chunk(size: int, parts: int) -> None:
    chunks = torch.arange(size).chunk(parts) if size else ()
    for index in range(parts):
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert rows(size, [Split(parts=parts, index=index)]) == expected


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_a_strided_shard_is_torchs(size: int, parts: int, factor: int) -> None:
    shards, _ = _StridedShard(0, split_factor=factor)._split_tensor(torch.arange(size), parts, with_padding=False)
    for index in range(parts):
        assert rows(size, [Split(parts=parts, index=index, strided=factor)]) == shards[index].tolist()


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))
def test_fsdp_over_tp_holds_its_chunk_of_the_tp_chunk(size: int, fsdp: int, tp: int) -> None:
    """Also where nothing divides, and the strided placement that torch writes down names other rows."""
    seen: list[int] = []
    for i in range(fsdp):
        for j in range(tp):
            mine = torch.arange(size).chunk(tp) if size else ()
            part = mine[j] if j < len(mine) else torch.arange(0)
            inner = part.chunk(fsdp) if len(part) else ()
            expected = inner[i].tolist() if i < len(inner) else []
            placements = [Split(parts=fsdp, index=i, strided=tp), Split(parts=tp, index=j)]
            assert rows(size, _as_cut(placements)) == expected
            seen += expected
    assert sorted(seen) == list(range(size))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data()
)
def test_any_mesh_of_plain_placements_agrees_with_torch(shape: list[int], mesh: list[int], data: st.DataObject) -> None:
    axes = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    placements = [data.draw(axes) for _ in mesh]
    coordinate = [data.draw(st.integers(0, size - 1)) for size in mesh]
    local, offset = _compute_local_shape_and_global_offset(shape, mesh, coordinate, placements)
    for dim, size in enumerate(shape):
        splits = [
            Split(parts=mesh[axis], index=coordinate[axis])
            for axis, placement in enumerate(placements)
            if isinstance(placement, Shard) and placement.dim == dim
        ]
        held = rows(size, _as_cut(splits))
        assert len(held) == local[dim]
        if held:
            assert held == list(range(offset[dim], offset[dim] + local[dim]))


def test_boxes_take_a_strided_shard_apart() -> None:
    whole = torch.arange(80).reshape(8, 10)
    shard = LocalShard((8, 10), whole[[2, 3, 6, 7]], (((2, 4), (6, 8)), ((0, 10),)), 0)
    boxes = list(shard.boxes())
    assert [offsets for offsets, _ in boxes] == [(2, 0), (6, 0)]
    assert all(torch.equal(part, whole[at[0] : at[0] + 2]) for at, part in boxes)


def test_an_empty_shard_has_no_boxes_and_a_scalar_has_one() -> None:
    assert list(LocalShard((3, 4), torch.zeros(0, 4), ((), ((0, 4),)), 0).boxes()) == []
    assert len(list(LocalShard.whole(torch.tensor(1.0)).boxes())) == 1

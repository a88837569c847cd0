"""Plans against plain NumPy: any tiling to any other, stored in any way."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.dtype import parse_dtype
from samerun.core.state import LogicalState, TensorEntry, TensorKey, Tiling
from samerun.core.written import DestinationPlan, FilePlan, TensorSlots
from samerun.execute import work
from samerun.execute.check import check_plan
from samerun.execute.engine import Settings, execute_plan
from samerun.execute.intersect import Boxes, distinct_boxes, intersect_boxes
from samerun.execute.journal import Journal
from samerun.execute.planner import plan_conversion
from samerun.formats.base import Extent
from support.pieces import PieceCheckpoint, Tensor, expected_files, lay_out_boxes, tensor_lists, tilings


@settings(deadline=None, max_examples=40)
@given(
    tensors=tensor_lists(),
    num_files=st.integers(1, 3),
    tile=st.sampled_from([1, 24, 1 << 16]),
    smallest=st.sampled_from([1, 16, 1 << 17]),
    unit=st.sampled_from([8, 64, 1 << 20]),
    trust=st.booleans(),
)
def test_every_byte_is_where_numpy_says(
    tensors: list[Tensor], num_files: int, tile: int, smallest: int, unit: int, trust: bool
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "SMALLEST_RUN_BYTES", smallest)
        patch.setattr(work, "UNIT_BYTES", unit)
        patch.setattr(work, "LARGEST_KNOWN_BYTES", 4 * unit)
        patch.setattr(Settings, "tile_bytes", tile)
        root = Path(name)
        checkpoint = PieceCheckpoint(root / "source", tensors)
        destination = lay_out_boxes(tensors, num_files)
        plan = plan_conversion(destination, checkpoint, "sha256:0", trust_checksums=trust)
        assert check_plan(plan, checkpoint.state) == []
        journal = Journal(root / "journal")
        execute_plan(plan, checkpoint, root / "dest", journal, {}, Settings(threads=2))
        journal.close()
        checkpoint.close()
        for path, content in expected_files(tensors, destination).items():
            assert (root / "dest" / path).read_bytes() == content


@settings(deadline=None, max_examples=80)
@given(data=st.data(), shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
def test_boxes_meet_where_every_pair_says(data: st.DataObject, shape: tuple[int, ...]) -> None:
    left = data.draw(tilings(shape)) + data.draw(tilings(shape))
    right = data.draw(tilings(shape)) + data.draw(tilings(shape))

    def boxes(items: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Boxes:
        owner = np.array([i % 2 for i in range(len(items))], np.int64)
        return Boxes(owner, np.array([b[0] for b in items]), np.array([b[1] for b in items]))

    a, b = boxes(left), boxes(right)
    expected = {
        (i, j)
        for i in range(len(left))
        for j in range(len(right))
        if i % 2 == j % 2 and all(max(x, y) < min(x + m, y + n) for x, m, y, n in zip(*left[i], *right[j], strict=True))
    }
    found = intersect_boxes(a, b)
    assert set(zip(found[0].tolist(), found[1].tolist(), strict=True)) == expected
    assert len(found[0]) == len(expected)
    kept = distinct_boxes(a).tolist()
    assert len(kept) == len({(i % 2, left[i]) for i in range(len(left))})
    assert all(left.index(left[i]) == i or (left.index(left[i]) + i) % 2 for i in kept)


class _ManyPieces:
    """A tensor of very many pieces, of which only the structure is asked."""

    def __init__(self, path: Path, entry: TensorEntry, extents: list[Extent]) -> None:
        self.path, self._extents = path, extents
        self.state = LogicalState(format="pieces", tensors={str(entry.key): entry})

    def locate(self, key: str, piece: int) -> Extent:
        return self._extents[piece]


def test_fifty_thousand_pieces_take_seconds(tmp_path: Path) -> None:
    rows, cols = 50_000, 16
    offsets = np.stack([np.arange(rows), np.zeros(rows, np.int64)], axis=1)
    sizes = np.tile(np.array([1, cols]), (rows, 1))
    dtype = parse_dtype("float32")
    entry = TensorEntry(TensorKey.parse("param:w"), (rows, cols), dtype, Tiling(offsets, sizes), "w")
    extents = [Extent(tmp_path / "x", i * cols * 4, dtype, (1, cols), (cols, 1)) for i in range(rows)]
    starts = np.arange(0, rows, 3)
    slots = TensorSlots(
        "param:w",
        dtype,
        np.stack([starts, np.zeros_like(starts)], axis=1),
        np.stack([np.minimum(3, rows - starts), np.full_like(starts, cols)], axis=1),
        np.zeros_like(starts),
        starts * cols * 4,
    )
    destination = DestinationPlan(format="x", files=(FilePlan(path="f", size=rows * cols * 4),), tensors=(slots,))
    began = time.process_time()
    checkpoint = _ManyPieces(tmp_path, entry, extents)
    plan = plan_conversion(destination, checkpoint, "")  # type: ignore[arg-type]
    assert check_plan(plan, checkpoint.state) == []
    done = work.plan_work(plan, 1 << 20)
    assert len(done.runs) == 1  # all of it follows all of it: one run
    assert time.process_time() - began < 20

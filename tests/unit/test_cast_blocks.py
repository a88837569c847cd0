"""Values that a reader casts or rescales are read in blocks, and give what reading them whole gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from samerun.core.dtype import parse_dtype
from samerun.core.state import LogicalState, TensorEntry, TensorKey
from samerun.formats.base import Extent
from samerun.formats.placement import Piece, PlacedCheckpoint, place
from samerun.stores.local import MappedFiles
from samerun.verify.state import digest
from samerun.verify.state.digest import digest_tensor, read_piece_blocks
from samerun.verify.state.values import check_values

KEY = "param:w"


def opened(folder: Path, divisor: float = 4.0, replica: np.ndarray | None = None) -> PlacedCheckpoint:
    """A (12, 6) float32 tensor kept as float16, column by column, in two pieces (and perhaps a copy of the second)."""
    values = np.arange(72, dtype=np.float16).reshape(12, 6)
    pieces = []
    parts = [("a", 0, values[:5]), ("b", 5, values[5:])]
    parts += [("c", 5, replica)] if replica is not None else []
    for name, first, part in parts:
        (folder / name).write_bytes(np.ascontiguousarray(part.T).tobytes())
        buffer = Extent(folder / name, 0, parse_dtype("float16"), (part.size,), (1,))
        pieces.append(Piece(buffer, (first, 0), part.shape, 0, (1, part.shape[0]), divisor))
    placement = place(pieces, 2, parse_dtype("float32"))
    entry = TensorEntry(TensorKey.parse(KEY), (12, 6), parse_dtype("float32"), placement.tiling, "w")
    return PlacedCheckpoint(
        folder, LogicalState(format="test", tensors={KEY: entry}), {KEY: placement}, {}, MappedFiles()
    )


@pytest.mark.parametrize("divisor", [1.0, 4.0])
def test_every_box_is_that_of_the_whole(tmp_path: Path, divisor: float) -> None:
    checkpoint = opened(tmp_path, divisor)
    whole = (np.arange(72).reshape(12, 6) / divisor).astype(np.float32)
    assert np.array_equal(checkpoint.read(KEY), whole)
    for first, sizes in (((0, 0), (12, 6)), ((3, 1), (4, 3)), ((6, 2), (1, 4)), ((11, 5), (1, 1))):
        box = tuple(slice(a, a + n) for a, n in zip(first, sizes, strict=True))
        assert np.array_equal(checkpoint.read(KEY, first, sizes), whole[box])


def test_blocks_are_small_and_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = opened(tmp_path)
    before = digest_tensor(checkpoint, KEY)
    monkeypatch.setattr(digest, "_BLOCK_BYTES", 50)
    found = list(read_piece_blocks(checkpoint, KEY, 1))
    assert [offsets for offsets, _ in found] == [(first, 0) for first in range(5, 12, 2)]
    assert max(values.nbytes for _, values in found) == 48
    assert np.array_equal(np.concatenate([values for _, values in found]), checkpoint.read_piece(KEY, 1))
    assert digest_tensor(checkpoint, KEY) == before


@pytest.mark.parametrize("block", [50, 1 << 20])
def test_replicas_are_compared_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(digest, "_BLOCK_BYTES", block)
    values = np.arange(30, 72, dtype=np.float16).reshape(7, 6)
    assert check_values(opened(tmp_path, replica=values)) == []
    values[6, 5] += 1
    assert [problem.code for problem in check_values(opened(tmp_path, replica=values))] == ["SR-COV-REPLICA"]

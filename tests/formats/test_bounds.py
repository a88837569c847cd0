"""Boxes that no framework cuts, and boxes that are asked for outside a tensor: refused in bounded time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from samerun.errors import UsageError
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.dcp import edit_metadata, job_state, save

SIDE, COUNT = 10_000, 3_000


def codes(path: Path) -> set[str]:
    return {problem.code for problem in inspect_checkpoint(open_checkpoint(path)).problems}


def test_pieces_too_irregular_to_be_counted_are_no_whole_tensor(tmp_path: Path):
    state: dict[str, Any] = {"model": {"w": torch.zeros(4, 4, 4), "v": torch.zeros(3)}}
    folder = save(state, tmp_path / "ckpt")
    assert "SR-COV-IRREGULAR" not in codes(folder)
    random = np.random.default_rng(0)
    corners = random.integers(0, SIDE - 1, (COUNT, 3))
    sizes = random.integers(1, SIDE - corners)

    def scatter(found: Metadata) -> None:
        entry: Any = found.state_dict_metadata["model.w"]
        entry.size = torch.Size([SIDE] * 3)
        entry.chunks = [
            ChunkStorageMetadata(torch.Size(at.tolist()), torch.Size(size.tolist()))
            for at, size in zip(corners, sizes, strict=True)
        ]

    edit_metadata(folder, scatter)
    report = inspect_checkpoint(open_checkpoint(folder))
    assert "SR-COV-IRREGULAR" in {problem.code for problem in report.problems}
    assert not report.complete


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((8, 0), (2, 6)), ((-1, 0), (1, 1)), ((0,), (1,)), ((0, 0), (0, 7)), ((0, 0, 0), None)]
)
def test_a_box_outside_a_tensor_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...] | None, tmp_path: Path):
    checkpoint = open_checkpoint(save(job_state(), tmp_path / "ckpt"))
    assert checkpoint.read("param:0.weight", (7, 0), (2, 6)).shape == (2, 6)
    with pytest.raises(UsageError) as caught:
        checkpoint.read("param:0.weight", offsets, sizes)
    assert [problem.code for problem in caught.value.problems] == ["SR-USAGE-BOX"]

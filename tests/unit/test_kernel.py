"""The compiled kernel: its cache is a convenience, not a condition."""

from __future__ import annotations

import importlib

import numba
import numpy as np
import pytest

from samerun.core.digest import digest_box, digest_seed
from samerun.core.dtype import parse_dtype
from samerun.errors import CorruptCheckpoint
from samerun.verify import kernel
from samerun.verify.digest import digest_checkpoint
from support.memory import MemoryCheckpoint


def test_it_compiles_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def without_cache(*args: object, **options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(numba, "njit", without_cache)
        fresh = importlib.reload(kernel)
        array = np.arange(40, dtype=np.float32)
        seed = np.uint64(digest_seed("k", parse_dtype("float32"), (40,)))
        total = fresh.sum_terms(array.view(np.uint32), np.zeros(1, np.uint64), 40, seed)
        assert int(total) == digest_box("k", array)
    importlib.reload(kernel)


def test_an_overlap_as_large_as_a_gap_is_no_whole_tensor() -> None:
    checkpoint = MemoryCheckpoint({"param:w": np.arange(12.0)}, cuts={"param:w": [4, 8]})
    tiling = checkpoint.state.tensors["param:w"].tiling
    tiling.offsets[1, 0] = 1  # 1..3 are held twice and 5..7 by nobody: the number of elements is right
    with pytest.raises(CorruptCheckpoint) as caught:
        digest_checkpoint(checkpoint)
    codes = {problem.code for problem in caught.value.problems}
    assert codes == {"SR-COV-GAP", "SR-COV-OVERLAP"}

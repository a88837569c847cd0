"""The compiled kernel: its cache is a convenience, not a condition."""

from __future__ import annotations

import importlib

import numba
import numpy as np
import pytest

from samerun.core.digest import digest_box, digest_seed
from samerun.core.dtype import parse_dtype
from samerun.verify import kernel


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

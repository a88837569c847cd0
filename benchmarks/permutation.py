"""Ids per second and memory of the keyed permutation, against `torch.randperm`, in one process on one core.

    python benchmarks/permutation.py            # needs torch for the comparison

The keyed permutation is measured where it is used: a whole epoch, a slice from the middle, and random positions. To
get a slice, `torch.randperm` has to draw the epoch.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from samerun.core.permutation import Permutation


def seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """Returns the least CPU time of a few runs: waiting for other processes does not count."""
    found = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        found.append(time.process_time() - begin)
    return min(found)


def main() -> None:
    """Prints one row per measurement."""
    print(f"{'what':44} {'million ids/s':>14} {'ms':>9} {'MB held':>8}")

    def row(what: str, ids: int, took: float, held_bytes: int) -> None:
        print(f"{what:44} {ids / took / 1e6:14.1f} {took * 1e3:9.2f} {held_bytes / 1e6:8.1f}")

    for length in (10**6, 10**12):
        shuffle, count = Permutation.of(length, 1), min(length, 2_000_000)
        row(f"keyed, {count} of 10^{len(str(length)) - 1} in order", count, seconds(lambda: shuffle.span(0, count)), 0)  # noqa: B023
        spread = np.random.default_rng(0).integers(0, length, 200_000)
        row(f"keyed, 200000 of 10^{len(str(length)) - 1} at random", 200_000, seconds(lambda: shuffle.at(spread)), 0)  # noqa: B023
        row("keyed, inverse", 200_000, seconds(lambda: shuffle.inverse(spread)), 0)  # noqa: B023
        middle = length // 2
        row("keyed, an update of 1024 in the middle", 1024, seconds(lambda: shuffle.span(middle, middle + 1024)), 0)  # noqa: B023
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
    for length in (10**6, 10**7):
        took = seconds(lambda: torch.randperm(length, generator=torch.Generator().manual_seed(1)))  # noqa: B023
        row(f"torch.randperm, all of 10^{len(str(length)) - 1}", length, took, 8 * length)
        row("torch.randperm, an update of 1024 of it", 1024, took, 8 * length)


if __name__ == "__main__":
    main()

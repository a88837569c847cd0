"""Which of several processes this one is, and what each of them does: a plan divided by bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from samerun.errors import Problem, UsageError

# What torchrun and its like tell every process alike: processes that differ in it are not of one launch.
_SHARED = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True, slots=True)
class Launch:
    """Several processes started together. `key` is what they have in common and another launch has not."""

    rank: int
    world_size: int
    key: str = ""


def parse_launch(environ: Mapping[str, str]) -> Launch | None:
    """Returns the launch that an environment describes as torchrun does, None where this process is the only one.

    >>> parse_launch({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"})
    Launch(rank=1, world_size=4, key='MASTER_PORT=29500')
    >>> parse_launch({"RANK": "0", "WORLD_SIZE": "1"}), parse_launch({"WORLD_SIZE": "8"})
    (None, None)

    Raises:
        UsageError: if the numbers are none, or the rank is not one of so many.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank, world_size = environ["RANK"].strip(), environ["WORLD_SIZE"].strip()
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise UsageError(
            Problem(
                "SR-LAUNCH-ENV",
                f"RANK={rank!r} and WORLD_SIZE={world_size!r} describe no launch",
                hint="RANK counts from 0 to WORLD_SIZE - 1, as torchrun sets it; `env -u RANK -u WORLD_SIZE samerun "
                "convert ...` converts in one process",
            )
        )
    key = " ".join(f"{name}={environ[name]}" for name in _SHARED if name in environ)
    return Launch(int(rank), int(world_size), key) if int(world_size) > 1 else None


def divide(sizes: Sequence[int], parts: int) -> list[range]:
    """Divides a sequence into contiguous parts of about equal weight: none is more than one item above its share.

    >>> divide([4, 4, 4, 4, 8], 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    ends = np.cumsum(np.array([0, *sizes], np.float64))
    middles = (ends[1:] + ends[:-1]) / 2
    edges = np.searchsorted(middles, ends[-1] * np.arange(1, parts) / parts).tolist()
    return [range(first, last) for first, last in pairwise([0, *edges, len(sizes)])]

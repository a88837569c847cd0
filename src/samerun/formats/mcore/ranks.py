"""Where a global rank stands in a Megatron run, and which generators' state it loads.

Ranks are numbered tensor-parallel fastest, then context, data (within it, expert), and pipeline last
(`parallel_state.initialize_model_parallel`, order tp-cp-ep-dp-pp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samerun.formats.mcore.run import Run

_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place. `dp` counts data- and context-parallel ranks together; `ep` re-divides them."""

    pp: int
    tp: int
    dp: int
    ep: int


def coordinate(run: Run, rank: int) -> Coordinate:
    """Returns where a rank stands. The world size must be known.

    >>> coordinate(Run(world_size=8, tp=2, pp=2), 5)
    Coordinate(pp=1, tp=1, dp=0, ep=0)
    """
    stage = max(1, (run.world_size or 1) // run.pp)
    pp, inside = divmod(rank, stage)
    return Coordinate(pp, inside % run.tp, inside // run.tp, inside // run.etp % run.ep)


def spread_states(run: Run, state_at: Callable[[Coordinate], Any]) -> dict[str, Any]:
    """Returns every rank's state of random number generators, as `rank<N>`; ranks without one are left out.

    A saved list of several holds one per data-parallel rank (`--data-parallel-random-init`).
    """
    world_size = run.world_size or run.tp * run.pp
    found: dict[str, Any] = {}
    for rank in range(min(world_size, _MOST_RANKS)):
        place = coordinate(run, rank)
        value = state_at(place)
        if isinstance(value, list):
            value = value[place.dp if len(value) > 1 and place.dp < len(value) else 0] if value else None
        if value is not None:
            found[f"rank{rank}"] = value
    return found

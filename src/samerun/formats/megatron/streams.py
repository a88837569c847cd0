"""States of random number generators, dealt to the ranks of the destination.

Megatron keeps one per (pipeline, tensor) rank, with expert parallelism one per (pipeline, tensor, data) rank (0.16,
`get_rng_state`), and starts new ones where the checkpoint's TP or PP is not its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.plain import plain, same_plain
from samerun.core.state import LogicalState
from samerun.errors import Problem, Severity
from samerun.formats.mcore.ranks import Coordinate, coordinate
from samerun.formats.mcore.run import Run
from samerun.formats.megatron.revive import revive
from samerun.formats.statedict.carry import Unwritable


@dataclass(slots=True)
class Streams:
    """States by name of their shard; findings."""

    shards: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[Problem] = field(default_factory=list[Problem])


def deal_streams(state: LogicalState, run: Run, wanted: Layout) -> Streams:
    """Returns the state of each shard that a job of the wanted layout asks for; none if they cannot be dealt."""
    if not state.rng:
        return Streams()
    if (run.tp, run.pp) != (wanted.tp, wanted.pp):
        return Streams(problems=[_fresh(run, wanted)])
    held = {coordinate(run, int(name[4:])): value for name, value in state.rng.items() if name[4:].isdigit()}
    goal = Run(world_size=wanted.world_size, tp=wanted.tp, pp=wanted.pp, cp=wanted.cp, ep=wanted.ep, etp=run.etp)
    found: dict[tuple[int, ...], tuple[Any, bool]] = {}
    for rank in range(wanted.world_size):
        place = coordinate(goal, rank)
        at = (place.pp, place.tp, place.dp) if wanted.ep > 1 else (place.pp, place.tp)
        if at in found:
            continue
        chosen = _choose(held, place, same_ep=run.ep == wanted.ep, each=wanted.ep > 1)
        if chosen is None:
            return Streams(problems=[_absent(place)])
        found[at] = chosen
    grid = (wanted.pp, wanted.tp) + ((wanted.world_size // (wanted.pp * wanted.tp),) if wanted.ep > 1 else ())
    try:
        ready = {at: [revive(value)] for at, (value, _) in found.items()}
    except Unwritable as error:
        return Streams(problems=[_unwritable(str(error))])
    odd = [at for at, (_, exact) in found.items() if not exact]
    return Streams(
        {f"rng_state/shard_{_dots(at)}_{_dots(grid)}": value for at, value in ready.items()},
        [_dealt(odd[0], len(odd), len(found))] if odd else [],
    )


def _choose(held: Mapping[Coordinate, Any], place: Coordinate, *, same_ep: bool, each: bool) -> tuple[Any, bool] | None:
    """Returns a state and whether it is the one that the rank had: all ranks that it could be of agree."""
    exact = [held[place]] if each and same_ep and place in held else []
    mine = [value for at, value in held.items() if (at.pp, at.tp) == (place.pp, place.tp)]
    same = [
        v for at, v in held.items() if (at.pp, at.tp) == (place.pp, place.tp) and (at.ep == place.ep or not same_ep)
    ]
    candidates = exact or same or mine
    if not candidates:
        return None
    first, *others = (plain(value) for value in candidates)
    return candidates[0], all(same_plain(first, other) for other in others)


def _dots(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _fresh(run: Run, wanted: Layout) -> Problem:
    return Problem(
        "SR-MGW-STREAMS",
        "states of random number generators belong to tensor- and pipeline-parallel ranks and are not written",
        severity=Severity.WARNING,
        where={"key": "rng_state"},
        expected=f"tp={wanted.tp},pp={wanted.pp}",
        found=f"tp={run.tp},pp={run.pp}",
        hint="the saved args keep the source's TP and PP, so Megatron says so and seeds new streams; dropout goes on "
        "with other numbers",
    )


def _absent(place: Coordinate) -> Problem:
    return Problem(
        "SR-MGW-STREAMS",
        f"no state of random number generators is there for pp={place.pp}, tp={place.tp}: none are written",
        severity=Severity.WARNING,
        where={"key": "rng_state"},
        hint="load with --no-load-rng",
    )


def _unwritable(why: str) -> Problem:
    return Problem(
        "SR-MGW-STREAMS",
        f"states of random number generators are not written: {why}",
        severity=Severity.WARNING,
        where={"key": "rng_state"},
        hint="load with --no-load-rng",
    )


def _dealt(at: tuple[int, ...], count: int, total: int) -> Problem:
    return Problem(
        "SR-MGW-DEALT",
        f"{count} of {total} states of random number generators would be one of several that differ, the first is "
        f"that of rank {_dots(at)} (pp.tp[.dp])",
        where={"key": "rng_state"},
        hint="the first rank's would be given. Allow it (--allow SR-MGW-DEALT) if routing and dropout may go on with "
        "other numbers; --no-load-rng seeds new ones",
    )

"""Objects of a torch_dist directory: random states by rank, and whatever else ranks saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from samerun.errors import Problem, Severity
from samerun.formats.mcore.ranks import spread_states
from samerun.formats.megatron.source import Source

_RNG = "rng_state"
_TAKEN = ("rng_state", "common_state")
_OWN_SECTIONS = ("opt_param_scheduler", "iteration", "optimizer")
_MOST_SHARDS = 1 << 20


def random_states(source: Source) -> dict[str, Any]:
    """Returns the state of every rank's generators. Shards are `(pp, tp)`, on 0.16 with experts `(pp, tp, dp)`."""
    held = {shard.at: source.value(shard) for shard in source.find(_RNG)}
    if not held:
        return {}
    return spread_states(
        source.run, lambda place: held.get((place.pp, place.tp), held.get((place.pp, place.tp, place.dp)))
    )


def rest_of(source: Source) -> dict[str, Any]:
    """Returns every object that is nothing else: arguments, content metadata, states of modules that hold something."""
    kept: dict[str, Any] = {
        str(name): value for name, value in source.common.items() if name not in _OWN_SECTIONS and value is not None
    }
    optimizer = source.common.get("optimizer")
    if isinstance(optimizer, dict):
        kept |= {
            f"optimizer.{name}": value
            for name, value in optimizer.items()
            if name not in ("optimizer", "param_state_sharding_type", "param_groups", "state") and type(name) is str
        }
    for key, shards in source.shards.items():
        if key in _TAKEN or ".dp_group_idx_" in key:
            continue
        for shard in shards:
            value = source.value(shard)
            if value is not None:
                kept[shard.item.name] = value
    return kept


def check_objects(source: Source) -> list[Problem]:
    """Checks that every object has all of its shards, and each once."""
    problems: list[Problem] = []
    for key, shards in source.shards.items():
        grid = shards[0].grid
        total = math.prod(grid)
        held = {shard.at for shard in shards}
        if total > _MOST_SHARDS or any(shard.grid != grid for shard in shards):
            problems.append(_incomplete(key, "its shards do not agree about how many there are", grid, len(held)))
        elif len(held) < total:
            missing = next(at for at in _grid(grid) if at not in held)
            what = f"{total - len(held)} of its shards are missing, the first {'.'.join(map(str, missing))}"
            problems.append(_incomplete(key, what, total, len(held)))
    return problems


def _grid(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _grid(shape[1:]):
            yield (first, *rest)


def _incomplete(key: str, message: str, expected: Any, found: Any) -> Problem:
    rng = key == _RNG
    return Problem(
        "SR-MEG-OBJECT",
        f"a stored object is incomplete: {message}",
        severity=Severity.WARNING if rng else Severity.ERROR,
        where={"key": key},
        expected=expected,
        found=found,
        hint="some ranks' parts were not saved; Megatron stops on loading with a message about a missing shard",
    )

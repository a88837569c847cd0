"""Parallel layouts: how many ranks lie along each named axis, and which rank sits where.

Axis order is torchtitan's and Megatron's order with the fastest-changing axis last:
`pp` outermost, then `dp_replicate`, `dp_shard`, `cp`, and `tp` innermost. Expert parallelism (`ep`) re-divides the
ranks of `dp_shard x cp x tp` for expert weights and therefore does not multiply the world size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

MOST_RANKS = 1 << 20  # that a layout given as text may have: a slip of the key is refused, not worked off
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks along each axis. Axes left out are 1.

    >>> Layout.parse("tp=2,dp_shard=4").world_size
    8
    >>> Layout.parse("tp=2,dp_shard=4").batch_replicas
    4
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"layout axis {field.name} must be a whole number of at least 1, not {value!r}")
        if (self.dp_shard * self.cp * self.tp) % self.ep:
            raise ValueError(f"ep={self.ep} must divide dp_shard x cp x tp = {self.dp_shard * self.cp * self.tp}")

    @property
    def world_size(self) -> int:
        """Number of ranks (processes)."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def batch_replicas(self) -> int:
        """Number of ranks that see different samples; TP, CP and PP ranks of one replica share a batch."""
        return self.dp_replicate * self.dp_shard

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the position of `rank` (0-based) along every axis in `AXES`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Returns the rank at `coordinate`; axes left out are at 0. The inverse of `coordinate`."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + coordinate.get(axis, 0)
        return rank

    def batch_replica(self, rank: int) -> int:
        """Returns which batch replica `rank` belongs to, in 0..batch_replicas-1."""
        position = self.coordinate(rank)
        return position["dp_replicate"] * self.dp_shard + position["dp_shard"]

    def leads_replica(self, rank: int) -> bool:
        """Returns whether `rank` is the one whose sample ids count for its batch replica (pp, cp and tp all 0)."""
        position = self.coordinate(rank)
        return position["pp"] == position["cp"] == position["tp"] == 0

    def to_dict(self, *, short: bool = False) -> dict[str, int]:
        """Returns the axes as a plain mapping; `short` leaves out those that are 1 (but never all of them)."""
        full = {axis: getattr(self, axis) for axis in (*AXES, "ep")}
        return ({a: n for a, n in full.items() if n != 1} or {"dp_shard": 1}) if short else full

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.to_dict(short=True).items())

    @classmethod
    def from_dict(cls, axes: Mapping[str, int]) -> Self:
        """Returns the layout with these axis sizes.

        Raises:
            ValueError: for a name that is no axis or a size below 1.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(axes) - known):
            raise ValueError(f"unknown layout axis {', '.join(unknown)}; axes are {', '.join((*AXES, 'ep'))}")
        return cls(**axes)

    @classmethod
    def parse(cls, text: str, *, source: Layout | None = None) -> Self:
        """Reads `"tp=2,dp_shard=4"`. `dp=N` means N batch replicas, sharded as `source` was.

        With `dp=N` and a source that both replicates and shards, the source's `dp_shard` is kept when it divides N;
        a source that only replicates gives `dp_replicate=N`; otherwise, and without a source, `dp_shard=N`.

        Raises:
            ValueError: for anything that is not a layout; the message says what is accepted.
        """
        axes: dict[str, int] = {}
        for part in text.replace(" ", "").split(","):
            name, equals, size = part.partition("=")
            if not equals or not size.isascii() or not size.isdigit():
                raise ValueError(f"a layout looks like tp=2,dp_shard=4 (or dp=N); cannot read {part!r}")
            if name in axes:
                raise ValueError(f"layout axis {name} is given twice in {text!r}")
            axes[name] = int(size)
        if (replicas := axes.pop("dp", None)) is not None:
            if {"dp_shard", "dp_replicate"} & axes.keys():
                raise ValueError("give either dp=N or dp_shard/dp_replicate, not both")
            axes |= _split_replicas(replicas, source)
        layout = cls.from_dict(axes)
        if layout.world_size > MOST_RANKS:
            raise ValueError(f"{text!r} has {layout.world_size} ranks; a layout has at most {MOST_RANKS}")
        return layout


def _split_replicas(replicas: int, source: Layout | None) -> dict[str, int]:
    if source is not None and source.dp_replicate > 1:
        if source.dp_shard == 1:
            return {"dp_replicate": replicas}
        if replicas % source.dp_shard == 0:
            return {"dp_replicate": replicas // source.dp_shard, "dp_shard": source.dp_shard}
    return {"dp_shard": replicas}

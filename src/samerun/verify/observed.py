"""What a job recorded, gathered over its ranks into one account per update.

A trace has one file per rank. Losses, norms and learning rates are global and stand in every file; sample ids are each
rank's own, and the ranks of one batch replica (TP, CP, PP peers) hold the same ones, so one rank per replica counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samerun.core.mesh import Layout
from samerun.errors import Problem

Line = Mapping[str, Any]

GLOBAL_NUMBERS = ("loss", "grad_norm", "update_norm", "loss_scale")
"""Fields of an update line that every rank must report alike."""

RANK_AGREEMENT = 1e-5
"""How far two ranks' copies of one all-reduced number may differ (relative): a reduction may end in different orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedUpdate:
    """One completed update as the whole job saw it. `None` means that no rank recorded the number.

    `ids` maps each batch replica to the ids it consumed, in its own order; None when some replica recorded none.
    `finite` is false as soon as one rank saw a non-finite loss, gradient or parameter.
    """

    update: int
    loss: float | None
    grad_norm: float | None
    update_norm: float | None
    lr: tuple[float, ...]
    loss_scale: float | None
    skipped: bool
    finite: bool
    ids: Mapping[int, tuple[Any, ...]] | None
    tokens: int | None
    deltas: Mapping[str, float] = field(default_factory=dict[str, float])
    moved: Mapping[str, float] | None = None

    @property
    def num_samples(self) -> int | None:
        """Samples that all replicas together consumed in this update."""
        return None if self.ids is None else sum(len(ids) for ids in self.ids.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that the checks need from one job's trace.

    `updates` is in order of recording; `boundaries` are (what, update) pairs; `states` the state lines and `evals` the
    evaluation lines, in order; `header` is the lowest rank's; `folder` is where files named by lines lie.
    """

    headers: Mapping[int, Line]
    updates: tuple[ObservedUpdate, ...]
    evals: tuple[Line, ...] = ()
    states: tuple[Line, ...] = ()
    boundaries: frozenset[tuple[str, int]] = frozenset()
    ended: bool = False
    problems: tuple[Problem, ...] = ()

    def state(self, when: str) -> Line | None:
        """Returns the last state line taken at `when` (`loaded` or `end`), or None."""
        return next((line for line in reversed(self.states) if line.get("when") == when), None)

    def by_update(self) -> dict[int, ObservedUpdate]:
        """Returns the updates by index; an index recorded twice keeps the first."""
        found: dict[int, ObservedUpdate] = {}
        for item in self.updates:
            found.setdefault(item.update, item)
        return found


def number(value: Any) -> float | None:
    """Returns a recorded number as a float: JSON has no NaN, so non-finite ones may stand there as text."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def observe(lines_by_rank: Mapping[int, Sequence[Line]]) -> Observed:
    """Gathers a trace: `lines_by_rank` holds every rank's lines in the order they were written, header first.

    Ranks that contradict each other about a global number are a finding (`SR-UPD-RANKS`), as are peers of one batch
    replica that consumed different samples (`SR-SAMPLE-PEERS`).
    """
    headers = {rank: line for rank, lines in lines_by_rank.items() if (line := _first(lines, "header")) is not None}
    updates, problems = _gather_updates(lines_by_rank, headers)
    every = [line for rank in sorted(lines_by_rank) for line in lines_by_rank[rank]]
    return Observed(
        headers=dict(sorted(headers.items())),
        updates=tuple(updates),
        evals=tuple(line for line in every if line.get("kind") == "eval"),
        states=tuple(line for line in every if line.get("kind") == "state"),
        boundaries=frozenset(
            (str(line.get("what")), int(line["update"])) for line in every if line.get("kind") == "boundary"
        ),
        ended=all(_first(lines, "end") is not None for lines in lines_by_rank.values()) and bool(lines_by_rank),
        problems=tuple(problems),
    )


def _first(lines: Sequence[Line], kind: str) -> Line | None:
    return next((line for line in lines if line.get("kind") == kind), None)


def _gather_updates(
    lines_by_rank: Mapping[int, Sequence[Line]], headers: Mapping[int, Line]
) -> tuple[list[ObservedUpdate], list[Problem]]:
    order: list[int] = []
    by_update: dict[int, dict[int, Line]] = {}
    for rank in sorted(lines_by_rank):
        for line in lines_by_rank[rank]:
            if line.get("kind") == "update":
                update = int(line["update"])
                if update not in by_update:
                    order.append(update)
                by_update.setdefault(update, {}).setdefault(rank, line)
    replicas = {rank: replica_of(header) for rank, header in headers.items()}
    problems: list[Problem] = []
    for update in order:
        problems += _check_ranks_agree(update, by_update[update])
        problems += _check_peers(update, by_update[update], replicas)
    return [_merge(update, by_update[update], replicas) for update in order], problems


def replica_of(header: Line) -> tuple[int, bool]:
    """Returns (batch replica, whether this rank's ids count for it) from a header's mesh coordinate and layout.

    A header without a coordinate is taken as plain data parallelism: every rank its own replica.
    """
    coordinate = header.get("coordinate")
    if not coordinate:
        return int(header.get("rank", 0)), True
    shards = Layout.from_dict(header["layout"]).dp_shard if header.get("layout") else 1
    replica = int(coordinate.get("dp_replicate", 0)) * shards + int(coordinate.get("dp_shard", 0))
    return replica, not any(coordinate.get(axis, 0) for axis in ("pp", "cp", "tp"))


def _merge(update: int, lines: Mapping[int, Line], replicas: Mapping[int, tuple[int, bool]]) -> ObservedUpdate:
    ranks = sorted(lines)
    head = lines[ranks[0]]

    def pick(name: str) -> Any:  # the lowest rank that recorded it: pipeline stages may not all have a loss
        return next((lines[rank][name] for rank in ranks if lines[rank].get(name) is not None), None)

    leaders = [rank for rank in ranks if replicas.get(rank, (rank, True))[1]]
    recorded = all(lines[rank].get("sample_ids") is not None for rank in leaders)
    tokens = [lines[rank].get("tokens") for rank in leaders]
    deltas: dict[str, float] = {}
    moved: dict[str, float] | None = None
    for rank in ranks:
        deltas |= {name: _plain(value) for name, value in (lines[rank].get("deltas") or {}).items()}
        if lines[rank].get("moved") is not None:
            moved = (moved or {}) | {name: _plain(value) for name, value in lines[rank]["moved"].items()}
    return ObservedUpdate(
        update=update,
        loss=number(pick("loss")),
        grad_norm=number(pick("grad_norm")),
        update_norm=number(pick("update_norm")),
        lr=tuple(_plain(rate) for rate in head.get("lr") or ()),
        loss_scale=number(pick("loss_scale")),
        skipped=any(bool(line.get("skipped")) for line in lines.values()),
        finite=all(line.get("finite", True) is not False for line in lines.values()),
        ids={replicas.get(r, (r, True))[0]: tuple(lines[r]["sample_ids"]) for r in leaders} if recorded else None,
        tokens=sum(int(count) for count in tokens if count is not None) if any(t is not None for t in tokens) else None,
        deltas=deltas,
        moved=moved,
    )


def _plain(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found


def _check_ranks_agree(update: int, lines: Mapping[int, Line]) -> list[Problem]:
    problems: list[Problem] = []
    first = min(lines)
    for name in (*GLOBAL_NUMBERS, "lr"):
        values = {rank: line[name] for rank, line in lines.items() if line.get(name) is not None}
        odd = [rank for rank, value in values.items() if rank != first and not _alike(values.get(first), value)]
        if odd and first in values:
            problems.append(
                Problem(
                    "SR-UPD-RANKS",
                    f"ranks report different values of {name}, which is one number for the whole job",
                    where={"update": update, "rank": odd[0], "key": name},
                    expected=f"{values[first]} (rank {first})",
                    found=f"{values[odd[0]]} (rank {odd[0]})",
                    hint="the ranks no longer train one model, or the number is recorded before it is all-reduced",
                )
            )
    return problems


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) or isinstance(other, list | tuple):
        return list(one or ()) == list(other or ())
    a, b = number(one), number(other)
    if a is None or b is None:
        return True
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return math.isclose(a, b, rel_tol=RANK_AGREEMENT)


def _check_peers(update: int, lines: Mapping[int, Line], replicas: Mapping[int, tuple[int, bool]]) -> list[Problem]:
    seen: dict[int, tuple[int, list[Any]]] = {}
    problems: list[Problem] = []
    for rank in sorted(lines):
        ids = lines[rank].get("sample_ids")
        if ids is None or rank not in replicas:
            continue
        first, expected = seen.setdefault(replicas[rank][0], (rank, list(ids)))
        if list(ids) != expected:
            problems.append(
                Problem(
                    "SR-SAMPLE-PEERS",
                    f"ranks {first} and {rank} share one batch replica but consumed different samples",
                    where={"update": update, "rank": rank},
                    expected=short_ids(expected),
                    found=short_ids(ids),
                    hint="tensor, context and pipeline parallel ranks of one replica must read the same batch: derive "
                    "the sampler's replica from the mesh, not from the global rank",
                )
            )
    return problems


def short_ids(ids: Sequence[Any], limit: int = 8) -> str:
    """Returns the first few ids and how many there are: `3, 17, 5 ... (32 ids)`."""
    shown = ", ".join(str(item) for item in ids[:limit])
    return f"{shown} ... ({len(ids)} ids)" if len(ids) > limit else shown or "none"

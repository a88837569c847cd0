"""What a job recorded, gathered over its ranks into one account per update.

A trace has one file per rank. Losses, norms and learning rates are global and stand in every file; sample ids are each
rank's own, and the ranks of one batch replica (TP, CP, PP peers) hold the same ones, so one rank per replica counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.errors import Problem
from samerun.trace import EvalLine, Header, StateLine, Trace, UpdateLine, check_trace

SampleId = int | str

NAMED_ELSEWHERE = frozenset({"SR-TRACE-RANKS", "SR-TRACE-NONFINITE", "SR-TRACE-OVERLAP", "SR-TRACE-OPEN"})
"""Findings about a trace alone that a comparison with the plan and the control names more exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedUpdate:
    """One completed update as the whole job saw it. `None` means that no rank recorded the number.

    `ids` maps each batch replica to the ids it consumed, in its own order; None when some replica recorded none.
    `finite` is false as soon as one rank saw a loss, gradient or parameter that is not. `skipped` counts the attempts
    at this update that a loss scaler threw away. `moved` has every parameter's change in the first update of a job,
    `gradients` every gradient's norm there before clipping, `inputs` the rows that the model was given there and the
    sum of their digests, over all replicas. `step_norm` is the norm of the gradient that the step used, after clipping.
    `moved_direction` and `gradients_direction` say there which way each of them points (`samerun.core.sketch`).
    `autocast` is the type that the forward pass was cast to there. `seconds` is when it was recorded,
    counted from the job's header.
    """

    update: int
    loss: float | None
    grad_norm: float | None
    update_norm: float | None
    lr: tuple[float, ...]
    loss_scale: float | None
    skipped: int
    finite: bool
    ids: Mapping[int, tuple[SampleId, ...]] | None
    samples: int
    tokens: int | None
    deltas: Mapping[str, float]
    moved: Mapping[str, float] | None
    seconds: float | None = None
    gradients: Mapping[str, float] | None = None
    step_norm: float | None = None
    inputs: tuple[int, int] | None = None
    autocast: str | None = None
    moved_direction: Mapping[str, tuple[float, ...]] | None = None
    gradients_direction: Mapping[str, tuple[float, ...]] | None = None

    def where(self, **more: Any) -> dict[str, Any]:
        """Returns the place of a finding about this update."""
        return {"update": self.update, **more}

    def changes(self) -> dict[str, float]:
        """Returns the norm of every change that was measured, by tensor: all of them in the first update."""
        return {**(self.moved or {}), **self.deltas}

    def all_ids(self) -> tuple[SampleId, ...]:
        """Returns the ids of all replicas, replica by replica."""
        return tuple(item for _, ids in sorted((self.ids or {}).items()) for item in ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that the checks need from one job's trace.

    `updates` is in the order recorded by the lead rank. `boundaries` are (what, update) pairs. `problems` are findings
    about the trace alone, such as ranks that contradict each other. `ended`: every rank's file has its last line.
    `finished`: on every rank the script itself closed it, after all the updates that were asked for.
    """

    headers: Mapping[int, Header]
    updates: tuple[ObservedUpdate, ...]
    evals: tuple[EvalLine, ...]
    states: tuple[StateLine, ...]
    boundaries: frozenset[tuple[str, int]]
    ended: bool
    finished: bool
    problems: tuple[Problem, ...]

    def state(self, when: str) -> StateLine | None:
        """Returns the last state captured at `when` (`loaded` or `end`), or None."""
        return next((line for line in reversed(self.states) if line.when == when), None)

    def by_update(self) -> dict[int, ObservedUpdate]:
        """Returns the updates by index."""
        return {item.update: item for item in self.updates}


def observe(trace: Trace) -> Observed:
    """Gathers a trace over its ranks."""
    order = dict.fromkeys(trace.update_indices)
    skipped = Counter(line.update for line in trace.lead.updates if line.skipped)
    return Observed(
        headers={rank.header.rank: rank.header for rank in trace.ranks},
        updates=tuple(_gather(trace, index, skipped[index]) for index in order),
        evals=trace.lead.evals,
        states=trace.lead.states,
        boundaries=frozenset((line.what, line.update) for line in trace.lead.boundaries),
        ended=all(rank.end is not None for rank in trace.ranks),
        finished=all(rank.end is not None and rank.end.reason == "finished" for rank in trace.ranks)
        and len(trace.ranks) == trace.lead.header.world_size,
        problems=tuple(problem for problem in check_trace(trace) if problem.code not in NAMED_ELSEWHERE),
    )


def _gather(trace: Trace, index: int, skipped: int) -> ObservedUpdate:
    lines = [line for rank in trace.ranks if (line := rank.update(index)) is not None]
    samples, tokens = trace.global_totals(index)
    ids = trace.sample_ids(index)
    return ObservedUpdate(
        update=index,
        loss=_first(lines, "loss"),  # with pipeline stages not every rank has every number
        grad_norm=_first(lines, "grad_norm"),
        update_norm=_first(lines, "update_norm"),
        lr=lines[0].lr,
        loss_scale=_first(lines, "loss_scale"),
        skipped=skipped,
        finite=all(line.finite for line in lines),
        ids=ids if sum(map(len, ids.values())) == samples else None,
        samples=samples,
        tokens=tokens,
        deltas={name: value for line in lines for name, value in line.deltas.items()},
        moved=next((line.moved for line in lines if line.moved is not None), None),
        seconds=lines[0].seconds,
        gradients=next((line.gradients for line in lines if line.gradients is not None), None),
        step_norm=_first(lines, "step_norm"),
        inputs=_inputs(trace, index),
        autocast=_first(lines, "autocast"),
        moved_direction=_first(lines, "moved_direction"),
        gradients_direction=_first(lines, "gradients_direction"),
    )


def _inputs(trace: Trace, index: int) -> tuple[int, int] | None:
    """Returns (rows, sum of digests) over one rank per replica, or None where one of them recorded nothing."""
    found = [line.inputs for rank in trace.replicas().values() if (line := rank.update(index)) is not None]
    known = [item for item in found if item is not None]
    if not known:
        return None
    return sum(rows for rows, _ in known), sum(digest for _, digest in known) & (1 << 64) - 1


def _first(lines: Sequence[UpdateLine], name: str) -> Any:
    return next((value for line in lines if (value := getattr(line, name)) is not None), None)


def short_ids(ids: Sequence[Any], limit: int = 8) -> str:
    """Returns the first few ids and how many there are.

    >>> short_ids(range(20), limit=3)
    '0, 1, 2 ... (20 ids)'
    """
    shown = ", ".join(str(item) for item in ids[:limit])
    return f"{shown} ... ({len(ids)} ids)" if len(ids) > limit else shown or "none"

"""The sample audit: which samples the candidate consumed, against those that the control consumed.

A lost cursor looks like a better loss for thousands of updates; only identifiers show it. Updates are compared as
multisets, because how one update's samples are dealt to ranks and passes is exactly what a move changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.errors import Problem, Severity
from samerun.verify.evidence.observed import ObservedUpdate, short_ids

Ids = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The outcome. Each list holds (update, id) in order.

    `replayed`: consumed again although consumed before. `omitted`: passed over, the candidate having gone beyond them.
    `pending`: of the control's window, not yet reached when the candidate's window ended. `overlap`: given to two
    replicas, or twice to one, within one update. `other`: the control consumes them neither in its window nor, as far
    as is known, before.
    """

    replayed: tuple[tuple[int, Any], ...] = ()
    omitted: tuple[tuple[int, Any], ...] = ()
    pending: tuple[tuple[int, Any], ...] = ()
    overlap: tuple[tuple[int, Any], ...] = ()
    other: tuple[tuple[int, Any], ...] = ()
    first_difference: int | None = None
    num_compared: int = 0

    @property
    def exactly_once(self) -> bool:
        """Whether every update consumed exactly the control's samples."""
        return self.first_difference is None

    def to_json(self) -> dict[str, Any]:
        """Returns counts and ids; `bound` is the smallest bound under which the window would have passed."""
        lists = {name: [list(item) for item in getattr(self, name)] for name in _LISTS}
        return {
            **lists,
            "exactly_once": self.exactly_once,
            "first_difference": self.first_difference,
            "bound": max(len(self.replayed) + len(self.overlap), len(self.omitted)),
            "compared_samples": self.num_compared,
        }


_LISTS = ("replayed", "omitted", "pending", "overlap", "other")


def audit_window(
    expected: Sequence[tuple[int, Ids]], found: Sequence[tuple[int, Ids]], *, before: Container[Any] = ()
) -> Audit:
    """Compares two windows, each a sequence of (update, ids over all replicas) in order of updates.

    Args:
        expected: what the control consumed.
        found: what the candidate consumed.
        before: ids known to have been consumed before the window, in this epoch; asked only where windows differ.
    """
    last = max((update for update, _ in found), default=-1)
    comparable = [(update, ids) for update, ids in expected if update <= last] if found else list(expected)
    if [(u, Counter(ids)) for u, ids in comparable] == [(u, Counter(ids)) for u, ids in found]:
        return Audit(num_compared=sum(len(ids) for _, ids in found))
    return _classify(comparable, found, expected, frozenset(before) if isinstance(before, Collection) else before)


def _classify(
    comparable: Sequence[tuple[int, Ids]],
    found: Sequence[tuple[int, Ids]],
    everything: Sequence[tuple[int, Ids]],
    before: Container[Any],
) -> Audit:
    owed = Counter(item for _, ids in everything for item in ids)
    overlap: list[tuple[int, Any]] = []
    replayed: list[tuple[int, Any]] = []
    other: list[tuple[int, Any]] = []
    consumed: Counter[Any] = Counter()
    in_window = dict(everything)
    for update, ids in found:
        allowed = Counter(in_window.get(update, ()))
        for item, count in Counter(ids).items():
            for copy in range(count):
                consumed[item] += 1
                if consumed[item] <= owed[item]:
                    continue
                if copy and count > max(allowed[item], 1):
                    overlap.append((update, item))
                elif owed[item] or item in before:
                    replayed.append((update, item))
                else:
                    other.append((update, item))
    omitted, pending = _missing(comparable, consumed, ahead=bool(other), found=found, everything=everything)
    return Audit(
        replayed=tuple(replayed),
        omitted=tuple(omitted),
        pending=tuple(pending),
        overlap=tuple(overlap),
        other=tuple(other),
        first_difference=_first_difference(comparable, found),
        num_compared=sum(len(ids) for _, ids in found),
    )


def _missing(
    comparable: Sequence[tuple[int, Ids]],
    consumed: Counter[Any],
    *,
    ahead: bool,
    found: Sequence[tuple[int, Ids]],
    everything: Sequence[tuple[int, Ids]],
) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Splits what the candidate did not consume into passed over (omitted) and not yet reached (pending)."""
    home = {item: update for update, ids in everything for item in ids}
    reached = max((home[item] for _, ids in found for item in ids if item in home), default=-1)
    left = Counter(consumed)
    omitted: list[tuple[int, Any]] = []
    pending: list[tuple[int, Any]] = []
    for update, ids in comparable:
        for item in ids:
            if left[item] > 0:
                left[item] -= 1
            elif ahead or update < reached:
                omitted.append((update, item))
            else:
                pending.append((update, item))
    return omitted, pending


def _first_difference(expected: Sequence[tuple[int, Ids]], found: Sequence[tuple[int, Ids]]) -> int | None:
    wanted, got = dict(expected), dict(found)
    differing = [u for u in sorted({*wanted, *got}) if Counter(wanted.get(u, ())) != Counter(got.get(u, ()))]
    return differing[0] if differing else None


def audit_prefix(expected: Sequence[tuple[int, Ids]], found: Sequence[tuple[int, Ids]]) -> Audit:
    """Compares windows whose batches differ on purpose: both must walk the same global order.

    Only multisets per update are known. So whatever the candidate had consumed after an update must contain what the
    control consumed in fewer samples, and lie within what it consumed in more; beyond the control's window nothing is
    judged. Arguments as for `audit_window`.
    """
    consumed: Counter[Any] = Counter()
    for update, ids in found:
        consumed.update(ids)
        inner, outer = _surrounding(expected, consumed.total())
        omitted = inner - consumed
        beyond = consumed - outer if outer is not None else Counter[Any]()
        if omitted or beyond:
            again = Counter({item: count for item, count in beyond.items() if outer and item in outer})
            return Audit(
                replayed=tuple((update, item) for item in again.elements()),
                omitted=tuple((update, item) for item in omitted.elements()),
                other=tuple((update, item) for item in (beyond - again).elements()),
                first_difference=update,
                num_compared=consumed.total(),
            )
    return Audit(num_compared=consumed.total())


def _surrounding(expected: Sequence[tuple[int, Ids]], count: int) -> tuple[Counter[Any], Counter[Any] | None]:
    """Returns the control's samples after its last update within `count` samples, and after its first beyond them."""
    inner: Counter[Any] = Counter()
    outer: Counter[Any] = Counter()
    for _, ids in expected:
        outer.update(ids)
        if outer.total() <= count:
            inner.update(ids)
        if outer.total() >= count:
            return inner, outer
    return inner, None


def window_ids(updates: Sequence[ObservedUpdate]) -> list[tuple[int, Ids]]:
    """Returns (update, ids of all replicas) for every update whose ids were recorded."""
    return [(item.update, item.all_ids()) for item in updates if item.ids is not None]


def check_audit(audit: Audit, *, replay_bound: int = 0, omission_bound: int = 0) -> list[Problem]:
    """Returns a finding for every way in which the candidate's samples differ beyond the declared bounds.

    Both bounds are 0 for a continuation; an approximate continuation declares them, in samples.
    """
    if audit.exactly_once:
        return []
    within = (
        len(audit.replayed) + len(audit.overlap) <= replay_bound
        and len(audit.omitted) <= omission_bound
        and not audit.other
    )
    severity = Severity.NOTE if within and (replay_bound or omission_bound) else Severity.ERROR
    problems = [
        _finding(code, text, items, severity, bound)
        for code, text, items, bound in (
            (
                "SR-SAMPLE-REPLAYED",
                "were consumed again although the run had consumed them",
                audit.replayed,
                replay_bound,
            ),
            ("SR-SAMPLE-OVERLAP", "were given out twice within one update", audit.overlap, replay_bound),
            ("SR-SAMPLE-OTHER", "were consumed that the control does not consume in this window", audit.other, 0),
            ("SR-SAMPLE-OMITTED", "were passed over", audit.omitted, omission_bound),
        )
        if items
    ]
    return problems or [
        Problem(
            "SR-SAMPLE-ORDER",
            "the same samples are consumed, but in other updates than by the control",
            severity,
            where={"update": audit.first_difference},
            hint="the global order differs: the same seed, epoch and committed position must give the same updates",
        )
    ]


def _finding(code: str, text: str, items: Sequence[tuple[int, Any]], severity: Severity, bound: int) -> Problem:
    return Problem(
        code,
        f"{len(items)} samples {text}",
        severity,
        where={"update": items[0][0]},
        expected=f"at most {bound}" if bound else "none",
        found=short_ids([item for _, item in items]),
        hint="compare the sampler's committed position after loading with the checkpoint's; the ids are in the trace",
    )

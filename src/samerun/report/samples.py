"""Samples across the seam: which replica consumed which sample of each update, in the control and in the candidate.

Every update of the control is a strip in its global order; a sample keeps its place, so that what stands below it is
who consumed the same sample on the destination, or nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from samerun.core.batch import Dealing
from samerun.report.model import ReportModel
from samerun.verify.evidence.observed import Observed, ObservedUpdate, SampleId
from samerun.verify.order.audit import Audit, audit_prefix, audit_window, window_ids

MAX_CELLS = 6000
"""Cells (samples) that are drawn over all strips."""
MAX_STRIPS = 6
MAX_EXTRAS = 64

Where = Literal["same", "other-update", "nowhere"]
Standing = Literal["exact", "other-portions", "differs", "not-run"]


@dataclass(frozen=True, slots=True)
class Placed:
    """One sample of a strip: its id, the control's replica, and the candidate's replica and update (None: nobody)."""

    sample: SampleId
    source: int
    destination: int | None
    update: int | None


@dataclass(frozen=True, slots=True)
class Extra:
    """A sample that the candidate consumed in this update although the control does not: its id, and who."""

    sample: SampleId
    replica: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One update. `ran` says whether the candidate made it; `num_extras` counts those that are not listed too."""

    update: int
    placed: tuple[Placed, ...]
    extras: tuple[Extra, ...]
    num_extras: int
    ran: bool
    before_seam: bool = False

    @property
    def kinds(self) -> str:
        """What the extras are, in words."""
        return ", ".join(dict.fromkeys(extra.kind for extra in self.extras))

    @property
    def exact(self) -> bool:
        """Whether the candidate consumed exactly these samples in this update."""
        return not self.extras and all(item.update == self.update for item in self.placed)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring updates that stand alike, `first` to `last`."""

    standing: Standing
    first: int
    last: int


FateKind = Literal["committed", "consumed", "replayed", "prefetched", "omitted"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of samples around the seam: how many (None: not known), and what that means."""

    kind: FateKind
    count: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesView:
    """The seam. `committed` is (updates, samples) before it; counts are over the compared updates.

    `passed_over` counts the samples right behind the seam that the candidate began after: what a loader had read ahead,
    if its read-ahead counted as consumed.
    """

    committed_update: int | None
    committed_samples: int | None
    first_update: int
    last_update: int
    source_replicas: int
    destination_replicas: int
    compared: bool
    consumed: int
    counts: Mapping[str, int]
    exactly_once: bool
    first_difference: int | None
    strips: tuple[Strip, ...]
    stretches: tuple[Stretch, ...]
    by_choice: bool
    known: bool
    fates: tuple[Fate, ...] = ()
    passed_over: int = 0


def view_samples(model: ReportModel) -> SamplesView | None:
    """Returns the seam, or None if no control recorded samples."""
    control = model.control.observed if model.control else None
    if control is None:
        return None
    updates = [item for item in control.updates if item.ids is not None]
    if not updates:
        return None
    seam = model.manifest.progress.update if model.manifest else updates[0].update - 1
    candidate = model.followed.observed if model.followed else None
    made = [item for item in candidate.updates if item.ids is not None] if candidate else []
    portions = bool(model.plan and not model.plan.batch.exact)
    after = [item for item in updates if item.update > seam]
    last = max((item.update for item in made), default=seam)
    window = [item for item in after if not made or item.update <= last or portions]
    audit = _audit(window, made, portions) if made else None
    strips = tuple(_strips(updates, control, made, candidate, seam, audit))
    passed_over = count_passed_over(after, control, made) if audit and not audit.replayed else 0
    committed = model.manifest.progress.samples if model.manifest else None
    return SamplesView(
        committed_update=seam,
        committed_samples=committed,
        first_update=window[0].update if window else seam + 1,
        last_update=window[-1].update if window else seam,
        source_replicas=max(len(item.ids or {}) for item in updates),
        destination_replicas=max((len(item.ids or {}) for item in made), default=0),
        compared=audit is not None,
        consumed=sum(item.samples for item in made),
        counts={} if audit is None else {name: len(getattr(audit, name)) for name in _KINDS},
        exactly_once=bool(audit and audit.exactly_once),
        first_difference=audit.first_difference if audit else None,
        strips=strips,
        stretches=tuple(_stretches(window, made, portions)),
        by_choice=portions,
        known=candidate is None or bool(made),
        fates=tuple(_fates(audit, committed, sum(item.samples for item in made), passed_over)) if audit else (),
        passed_over=passed_over,
    )


def count_passed_over(after: Sequence[ObservedUpdate], control: Observed, made: Sequence[ObservedUpdate]) -> int:
    """Returns how many samples of the control's order, from the seam on, come before the first that the candidate has.

    0 too where its first update consumed others than these: it is then somewhere else in the order, not ahead in it.
    """
    consumed = {sample for item in made for sample in item.all_ids()}
    known = {sample for item in after for sample in item.all_ids()}
    if not made or not known.issuperset(made[0].all_ids()):
        return 0
    order = (sample for item in after for sample, _ in in_global_order(item, control))
    return next((place for place, sample in enumerate(order) if sample in consumed), 0)


def _fates(audit: Audit, committed: int | None, consumed: int, passed_over: int) -> Iterator[Fate]:
    again = len(audit.replayed) + len(audit.overlap)
    omitted = max(0, len(audit.omitted) - passed_over)
    yield Fate("committed", committed, "by the source, before the seam; they belong to the checkpoint")
    yield Fate("consumed", consumed, "by the candidate, after the seam")
    yield Fate("replayed", again, "consumed a second time" if again else "nothing was consumed a second time")
    if passed_over:
        read_ahead = "right behind the seam, passed over: as when batches that were only read ahead count as consumed"
    elif audit.other or omitted:
        read_ahead = "cannot be told: the candidate is not where the control goes on"
    else:
        read_ahead = "the candidate begins right behind the seam, so whatever had been read ahead was issued again"
    yield Fate("prefetched", passed_over or (None if audit.other or omitted else 0), read_ahead)
    yield Fate("omitted", omitted, "passed over later on" if omitted else "none was passed over")


_KINDS = ("replayed", "overlap", "other", "omitted", "pending")


def _audit(window: Sequence[ObservedUpdate], made: Sequence[ObservedUpdate], portions: bool) -> Audit:
    expected, found = window_ids(window), window_ids(made)
    return audit_prefix(expected, found) if portions else audit_window(expected, found)


def _strips(
    updates: Sequence[ObservedUpdate],
    control: Observed,
    made: Sequence[ObservedUpdate],
    candidate: Observed | None,
    seam: int,
    audit: Audit | None,
) -> Iterator[Strip]:
    wanted = _chosen(updates, seam, audit)
    consumers = _consumers(made)
    own = {item.update: item for item in made}
    kinds = _kinds(audit)
    for item in wanted:
        placed = tuple(
            Placed(sample, source, *_take(consumers, sample, item.update))
            for sample, source in in_global_order(item, control)
        )
        mine = own.get(item.update)
        extras = list(_extras(item, mine, kinds)) if mine is not None else []
        yield Strip(
            update=item.update,
            placed=placed,
            extras=tuple(extras[:MAX_EXTRAS]),
            num_extras=len(extras),
            ran=mine is not None,
            before_seam=item.update <= seam,
        )


def _chosen(updates: Sequence[ObservedUpdate], seam: int, audit: Audit | None) -> list[ObservedUpdate]:
    """Two updates before the seam where they are recorded, the first ones after it, and around a first difference."""
    size = max((item.samples for item in updates), default=1) or 1
    most = max(1, min(MAX_STRIPS, MAX_CELLS // size))
    before = [item for item in updates if item.update <= seam][-2:]
    after = [item for item in updates if item.update > seam]
    chosen = [*before, *after[:most]]
    if audit is not None and audit.first_difference is not None:
        near = [item for item in after if abs(item.update - audit.first_difference) <= 1]
        chosen += [item for item in near if item not in chosen]
    return chosen if size * len(chosen) <= 2 * MAX_CELLS else []


def in_global_order(item: ObservedUpdate, observed: Observed) -> list[tuple[SampleId, int]]:
    """Returns (id, replica) of one update in the global order, as far as the job's dealing tells; else by replica."""
    ids = item.ids or {}
    header = next(iter(observed.headers.values()), None)
    rows: Any = (header.batch or {}).get("microbatches") if header else None
    flat = [(sample, replica) for replica, mine in sorted(ids.items()) for sample in mine]
    try:
        dealing = Dealing.from_json(rows)
    except (ValueError, TypeError):
        return flat
    placed: dict[int, tuple[SampleId, int]] = {}
    for replica, mine in ids.items():
        if replica >= dealing.replicas or len(mine) != dealing.share(replica):
            return flat
        positions = [position for part in dealing.replica_positions(replica) for position in part]
        placed |= {position: (sample, replica) for position, sample in zip(positions, mine, strict=True)}
    return [placed[position] for position in sorted(placed)]


def _consumers(made: Sequence[ObservedUpdate]) -> dict[SampleId, list[tuple[int, int]]]:
    """Returns who consumed each sample in the candidate: (update, replica), in order."""
    found: dict[SampleId, list[tuple[int, int]]] = {}
    for item in made:
        for replica, mine in sorted((item.ids or {}).items()):
            for sample in mine:
                found.setdefault(sample, []).append((item.update, replica))
    return found


def _take(
    consumers: Mapping[SampleId, list[tuple[int, int]]], sample: SampleId, update: int
) -> tuple[int | None, int | None]:
    """Returns (replica, update) of the candidate's consumption of a sample, that of the same update before others."""
    found = consumers.get(sample)
    if not found:
        return None, None
    place = next((index for index, (when, _) in enumerate(found) if when == update), 0)
    when, replica = found.pop(place)
    return replica, when


def _kinds(audit: Audit | None) -> dict[tuple[int, Any], str]:
    if audit is None:
        return {}
    named = (("replayed", audit.replayed), ("twice", audit.overlap), ("not the control's", audit.other))
    return {(update, sample): kind for kind, items in named for update, sample in items}


def _extras(control: ObservedUpdate, mine: ObservedUpdate, kinds: Mapping[tuple[int, Any], str]) -> Iterator[Extra]:
    allowed = Counter(control.all_ids())
    for replica, ids in sorted((mine.ids or {}).items()):
        for sample in ids:
            if allowed[sample] > 0:
                allowed[sample] -= 1
            else:
                yield Extra(sample, replica, kinds.get((mine.update, sample), "in another update of the control"))


def _stretches(window: Sequence[ObservedUpdate], made: Sequence[ObservedUpdate], portions: bool) -> Iterator[Stretch]:
    own = {item.update: item for item in made}
    open_stretch: Stretch | None = None
    for item in window:
        standing = _standing(item, own.get(item.update), portions)
        if open_stretch is not None and open_stretch.standing == standing:
            open_stretch = Stretch(standing, open_stretch.first, item.update)
            continue
        if open_stretch is not None:
            yield open_stretch
        open_stretch = Stretch(standing, item.update, item.update)
    if open_stretch is not None:
        yield open_stretch


def _standing(control: ObservedUpdate, candidate: ObservedUpdate | None, portions: bool) -> Standing:
    if candidate is None:
        return "not-run"
    if portions:
        return "other-portions"
    return "exact" if Counter(control.all_ids()) == Counter(candidate.all_ids()) else "differs"

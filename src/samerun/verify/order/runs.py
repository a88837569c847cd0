"""The audit of whole runs: traces of any number of starts of a job, joined into what the run in the end consumed.

A run that was stopped and resumed has one trace per start. A start usually records some updates beyond the checkpoint
from which the next one resumes: those updates were rolled back with the weights and do not count. What is left, in
order of updates, is the *lineage*. With an order, each update of it is compared with the very positions that it should
have taken; without one, an epoch's ids are compared with each other.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.idset import add_ids_digests, ids_digest
from samerun.core.order import GlobalOrder
from samerun.core.progress import Committed, LastBatch, UpdateSpan, after, next_update
from samerun.errors import Problem, Severity
from samerun.trace import Trace
from samerun.verify.evidence.observed import short_ids
from samerun.verify.order.audit import Audit, Ids, audit_window, check_audit
from samerun.verify.order.before import consumed_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """One attempt at an update, as all batch replicas of one start recorded it.

    `ids` is None where some replica kept no ids; `digest` where some replica wrote none. `at` is the index of the
    start.
    """

    at: int
    update: int
    skipped: bool
    num_samples: int
    ids: Ids | None
    digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """Where one start's work ends and the next one's goes on: after `update`; `rolled_back` updates were lost."""

    update: int
    rolled_back: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAudit:
    """What a run consumed against what it should have. Lists hold (update, id) unless said otherwise.

    `padding` are positions that the order itself repeats; they are expected. `wrong_updates` could be compared by
    digest only and differ. `unchecked` is the number of updates without ids and digests. `out_of_order`: the first
    update that holds other samples than it should, although in all nothing is missing or repeated.
    """

    epochs: tuple[Audit, ...]
    padding: tuple[tuple[int, Any], ...]
    seams: tuple[Seam, ...]
    num_updates: int
    num_samples: int
    wrong_updates: tuple[tuple[int, int], ...] = ()
    unchecked: int = 0
    end: Committed | None = None

    def items(self, name: str) -> list[tuple[int, Any]]:
        """Returns `replayed`, `omitted`, `pending`, `overlap` or `other` over all epochs."""
        return [item for audit in self.epochs for item in getattr(audit, name)]

    @property
    def out_of_order(self) -> int | None:
        """The first update that differs where nothing is missing or repeated."""
        named = any(self.items(name) for name in ("replayed", "omitted", "overlap", "other"))
        return None if named else min((a.first_difference for a in self.epochs if a.first_difference), default=None)

    @property
    def exactly_once(self) -> bool:
        """Whether every update consumed what it should, as far as anything was recorded at all."""
        whole = all(audit.exactly_once for audit in self.epochs) and not self.wrong_updates and not self.unchecked
        return whole and self.num_updates > 0

    @property
    def bound(self) -> int:
        """The smallest number of samples of which more were neither replayed nor omitted."""
        twice = len(self.items("replayed")) + len(self.items("overlap")) + len(self.items("other"))
        return max(twice, len(self.items("omitted"))) + sum(count for _, count in self.wrong_updates)

    def to_json(self) -> dict[str, Any]:
        """Returns the body of `samerun audit --json`."""
        names = ("replayed", "omitted", "pending", "overlap", "other")
        return {
            **{name: [list(item) for item in self.items(name)] for name in names},
            "padding": [list(item) for item in self.padding],
            "out_of_order": self.out_of_order,
            "exactly_once": self.exactly_once,
            "bound": self.bound,
            "wrong_updates": [list(item) for item in self.wrong_updates],
            "unchecked_updates": self.unchecked,
            "updates": self.num_updates,
            "samples": self.num_samples,
            "seams": [
                {"update": seam.update, "rolled_back": seam.rolled_back, "rolled_back_samples": seam.num_samples}
                for seam in self.seams
            ],
            "end": self.end.to_json() if self.end else None,
        }


def consumed(trace: Trace, start: int = 0) -> list[Consumed]:
    """Returns every attempt that a trace records, in order; one rank per batch replica counts."""
    replicas = list(trace.replicas().values())
    found: list[Consumed] = []
    for lines in zip(*(rank.updates for rank in replicas), strict=False):
        ids = [line.sample_ids for line in lines]
        samples = sum(line.samples for line in lines)
        digests = [line.ids_digest for line in lines]
        known = [digest for digest in digests if digest is not None]
        found.append(
            Consumed(
                at=start,
                update=lines[0].update,
                skipped=lines[0].skipped,
                num_samples=samples,
                ids=tuple(itertools.chain(*ids)) if sum(map(len, ids)) == samples else None,
                digest=add_ids_digests(known) if len(known) == len(digests) else None,
            )
        )
    return found


def join(traces: Sequence[Trace]) -> tuple[list[Consumed], list[Seam]]:
    """Returns the lineage of traces given in the order of their starts, and the seams between them."""
    starts = [lines for number, trace in enumerate(traces) if (lines := consumed(trace, number))]
    lineage: list[Consumed] = []
    seams: list[Seam] = []
    for lines in starts:
        first = lines[0].update
        kept = [line for line in lineage if line.update < first]
        lost = lineage[len(kept) :]
        if lineage:
            rolled_back = len({line.update for line in lost if not line.skipped})
            num_samples = sum(line.num_samples for line in lost)
            seams.append(Seam(update=first - 1, rolled_back=rolled_back, num_samples=num_samples))
        lineage = [*kept, *lines]
    return lineage, seams


def audit_runs(
    traces: Sequence[Trace],
    order: GlobalOrder | None = None,
    *,
    begin: Committed | None = None,
    last_batch: LastBatch = "keep",
) -> RunAudit:
    """Audits the lineage of `traces`, given in the order in which the job was started.

    Args:
        traces: one per start. order: the global order that the run declared. None: all ids are taken as one epoch, in
        which none may come twice. begin: the position before the first recorded update; the beginning of the order if
        left out. last_batch: what the run does with an epoch's last samples.
    """
    lineage, seams = join(traces)
    body: dict[str, Any] = {
        "seams": tuple(seams),
        "num_updates": len({line.update for line in lineage if not line.skipped}),
        "num_samples": sum(line.num_samples for line in lineage),
    }
    if order is None:
        return RunAudit(**body, **_among_themselves(lineage))
    return RunAudit(**body, **_against(lineage, order, begin or Committed(), last_batch))


def _among_themselves(lineage: Sequence[Consumed]) -> dict[str, Any]:
    seen: dict[Any, int] = {}
    replayed: list[tuple[int, Any]] = []
    overlap: list[tuple[int, Any]] = []
    known = [(number, line) for number, line in enumerate(lineage) if line.ids is not None]
    for number, line in known:
        for item in line.ids or ():
            if item in seen:
                (overlap if seen[item] == number else replayed).append((line.update, item))
            seen.setdefault(item, number)
    first = min((update for update, _ in (*replayed, *overlap)), default=None)
    audit = Audit(replayed=tuple(replayed), overlap=tuple(overlap), first_difference=first, num_compared=len(seen))
    return {"epochs": (audit,), "padding": (), "unchecked": len(lineage) - len(known)}


def _against(
    lineage: Sequence[Consumed], order: GlobalOrder, begin: Committed, last_batch: LastBatch
) -> dict[str, Any]:
    expected: dict[int, list[tuple[int, Ids]]] = {}
    found: dict[int, list[tuple[int, Ids]]] = {}
    wrong: list[tuple[int, int]] = []
    padding: list[tuple[int, Any]] = []
    unchecked, at = 0, begin
    for number, line in enumerate(lineage):
        if not line.num_samples:
            continue
        if line.num_samples > _MOST_EPOCHS * order.num_samples(at.epoch):
            wrong.append((line.update, line.num_samples))  # no update of this order: its positions are not walked
            continue
        span = _span(order, at, line.num_samples, last_batch)
        at = after(at, span, skipped=line.skipped)
        padding += [(line.update, item) for item in _padding(order, span)]
        if line.ids is None:
            if line.digest is None:
                unchecked += 1
            elif line.digest != ids_digest(span.ids(order).tolist()):
                wrong.append((line.update, line.num_samples))
            continue
        parts = [tuple(order.ids(part.epoch, part.start, part.stop).tolist()) for part in span.spans]
        for part, ids, mine in zip(span.spans, parts, _split(line.ids, parts), strict=True):
            expected.setdefault(part.epoch, []).append((number, ids))
            found.setdefault(part.epoch, []).append((number, mine))
    updates = [line.update for line in lineage]
    epochs = tuple(
        _renumber(audit_window(expected[epoch], ids, before=consumed_before(order, begin, epoch, ids)), updates)
        for epoch, ids in sorted(found.items())
    )
    return {
        "epochs": epochs,
        "padding": tuple(padding),
        "wrong_updates": tuple(wrong),
        "unchecked": unchecked,
        "end": at,
    }


_MOST_EPOCHS = 1000  # that one update may take


def _span(order: GlobalOrder, at: Committed, num_samples: int, last_batch: LastBatch) -> UpdateSpan:
    """The positions that an update of so many samples takes; beyond an epoch's end it goes into the next one."""
    if last_batch != "drop" or num_samples <= order.num_samples(at.epoch):
        span = next_update(order, at, num_samples, last_batch)
        if span.num_samples == num_samples:
            return span
    return next_update(order, at, num_samples, "carry")


def _split(found: Ids, parts: Sequence[Ids]) -> list[Ids]:
    """The ids of an update over an epoch's end that count for each epoch: those expected, the last with the rest."""
    left = Counter(found)
    split: list[list[Any]] = []
    for part in parts:
        mine = list((Counter(part) & left).elements())
        left -= Counter(mine)
        split.append(mine)
    split[-1] += left.elements()
    return [found] if len(parts) == 1 else [tuple(ids) for ids in split]


def _padding(order: GlobalOrder, span: UpdateSpan) -> list[Any]:
    unpadded = getattr(order, "num_unpadded", None)
    if unpadded is None:
        return []
    return [
        item
        for part in span.spans
        if part.stop > unpadded(part.epoch)
        for item in order.ids(part.epoch, max(part.start, unpadded(part.epoch)), part.stop).tolist()
    ]


def _renumber(audit: Audit, updates: Sequence[int]) -> Audit:
    """Attempts were numbered one by one, since a skipped update shares its index; here they get their indices back."""
    lists: dict[str, Any] = {
        name: tuple((updates[number], item) for number, item in getattr(audit, name))
        for name in ("replayed", "omitted", "pending", "overlap", "other")
    }
    first = None if audit.first_difference is None else updates[audit.first_difference]
    return Audit(**lists, first_difference=first, num_compared=audit.num_compared)


def check_runs(
    traces: Sequence[Trace], audit: RunAudit, *, replay_bound: int = 0, omission_bound: int = 0
) -> list[Problem]:
    """Returns every finding about a run's samples: the multisets', and SR-AUDIT-* about the traces as evidence."""
    merged = Audit(
        replayed=tuple(audit.items("replayed")),
        omitted=tuple(audit.items("omitted")),
        pending=tuple(audit.items("pending")),
        overlap=tuple(audit.items("overlap")),
        other=tuple(audit.items("other")),
        first_difference=min(
            (a.first_difference for a in audit.epochs if a.first_difference is not None), default=None
        ),
    )
    return [
        *_check_gaps(traces),
        *_check_digests(traces),
        *_check_evidence(audit),
        *check_audit(merged, replay_bound=replay_bound, omission_bound=omission_bound),
    ]


def _check_gaps(traces: Sequence[Trace]) -> Iterator[Problem]:
    lineage, seams = join(traces)
    done = [line for line in lineage if not line.skipped]
    for line, following in itertools.pairwise(done):
        if following.update != line.update + 1:
            yield Problem(
                "SR-AUDIT-GAP",
                f"no trace records updates {line.update + 1} to {following.update - 1}",
                where={"update": line.update + 1, "file": str(traces[following.at].path)},
                expected=line.update + 1,
                found=following.update,
                hint="give every start of the job, in the order in which they ran",
            )
    for seam in seams:
        if seam.rolled_back:
            yield Problem(
                "SR-AUDIT-ROLLBACK",
                f"{seam.rolled_back} updates beyond the checkpoint at {seam.update} were rolled back and made again",
                severity=Severity.NOTE,
                where={"update": seam.update},
                hint="their samples are counted where the run made them for good",
            )


def _check_digests(traces: Sequence[Trace]) -> Iterator[Problem]:
    for trace in traces:
        for rank in trace.ranks:
            for line in rank.updates:
                if line.sample_ids and line.ids_digest is not None and line.ids_digest != ids_digest(line.sample_ids):
                    yield Problem(
                        "SR-AUDIT-DIGEST",
                        "the ids of an update and their set digest do not belong together",
                        where={"update": line.update, "rank": rank.header.rank, "file": str(rank.file)},
                        expected=line.ids_digest,
                        found=ids_digest(line.sample_ids),
                        hint="the trace was edited or damaged: no id of it can be relied upon",
                    )
                    break


def _check_evidence(audit: RunAudit) -> Iterator[Problem]:
    if audit.wrong_updates:
        yield Problem(
            "SR-AUDIT-SET",
            f"{len(audit.wrong_updates)} updates consumed other samples than the order has at their positions",
            where={"update": audit.wrong_updates[0][0]},
            found=short_ids([update for update, _ in audit.wrong_updates]),
            hint="the ledger holds digests only; record with keep_ids=True to learn which samples",
        )
    if not audit.num_updates:
        yield Problem(
            "SR-AUDIT-EMPTY",
            "no trace records a completed update: there is nothing to audit",
            hint="the job ended before its first `record`; give the traces of the starts that trained",
        )
    if audit.unchecked:
        yield Problem(
            "SR-AUDIT-IDS",
            f"{audit.unchecked} updates have no sample ids"
            + ("" if audit.end is None else " and no set digest")
            + ": nothing can be said of them",
            hint="record every rank's sample_ids; a ledger of digests only needs --order",
        )
    if audit.padding:
        yield Problem(
            "SR-AUDIT-PADDING",
            f"{len(audit.padding)} samples were consumed twice because the order pads the end of an epoch",
            severity=Severity.NOTE,
            where={"update": audit.padding[0][0]},
            found=short_ids([item for _, item in audit.padding]),
            hint="the run was begun like this; keeping it is what makes a continuation the same run",
        )

"""What is wrong with a trace as a whole: ranks that are missing, and ranks that do not tell one story."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from samerun.errors import Problem, Severity
from samerun.trace.model import Trace, UpdateLine

RANK_AGREEMENT = 1e-6
"""How far two ranks' copies of one reduced number may lie apart (relative): reductions may end in different orders."""

_MOST_NAMED = 8


def check_trace(trace: Trace) -> list[Problem]:
    """Returns everything that is wrong with a trace: its lines, its ranks, and whether its ranks tell one story."""
    return [
        *trace.problems,
        *_check_ranks(trace),
        *_check_ends(trace),
        *_check_indices(trace),
        *_check_agreement(trace),
        *_check_samples(trace),
        *_check_finite(trace),
    ]


def _check_ranks(trace: Trace) -> Iterator[Problem]:
    world_sizes = sorted({rank.header.world_size for rank in trace.ranks})
    if len(world_sizes) > 1:
        yield Problem(
            "SR-TRACE-RANKS",
            f"ranks report different world sizes: {', '.join(map(str, world_sizes))}",
            hint="the directory holds files of two jobs; keep one directory per start",
            expected=world_sizes[0],
            found=world_sizes[1:],
        )
        return
    size = world_sizes[0]
    have = Counter(rank.header.rank for rank in trace.ranks)
    if len(have) == len(trace.ranks) == size and set(have) == set(range(size)):
        return
    missing = itertools.islice((rank for rank in range(size) if rank not in have), _MOST_NAMED + 1)
    repeated = [rank for rank, number in sorted(have.items()) if number > 1]
    beyond = [rank for rank in sorted(have) if not 0 <= rank < size]
    named = {"missing": [*missing], "repeated": repeated, "no ranks of it": beyond}
    yield Problem(
        "SR-TRACE-RANKS",
        f"the job had {size} ranks; files: "
        + "; ".join(f"{what}: {_first(ranks)}" for what, ranks in named.items() if ranks),
        where={"file": str(trace.path)},
        hint="copy every rank's file into one directory (nodes may not share a file system)",
        expected=size,
        found=len(have),
    )


def _first(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + (" and more" if len(ranks) > _MOST_NAMED else "")


def _check_ends(trace: Trace) -> Iterator[Problem]:
    open_ranks = [rank.header.rank for rank in trace.ranks if rank.end is None]
    if open_ranks:
        yield Problem(
            "SR-TRACE-OPEN",
            f"{len(open_ranks)} of {len(trace.ranks)} ranks have no end line: the job still runs, or was killed",
            severity=Severity.WARNING,
            where={"rank": open_ranks[0]},
            hint="what was recorded before counts; the log says why it ended",
        )
    for rank in trace.ranks:
        found = sum(not line.skipped for line in rank.updates)
        if rank.end is not None and rank.end.updates != found:
            yield Problem(
                "SR-TRACE-COUNT",
                f"rank {rank.header.rank} counted {rank.end.updates} updates at its end, and its file has {found}",
                where={"rank": rank.header.rank, "file": str(rank.file)},
                hint="lines were lost or added after the job wrote them: copy the trace again, or record again",
                expected=rank.end.updates,
                found=found,
            )


def _check_indices(trace: Trace) -> Iterator[Problem]:
    for rank in trace.ranks:
        done = [line for line in rank.updates if not line.skipped]
        for before, after in itertools.pairwise(done):
            if after.update != before.update + 1:
                yield Problem(
                    "SR-TRACE-INDEX",
                    f"update {before.update} is followed by update {after.update}",
                    where={"rank": rank.header.rank, "update": after.update}
                    | {"file": str(rank.file), "line": after.line},
                    hint="call `record` once after every completed update, counted by one",
                    expected=before.update + 1,
                    found=after.update,
                )


def _check_agreement(trace: Trace) -> Iterator[Problem]:
    lead = trace.lead
    for rank in trace.ranks[1:]:
        mine, theirs = [line.update for line in lead.updates], [line.update for line in rank.updates]
        if mine != theirs and rank.end is not None and lead.end is not None:
            yield Problem(
                "SR-TRACE-DISAGREE",
                f"rank {rank.header.rank} recorded {len(theirs)} updates, rank {lead.header.rank} {len(mine)}",
                where={"rank": rank.header.rank},
                hint="`record` is collective: every rank calls it after every update",
                expected=mine[-1] if mine else None,
                found=theirs[-1] if theirs else None,
            )
        for left, right in zip(lead.updates, rank.updates, strict=False):
            if name := _first_difference(left, right):
                yield Problem(
                    "SR-TRACE-DISAGREE",
                    f"ranks {lead.header.rank} and {rank.header.rank} give another {name} for update {left.update}",
                    where={"rank": rank.header.rank, "update": left.update},
                    hint="give `record` the global value (reduced over the batch replicas), not this rank's",
                    expected=getattr(left, name),
                    found=getattr(right, name),
                )
                break  # one per rank: the rest follows from it


def _first_difference(left: UpdateLine, right: UpdateLine) -> str | None:
    if left.update != right.update:
        return "update"
    if left.lr != right.lr:
        return "lr"
    if left.skipped != right.skipped:
        return "skipped"
    return next(
        (n for n in ("loss", "grad_norm", "update_norm") if not _agree(getattr(left, n), getattr(right, n))), None
    )


def _agree(one: float | None, other: float | None) -> bool:
    if one is None or other is None:  # not every pipeline stage knows every number
        return True
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=RANK_AGREEMENT)


def _check_samples(trace: Trace) -> Iterator[Problem]:
    replicas = trace.replicas()
    for rank in trace.ranks:
        leader = replicas[trace.replica_of(rank)]
        for line in rank.updates:
            other = leader.update(line.update)
            if other is not None and not line.skipped and other.sample_ids != line.sample_ids:
                yield Problem(
                    "SR-TRACE-SAMPLES",
                    f"ranks {leader.header.rank} and {rank.header.rank} share a batch but consumed different samples",
                    where={"rank": rank.header.rank, "update": line.update},
                    hint="TP, CP and PP ranks of one batch replica must read the same microbatches",
                    expected=list(other.sample_ids[:8]),
                    found=list(line.sample_ids[:8]),
                )
                break
    for index in dict.fromkeys(trace.update_indices):
        seen: dict[int | str, int] = {}
        for replica, ids in trace.sample_ids(index).items():
            for sample in ids:
                if seen.setdefault(sample, replica) != replica:
                    yield Problem(
                        "SR-TRACE-OVERLAP",
                        f"replicas {seen[sample]} and {replica} both consumed sample {sample} in update {index}",
                        severity=Severity.WARNING,
                        where={"update": index},
                        hint="padding at the end of an epoch does this; in the middle of one, replicas are misnumbered",
                    )
                    return


def _check_finite(trace: Trace) -> Iterator[Problem]:
    for rank in trace.ranks:
        for line in rank.updates:
            if not line.finite and not line.skipped:
                yield Problem(
                    "SR-TRACE-NONFINITE",
                    f"update {line.update} has a value that is not finite",
                    where={"rank": rank.header.rank, "update": line.update},
                    hint="loss, gradient norm and update norm of that line show which came first",
                    found={"loss": line.loss, "grad_norm": line.grad_norm, "update_norm": line.update_norm},
                )
                return

"""Random number streams of ranks: those that must agree agree, those that must differ differ, and the declared policy.

Whether ranks should draw alike is no law: Megatron's data-parallel ranks share a seed on purpose, a torch script often
seeds every rank alike. The control shows what this run does, and the candidate has to do the same. Where the control
has no two such ranks, the finding is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samerun.core.mesh import Layout
from samerun.errors import Problem, Severity

Body = Mapping[str, Any]
"""The body of a state line: `rng` (digest of torch's generator by rank), `layout`, `rank_rng`, `update`."""


def check_kept_streams(control: Body, candidate: Body) -> list[Problem]:
    """Returns SR-RNG-AGREE and SR-RNG-SAME where the candidate's ranks relate otherwise than the control's.

    SR-RNG-AGREE: tensor-parallel ranks of one place draw different numbers. SR-RNG-SAME: batch replicas draw the same.
    """
    before, now = _Streams(control), _Streams(candidate)
    problems: list[Problem] = []
    if now.parted is not None and before.agree is not False:
        lead, rank = now.parted
        problems.append(
            Problem(
                "SR-RNG-AGREE",
                f"ranks {lead} and {rank} are tensor-parallel ranks of one replica, but their generators differ",
                Severity.ERROR if before.agree else Severity.WARNING,
                where={"rank": rank},
                expected="one state, as in the control" if before.agree else "one state",
                found="two states",
                hint="they must draw the same masks for activations that they all hold",
            )
        )
    if now.doubled is not None and before.differ is not False:
        lead, rank = now.doubled
        problems.append(
            Problem(
                "SR-RNG-SAME",
                f"ranks {lead} and {rank} see different samples, but their generators have the same state",
                Severity.ERROR if before.differ else Severity.WARNING,
                where={"rank": rank},
                expected="a state of its own for each replica, as in the control" if before.differ else "two states",
                found="one state",
                hint="one rank's state was loaded by both: their samples get the same noise; apply a policy",
            )
        )
    return problems


class _Streams:
    """How the generators of one job's ranks relate.

    `agree`: whether tensor-parallel ranks have one state; `differ`: whether all batch replicas have states of their
    own; None where there are no two such ranks. `parted` and `doubled` are the first pair of ranks for which it is not
    so.
    """

    def __init__(self, body: Body) -> None:
        layout = _layout_of(body)
        digests: dict[int, str] = {int(rank): digest for rank, digest in (body.get("rng") or {}).items()}
        places: dict[tuple[int, ...], int] = {}
        leads: dict[str, int] = {}
        self.parted = self.doubled = None
        has_peers = has_replicas = False
        if layout is None or len(digests) != layout.world_size:
            digests, layout = {}, Layout()
        for rank in sorted(digests):
            at = layout.coordinate(rank)
            lead = places.setdefault((layout.batch_replica(rank), at["pp"], at["cp"]), rank)
            if lead != rank:
                has_peers = True
                if digests[lead] != digests[rank]:
                    self.parted = self.parted or (lead, rank)
            elif at["pp"] == at["cp"] == 0:
                other = leads.setdefault(digests[rank], rank)
                has_replicas = has_replicas or rank != 0
                if other != rank:
                    self.doubled = self.doubled or (other, rank)
        self.agree = self.parted is None if has_peers else None
        self.differ = self.doubled is None if has_replicas else None


def _layout_of(body: Body) -> Layout | None:
    layout = body.get("layout")
    if layout is None:
        return None
    try:
        return Layout.from_dict(layout)
    except (TypeError, ValueError):
        return None


def check_policy(found: Body, *, has_saved: bool) -> list[Problem]:
    """Returns what is wrong with the policy that a job applied to its ranks' generators (`rank_rng`), if it told one.

    SR-RNG-POLICY: ranks that applied none or another one, at another update than the checkpoint's, or `survivors` of
    whom none is left although the checkpoint has states. SR-RNG-SAME: two replicas with one stream.
    """
    records: dict[int, Any] = {int(rank): record for rank, record in (found.get("rank_rng") or {}).items()}
    if not records:
        return []
    policies = sorted({str((record or {}).get("policy")) for record in records.values()})
    if len(policies) > 1:
        odd = next(rank for rank, record in sorted(records.items()) if (record or {}).get("policy") != policies[0])
        return [_policy("the ranks did not apply one policy to their generators", policies[0], policies, odd)]
    problems = list(_check_updates(records, found.get("update")))
    if policies == ["survivors"] and has_saved and not any(record["kept"] for record in records.values()):
        wanted = "at least one rank with its saved state"
        problems.append(_policy("the policy is survivors, and no rank kept a saved state", wanted, "none", 0))
    return [*problems, *_check_shared(records, _layout_of(found))]


def _check_updates(records: Mapping[int, Any], update: int | None) -> Iterator[Problem]:
    for rank, record in sorted(records.items()):
        if update is not None and record["update"] != update:
            yield _policy("the policy was applied at another update than the resume's", update, record["update"], rank)
            return


def _check_shared(records: Mapping[int, Any], layout: Layout | None) -> Iterator[Problem]:
    leads: dict[int, int] = {}
    for rank, record in sorted(records.items()):
        if layout is None or rank >= layout.world_size:
            continue
        other = leads.setdefault(record["stream"], rank)
        if layout.batch_replica(other) != layout.batch_replica(rank):
            yield Problem(
                "SR-RNG-SAME",
                f"ranks {other} and {rank} see different samples, but were given the same stream",
                where={"rank": rank},
                expected="a stream for each batch replica",
                found=record["stream"],
                hint="pass stream=layout.batch_replica(rank), or the rank where every rank draws for itself",
            )
            return


def _policy(message: str, expected: Any, found: Any, rank: int) -> Problem:
    hint = "call apply_rank_rng once on every rank, after loading, with the update that the checkpoint holds"
    return Problem("SR-RNG-POLICY", message, where={"rank": rank}, expected=expected, found=found, hint=hint)

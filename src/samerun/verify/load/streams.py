"""Random number streams of ranks: those that must agree agree, those that must differ differ, and the declared policy.

Whether ranks should draw alike is no law: Megatron's data-parallel ranks share a seed on purpose, a torch script often
seeds every rank alike. The control shows what this run does, and the candidate has to do the same. Where the control
has no two such ranks, the finding is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samerun.core.generators import DATA_PARALLEL, MODEL_PARALLEL, TRACKER
from samerun.core.mesh import Layout
from samerun.errors import Problem, Severity

Body = Mapping[str, Any]
"""The body of a state line: `rng` (digest of torch's generator by rank), `generators` (digests of the others, by name
and rank), `layout`, `rank_rng`, `update`."""

_TRACKED = TRACKER + MODEL_PARALLEL


def check_kept_streams(control: Body, candidate: Body) -> list[Problem]:
    """Returns SR-RNG-AGREE and SR-RNG-SAME where the candidate's ranks relate otherwise than the control's.

    Each generator by itself: torch's, CUDA's, NumPy's, Python's, and each of Megatron's tracker. SR-RNG-AGREE:
    tensor-parallel ranks of one place draw different numbers. SR-RNG-SAME: batch replicas draw the same, or
    tensor-parallel ranks do from a generator of Megatron's tracker that is each rank's own, such as
    `model-parallel-rng`.
    """
    before, now = _layout_of(control), _layout_of(candidate)
    digests = [_digests(control), _digests(candidate)]
    return [
        problem
        for name in sorted(digests[1])
        for problem in _check_generator(
            name, _Streams(before, digests[0].get(name, {})), _Streams(now, digests[1][name])
        )
    ]


def _digests(body: Body) -> dict[str, Mapping[str, str]]:
    others: Mapping[str, Mapping[str, str]] = body.get("generators") or {}
    return {"torch": body.get("rng") or {}, **others}


def _check_generator(name: str, before: _Streams, now: _Streams) -> Iterator[Problem]:
    peers_differ = before.peers_differ if before.peers_differ is not None else name == _TRACKED
    peers_differ = peers_differ and name.startswith(TRACKER)  # others may be dealt by replica where ranks had their own
    if now.parted is not None and before.agree is not False and not peers_differ:
        lead, rank = now.parted
        yield Problem(
            "SR-RNG-AGREE",
            f"ranks {lead} and {rank} are tensor-parallel ranks of one replica, but their {_words(name)} differ",
            Severity.ERROR if before.agree else Severity.WARNING,
            where={"rank": rank, "key": name},
            expected="one state, as in the control" if before.agree else "one state",
            found="two states",
            hint="they must draw the same masks for activations that they all hold",
        )
    if now.doubled is not None and before.differ is not False and not name.startswith(TRACKER):
        lead, rank = now.doubled
        yield Problem(
            "SR-RNG-SAME",
            f"ranks {lead} and {rank} see different samples, but their {_words(name)} have the same state",
            Severity.ERROR if before.differ else Severity.WARNING,
            where={"rank": rank, "key": name},
            expected="a state of its own for each replica, as in the control" if before.differ else "two states",
            found="one state",
            hint="one rank's state was loaded by both: their samples get the same noise; apply a policy",
        )
    if now.paired is not None and peers_differ:
        lead, rank = now.paired
        yield Problem(
            "SR-RNG-SAME",
            f"ranks {lead} and {rank} hold different parts of a replica, but their {_words(name)} have the same state",
            Severity.ERROR if before.peers_differ else Severity.WARNING,
            where={"rank": rank, "key": name},
            expected="two states, as in the control" if before.peers_differ else "two states",
            found="one state",
            hint="tensor-parallel ranks must draw masks of their own for the parts that only they hold",
        )


def _words(name: str) -> str:
    if name == "torch":
        return "generators"
    return f"{name.removeprefix(TRACKER)} generators" + (" of Megatron's tracker" if name.startswith(TRACKER) else "")


class _Streams:
    """How one generator's states on the ranks of one job relate.

    `agree`: whether all tensor-parallel ranks of a place have one state; `peers_differ`: whether all have states of
    their own; `differ`: whether all batch replicas have states of their own. None where there are no two such ranks.
    `parted`, `paired` and `doubled` are the first pair of ranks for which it is not so.
    """

    def __init__(self, layout: Layout | None, by_rank: Mapping[str, str]) -> None:
        digests: dict[int, str] = {int(rank): digest for rank, digest in by_rank.items()}
        places: dict[tuple[int, ...], dict[str, int]] = {}
        leads: dict[str, int] = {}
        self.parted = self.paired = self.doubled = None
        has_peers = has_replicas = False
        if layout is None or len(digests) != layout.world_size:
            digests, layout = {}, Layout()
        for rank in sorted(digests):
            at = layout.coordinate(rank)
            peers = places.setdefault((layout.batch_replica(rank), at["pp"], at["cp"]), {})
            if peers:
                has_peers = True
                if digests[rank] in peers:
                    self.paired = self.paired or (peers[digests[rank]], rank)
                if (lead := min(peers.values())) != peers.get(digests[rank]):
                    self.parted = self.parted or (lead, rank)
            elif at["pp"] == at["cp"] == 0:
                other = leads.setdefault(digests[rank], rank)
                has_replicas = has_replicas or rank != 0
                if other != rank:
                    self.doubled = self.doubled or (other, rank)
            peers.setdefault(digests[rank], rank)
        self.agree = self.parted is None if has_peers else None
        self.peers_differ = self.paired is None if has_peers else None
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
    whom none is left although the checkpoint has states. SR-RNG-SAME: two replicas with one stream, or tensor-parallel
    ranks with one stream of Megatron's `model-parallel-rng`. SR-RNG-AGREE: tensor-parallel ranks of one replica with
    two streams of its `data-parallel-rng`.
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
    layout = _layout_of(found)
    return [*problems, *_check_shared(records, layout), *_check_tracked(records, layout)]


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


def _check_tracked(records: Mapping[int, Any], layout: Layout | None) -> Iterator[Problem]:
    """Compares the streams of the tracker's generators between tensor-parallel ranks, which hold one activation whole
    in places and a part each in others."""
    peers: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(records):
        if layout is not None and rank < layout.world_size and records[rank].get("tracker"):
            at = layout.coordinate(rank)
            peers.setdefault((layout.batch_replica(rank), at["pp"], at["cp"]), []).append(rank)
    for lead, *others in peers.values():
        for rank in others:
            one, two = ((records[item]["tracker"]) for item in (lead, rank))
            if one.get(MODEL_PARALLEL, 0) == two.get(MODEL_PARALLEL, 1):
                yield _tracked("SR-RNG-SAME", rank, MODEL_PARALLEL, "were given the same stream", two)
                return
            if one.get(DATA_PARALLEL) != two.get(DATA_PARALLEL):
                yield _tracked("SR-RNG-AGREE", rank, DATA_PARALLEL, "were given different streams", two)
                return


def _tracked(code: str, rank: int, name: str, what: str, found: Mapping[str, int]) -> Problem:
    hint = "pass tracker=tracker_streams(layout, rank): Megatron's own rule (samerun.core.generators)"
    text = f"tensor-parallel ranks {what} of the tracker's {name}"
    return Problem(code, text, where={"rank": rank, "key": TRACKER + name}, found=found.get(name), hint=hint)


def _policy(message: str, expected: Any, found: Any, rank: int) -> Problem:
    hint = "call apply_rank_rng once on every rank, after loading, with the update that the checkpoint holds"
    return Problem("SR-RNG-POLICY", message, where={"rank": rank}, expected=expected, found=found, hint=hint)

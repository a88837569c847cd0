"""What a job was found to hold, as values: one fact per tensor, and the whole captured state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samerun.core.digest import state_digest
from samerun.core.mesh import Layout


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a tensor: the lowest rank that holds part of it, its digest, and its value if it is a counter."""

    lead: int
    digest: str
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFact:
    """What the job holds under one key. Shapes and counts are global, in elements.

    `digest` is that of most replicas (of the one with the lowest rank on a tie); `odd` lists the replicas that
    disagree with it. `nonfinite` and `nonzero` count elements of the worst and the fullest replica. `missing_elements`
    is above 0 if the ranks together do not hold the whole tensor. `cuts` lists how it is cut up, as [mesh axis,
    dimension, strided] in the order of the cuts: empty if every rank holds it whole, None if the mesh has no names.
    `lead` is the lowest rank that holds part of it. `unordered` is a sum over the elements that their places do not
    change, of the same replica as `digest`: it tells values in wrong places from wrong values.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    replicas: int
    odd: tuple[Replica, ...]
    nonfinite: int
    nonzero: int
    missing_elements: int
    trainable: bool | None
    aliases: tuple[str, ...]
    cuts: Sequence[Sequence[Any]] | None = None
    lead: int = 0
    unordered: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form; what is as it should be is left out."""
        body: dict[str, Any] = {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "digest": self.digest,
            "replicas": self.replicas,
            "nonfinite": self.nonfinite,
            "nonzero": self.nonzero,
        }
        if self.unordered is not None:
            body["unordered"] = self.unordered
        if self.odd:
            body["odd"] = [{"rank": replica.lead, "digest": replica.digest} for replica in self.odd]
        if self.missing_elements:
            body["missing_elements"] = self.missing_elements
        if self.trainable is not None:
            body["trainable"] = self.trainable
        if self.aliases:
            body["aliases"] = list(self.aliases)
        if self.cuts is not None:
            body["cuts"] = [list(cut) for cut in self.cuts]
        if self.lead:
            body["lead"] = self.lead
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """Everything that `capture_state` saw, the same on every rank.

    `generators` has the digest of each rank's random number generators, by generator, then rank.
    """

    layout: Layout | None
    world_size: int
    tensors: Mapping[str, TensorFact]
    counters: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]
    learning_rates: Sequence[float]
    scheduler: Any
    objects: Mapping[str, Any]
    config: Any
    generators: Mapping[str, Mapping[str, str]]
    rank_rng: Mapping[str, Any]
    broken_ties: Sequence[Sequence[str]]
    disagreements: Sequence[Mapping[str, Any]] = field(default_factory=tuple[Mapping[str, Any], ...])

    @property
    def digests(self) -> dict[str, str]:
        """Each tensor's digest by key."""
        return {key: fact.digest for key, fact in self.tensors.items()}

    def to_json(self) -> dict[str, Any]:
        """Returns the body of a trace's "state" line."""
        return {
            "world_size": self.world_size,
            "layout": self.layout.to_dict(short=True) if self.layout else None,
            "state": state_digest(self.digests),
            "tensors": {key: fact.to_json() for key, fact in self.tensors.items()},
            "counters": {key: dict(body) for key, body in self.counters.items()},
            "groups": [dict(group) for group in self.groups],
            "optimizers": [dict(body) for body in self.optimizers],
            "learning_rates": list(self.learning_rates),
            "scheduler": self.scheduler,
            "objects": dict(self.objects),
            "config": self.config,
            "rng": dict(self.generators.get("torch", {})),
            "generators": {name: dict(ranks) for name, ranks in self.generators.items() if name != "torch"},
            **({"rank_rng": dict(self.rank_rng)} if self.rank_rng else {}),
            "broken_ties": [list(names) for names in self.broken_ties],
            "disagreements": [dict(body) for body in self.disagreements],
        }

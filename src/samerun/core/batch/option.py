"""One way to go on with a global batch, what it needs, and what a changed batch does to the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from samerun.core.batch.dealing import Dealing

Kind = Literal["uniform", "ragged", "fewer-replicas", "changed-batch"]
Unit = Literal["samples", "tokens"]
Policy = Literal["keep", "linear", "square-root"]

WEIGHTED_NORMALISATION = "weighted-normalisation"
"""The loss must be a sum over contributions divided by the update's global total, not a mean of means."""
EMPTY_MICROBATCHES = "empty-microbatches"
"""Some replica has a pass without a sample, in which it must still run forward and backward, at zero weight."""
IDLE_REPLICAS = "idle-replicas"
"""The job must be launched on fewer replicas than are there."""
LEARNING_RATE_POLICY = "learning-rate-policy"
"""Somebody must say what happens to the learning rate; the run is labelled an intentional change."""
MEASURED_TOKENS = "measured-token-counts"
"""The valid tokens of each sample must be known before whole samples can be put into these token budgets."""


@dataclass(frozen=True, slots=True)
class LearningRateChoice:
    """What each policy would multiply every learning rate by when the global batch changes. None is chosen here."""

    linear: float
    square_root: float
    keep: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the factors by policy name; `policy` is null because it is the user's to choose."""
        return {"policy": None, "keep": self.keep, "linear": self.linear, "square-root": self.square_root}


def learning_rate_factor(policy: Policy, old_batch: int, new_batch: int) -> float:
    """Returns what `policy` multiplies the learning rate by when the global batch goes from `old_batch` to `new_batch`.

    `linear` keeps learning rate / batch (Goyal et al. 2017, arXiv:1706.02677), `square-root` keeps learning
    rate / sqrt(batch), usual for adaptive optimizers (Malladi et al. 2022, arXiv:2205.10287), `keep` changes nothing.
    """
    match policy:
        case "keep":
            return 1.0
        case "linear":
            return new_batch / old_batch
        case "square-root":
            return math.sqrt(new_batch / old_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOption:
    """One way to go on.

    `exact` says that every update contributes the very samples that it would have at the source, and nothing else.
    `max_microbatch` is the largest microbatch that occurs; `deal(global_batch, replicas, max_microbatch)` gives
    `dealing` back. `utilisation` is the part of the sample slots that hold a sample:
    `global_batch / (passes x (replicas + idle_replicas) x the largest microbatch allowed)`. `needs` names what must
    hold for the option to be what it claims. `reason` says why the option is listed.
    """

    kind: Kind
    dealing: Dealing
    exact: bool
    idle_replicas: int
    utilisation: float
    needs: tuple[str, ...] = ()
    learning_rate: LearningRateChoice | None = None
    reason: str = ""

    @property
    def global_batch(self) -> int:
        """Samples (or budgeted tokens) per update."""
        return self.dealing.global_batch

    @property
    def replicas(self) -> int:
        """Batch replicas that work."""
        return self.dealing.replicas

    @property
    def passes(self) -> int:
        """Forward-backward passes per update."""
        return self.dealing.passes

    @property
    def max_microbatch(self) -> int:
        """The largest microbatch that occurs."""
        return self.dealing.max_microbatch

    def to_json(self) -> dict[str, Any]:
        """Returns the option as `samerun batch --json` lists it."""
        return {
            "kind": self.kind,
            "replicas": self.replicas,
            "passes": self.passes,
            "global_batch": self.global_batch,
            "exact": self.exact,
            "max_microbatch": self.max_microbatch,
            "microbatches": self.dealing.to_json(),
            "idle_replicas": self.idle_replicas,
            "utilisation": self.utilisation,
            "needs": list(self.needs),
            "learning_rate": self.learning_rate.to_json() if self.learning_rate else None,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `to_json` back."""
        rates = body["learning_rate"]
        return cls(
            kind=body["kind"],
            dealing=Dealing.from_json(body["microbatches"]),
            exact=body["exact"],
            idle_replicas=body["idle_replicas"],
            utilisation=body["utilisation"],
            needs=tuple(body["needs"]),
            learning_rate=LearningRateChoice(rates["linear"], rates["square-root"]) if rates else None,
            reason=body.get("reason", ""),
        )

"""Whole samples dealt by their measured numbers of valid tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samerun.errors import Problem, UsageError


@dataclass(frozen=True, slots=True)
class TokenDealing:
    """How one update's samples are dealt when passes are bounded by tokens.

    `positions[pass][replica]` are places in the update's global batch (0-based, increasing), `tokens[pass][replica]`
    the valid tokens in them. Every place occurs once. The update is the same update as ever: which samples it has was
    settled before, this only says who computes what. Passes are equal in number and unequal in size, so the loss needs
    weighted normalisation.
    """

    positions: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def passes(self) -> int:
        """Forward-backward passes, the same on every replica."""
        return len(self.positions)

    @property
    def replicas(self) -> int:
        """Batch replicas that the update is dealt to."""
        return len(self.positions[0])

    def replica_positions(self, replica: int) -> tuple[tuple[int, ...], ...]:
        """Returns the places in the update that `replica` takes, by pass."""
        return tuple(row[replica] for row in self.positions)

    @property
    def num_tokens(self) -> int:
        """Valid tokens of the update."""
        return sum(map(sum, self.tokens))

    @property
    def max_tokens(self) -> int:
        """The most tokens in one pass of one replica."""
        return max(map(max, self.tokens))

    @property
    def num_empty(self) -> int:
        """Passes of single replicas without a sample, at zero weight."""
        return sum(not cell for row in self.positions for cell in row)

    def utilisation(self, max_tokens: int) -> float:
        """Returns the part of the token slots (`passes x replicas x max_tokens`) that hold a token."""
        return self.num_tokens / (self.passes * len(self.positions[0]) * max_tokens)

    def to_json(self) -> dict[str, Any]:
        """Returns both tables as lists."""
        positions = [[list(cell) for cell in row] for row in self.positions]
        return {"positions": positions, "tokens": [list(row) for row in self.tokens]}


def deal_tokens(lengths: Sequence[int], replicas: int, max_tokens: int) -> TokenDealing:
    """Deals one update's samples so that replicas have nearly equal tokens and no pass has more than `max_tokens`.

    Deterministic and without communication: longest sample first to the replica that has the fewest tokens (Graham's
    longest-processing-time rule, at most 4/3 of the best possible largest share), then each replica's samples into as
    few passes as first-fit decreasing needs. All replicas make as many passes as the one that needs most.

    Args:
        lengths: valid tokens of each sample of the update, measured, in the global order.
        replicas: batch replicas.
        max_tokens: most tokens in one pass of one replica.

    Raises:
        UsageError: for arguments that make no sense, or a sample longer than `max_tokens` (SR-BATCH-INVALID).
    """
    if not lengths or replicas < 1 or max_tokens < 1 or min(lengths) < 0 or max(lengths) > max_tokens:
        raise UsageError(
            Problem(
                "SR-BATCH-INVALID",
                "these samples cannot be dealt by tokens",
                expected=f"at least one sample and replica, no sample above {max_tokens} tokens",
                found=f"{len(lengths)} samples, the longest of {max(lengths, default=0)}, {replicas} replicas",
                hint="raise the tokens per pass to the longest sample; samples are never cut here",
            )
        )
    passes: list[list[list[int]]] = [[] for _ in range(replicas)]
    room: list[list[int]] = [[] for _ in range(replicas)]
    shares = [0] * replicas
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        replica = min(range(replicas), key=lambda each: (shares[each], each))
        shares[replica] += lengths[place]
        free = next((n for n, left in enumerate(room[replica]) if left >= lengths[place]), None)
        if free is None:
            free = len(room[replica])
            passes[replica].append([])
            room[replica].append(max_tokens)
        passes[replica][free].append(place)
        room[replica][free] -= lengths[place]
    count = max(map(len, passes))
    cells = [[tuple(sorted(mine[n])) if n < len(mine) else () for mine in passes] for n in range(count)]
    return TokenDealing(
        tuple(map(tuple, cells)), tuple(tuple(sum(lengths[place] for place in cell) for cell in row) for row in cells)
    )

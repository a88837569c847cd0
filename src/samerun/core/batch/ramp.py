"""A global batch that grows: how large it is after so many samples, and where on it an update lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from samerun.errors import Problem, Severity


@dataclass(frozen=True, slots=True)
class RampUp:
    """Megatron's `--rampup-batch-size start increment samples` up to `final` (core 0.13 to 0.19).

    The batch is `start` plus `increment` for every `over_samples / ((final - start) / increment)` samples consumed,
    and `final` beyond `over_samples`. So it is a function of committed samples, never of updates: a conversion that
    multiplies updates by the final batch is wrong (`samples_after`).

    >>> ramp = RampUp(start=4, increment=4, over_samples=60, final=16)
    >>> tuple(ramp.batch_at(samples) for samples in (0, 19, 20, 59, 61))
    (4, 4, 8, 12, 16)
    """

    start: int
    increment: int
    over_samples: int
    final: int

    def __post_init__(self) -> None:
        if min(self.start, self.increment, self.final) < 1 or self.over_samples < 0:
            raise ValueError(f"a ramp-up counts in whole samples of at least 1: {self}")
        if self.final < self.start or (self.final - self.start) % self.increment:
            raise ValueError(f"the final batch must lie a whole number of increments above the first: {self}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch that occurs, growing."""
        return tuple(range(self.start, self.final + 1, self.increment))

    def batch_at(self, samples: int) -> int:
        """Returns the global batch of the update that begins after `samples` committed samples."""
        if samples > self.over_samples or self.final == self.start or not self.over_samples:
            return self.final
        steps = samples * ((self.final - self.start) // self.increment) // self.over_samples
        return min(self.start + steps * self.increment, self.final)

    def samples_after(self, updates: int) -> int:
        """Returns the samples consumed by the first `updates` updates. Takes a step per update within the ramp only."""
        done, samples = 0, 0
        while done < updates and (batch := self.batch_at(samples)) != self.final:
            done, samples = done + 1, samples + batch
        return samples + (updates - done) * self.final

    def updates_after(self, samples: int) -> int | None:
        """Returns after how many updates exactly `samples` are consumed, or None: no update ends there."""
        done, at = 0, 0
        while at < samples and (batch := self.batch_at(at)) != self.final:
            done, at = done + 1, at + batch
        whole, rest = divmod(samples - at, self.final)
        return None if rest or whole < 0 else done + whole


def check_ramp(ramp: RampUp, replicas: int, max_microbatch: int, samples: int = 0) -> Iterator[Problem]:
    """Yields SR-BATCH-RAMP for sizes still to come that `replicas` do not deal in equal microbatches of that size.

    Megatron asserts that each of them divides; with uneven dealing it is a matter of weighted normalisation.
    """
    step = replicas * max_microbatch
    uneven = [size for size in ramp.sizes if size >= ramp.batch_at(samples) and size % step]
    if uneven:
        yield Problem(
            "SR-BATCH-RAMP",
            f"{len(uneven)} of the ramp's batches cannot be dealt to {replicas} replicas in equal microbatches",
            severity=Severity.WARNING,
            expected=f"multiples of {step}",
            found=", ".join(map(str, uneven[:8])),
            hint="deal them raggedly with weighted normalisation, or choose a microbatch that divides every size",
        )

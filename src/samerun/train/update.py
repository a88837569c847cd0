"""One update as a training loop sees it: its passes, its samples, and how it goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.batch import Dealing, TokenDealing
from samerun.core.order import Ids
from samerun.core.progress import UpdateSpan
from samerun.errors import Problem, UsageError


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one pass of one replica works on.

    `ids` are the samples that count, in order. `batch` is what the loader made of them; when `ids` is empty it is what
    the loader made of `[]` or of a placeholder, and must contribute zero.
    """

    batch: Any
    ids: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """Samples that count."""
        return len(self.ids)

    @property
    def is_empty(self) -> bool:
        """Whether the pass runs only so that collectives match."""
        return not self.ids


@dataclass(slots=True)
class Phase:
    """How many passes of an update were taken. The sampler keeps this, and not the update, which holds the loader."""

    passes_taken: int = 0


class Update:
    """One update of one replica: iterate it once for its `passes` microbatches.

    Attributes:
        number: the update's 1-based index, which it has once it is committed.
        num_samples: samples over all replicas.
        dealing: how they are dealt, by samples or by tokens; `dealing.passes` is the number of passes.
        ids: this replica's sample ids by pass.
        epoch: the epoch in which the update ends.
        phase: how many of its passes were taken.
    """

    def __init__(
        self,
        number: int,
        span: UpdateSpan,
        dealing: Dealing | TokenDealing,
        ids: Sequence[Ids],
        stream: Iterator[Any],
    ) -> None:
        self.number = number
        self.num_samples = span.num_samples
        self.epoch = span.spans[-1].epoch
        self.dealing = dealing
        self.ids = tuple(tuple(part.tolist()) for part in ids)
        self._stream = stream
        self.phase = Phase()

    @property
    def passes(self) -> int:
        """Passes of this update, the same on every replica."""
        return self.dealing.passes

    @property
    def sample_ids(self) -> list[int]:
        """This replica's ids over all passes, in order; what `Recorder.record(sample_ids=...)` wants."""
        return [sample for part in self.ids for sample in part]

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        if self.phase.passes_taken == self.passes:
            raise StopIteration
        self.phase.passes_taken += 1
        try:
            batch = next(self._stream)
        except StopIteration:
            raise UsageError(
                Problem(
                    "SR-ORDER-LOADER",
                    "the loader ended before the epoch did",
                    where={"update": self.number},
                    hint="give `updates` a DataLoader with batch_sampler=sampler and nothing that shortens it",
                )
            ) from None
        return Microbatch(batch, self.ids[self.phase.passes_taken - 1])

    @property
    def passes_left(self) -> int:
        """Microbatches not yet taken."""
        return self.passes - self.phase.passes_taken


def uncommitted(number: int) -> Problem:
    return Problem(
        "SR-ORDER-UNCOMMITTED",
        "the loop asks for another update but has not committed this one",
        where={"update": number},
        hint="call sampler.commit(tokens=...) on every rank after each optimizer step, also after a skipped one",
    )


def early_commit(update: Update) -> Problem:
    return Problem(
        "SR-ORDER-PASSES",
        "the update was committed before all of its passes had run",
        where={"update": update.number},
        expected=f"{update.passes} passes",
        found=f"{update.passes - update.passes_left}",
        hint="iterate the whole update; every replica must make the same number of passes",
    )

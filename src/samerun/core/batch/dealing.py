"""One global batch dealt to replicas and passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from samerun.errors import Problem, UsageError

MAX_CELLS = 4_000_000
"""Most cells (passes x replicas) that one dealing may have; more is a slip of the keyboard, not a batch."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """How one global batch is dealt: `microbatches[pass][replica]` samples.

    The global batch is a slice of the global order. Each pass takes the next contiguous part of it and deals that part
    like cards, one sample to each replica in turn that still has room. With equal microbatches this is exactly which
    ids `torch.utils.data.DistributedSampler` gives to each rank, pass by pass.

    >>> Dealing(((2, 2, 1), (1, 1, 1))).positions(0, 1)
    range(1, 5, 3)
    """

    microbatches: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = self.microbatches
        if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            raise ValueError(f"every pass needs one microbatch per replica, and there is at least one of each: {rows}")
        if bad := [cell for row in set(rows) for cell in row if not is_count(cell)]:
            raise ValueError(f"microbatch sizes are whole numbers of at least 0, not {bad}")
        if not self.global_batch:
            raise ValueError("a dealing holds at least one sample")

    @property
    def passes(self) -> int:
        """Forward-backward passes per update, the same on every replica."""
        return len(self.microbatches)

    @property
    def replicas(self) -> int:
        """Batch replicas that the batch is dealt to."""
        return len(self.microbatches[0])

    @property
    def global_batch(self) -> int:
        """Samples per update over all replicas and passes."""
        return sum(map(sum, self.microbatches))

    @property
    def max_microbatch(self) -> int:
        """The largest microbatch that occurs, which is what activation memory must hold."""
        return max(map(max, self.microbatches))

    @property
    def is_uniform(self) -> bool:
        """Whether every replica has the same number of samples in every pass."""
        return min(map(min, self.microbatches)) == self.max_microbatch

    @property
    def num_empty(self) -> int:
        """Microbatches without a sample, over all passes and replicas."""
        return sum(row.count(0) for row in self.microbatches)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per update of each replica."""
        return tuple(map(sum, zip(*self.microbatches, strict=True)))

    def share(self, replica: int) -> int:
        """Returns the samples per update of `replica`."""
        return sum(row[replica] for row in self.microbatches)

    def positions(self, pass_index: int, replica: int) -> Sequence[int]:
        """Returns which positions of the global batch (0-based) `replica` takes in pass `pass_index`.

        A `range` whenever they are equally spaced, which those of `deal` always are; else a tuple.
        """
        return _positions(sum(map(sum, self.microbatches[:pass_index])), self.microbatches[pass_index], replica)

    def replica_positions(self, replica: int) -> tuple[Sequence[int], ...]:
        """Returns `positions` of every pass of `replica`, in one sweep."""
        start, found = 0, list[Sequence[int]]()
        for row in self.microbatches:
            found.append(_positions(start, row, replica))
            start += sum(row)
        return tuple(found)

    def to_json(self) -> list[list[int]]:
        """Returns `[pass][replica]` as lists."""
        return [list(row) for row in self.microbatches]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Reads `to_json` back. Raises ValueError if it is no dealing."""
        return cls(tuple(map(tuple, rows)))


def is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positions(start: int, row: Sequence[int], replica: int) -> Sequence[int]:
    count, replicas = row[replica], len(row)
    if all(size >= count for size in row[:replica]) and all(size >= count - 1 for size in row[replica + 1 :]):
        return range(start + replica, start + replica + replicas * (count - 1) + 1, replicas) if count else range(0)
    before = (sum(min(size, turn + (other < replica)) for other, size in enumerate(row)) for turn in range(count))
    return tuple(start + position for position in before)


def deal(global_batch: int, replicas: int, max_microbatch: int) -> Dealing:
    """Returns the most even dealing in the fewest passes that microbatches of at most `max_microbatch` allow.

    Shares differ by at most one sample (the first replicas have the larger ones), each share is spread over the passes
    as evenly as it goes, every replica makes the same number of passes. A microbatch is empty only where that cannot
    be avoided: fewer samples than replicas, or microbatches of one sample whose number the replicas do not divide.

    Dealing a returned `Dealing` again with its own `global_batch`, `replicas` and `max_microbatch` gives it back, so
    these three numbers are all that a job needs to be told.

    >>> deal(7, 3, 2).microbatches
    ((2, 1, 1), (1, 1, 1))

    Raises:
        UsageError: naming every argument that makes no sense (SR-BATCH-INVALID, SR-BATCH-HUGE).
    """
    if problems := [*check_counts(global_batch, replicas, max_microbatch)]:
        raise UsageError(problems)
    share, larger = divmod(global_batch, replicas)
    passes = -(-(share + bool(larger)) // max_microbatch)

    def size(samples: int, pass_index: int) -> int:
        each, extra = divmod(samples, passes)
        return each + (pass_index < extra)

    return Dealing(
        tuple((size(share + 1, p),) * larger + (size(share, p),) * (replicas - larger) for p in range(passes))
    )


def check_counts(global_batch: int, replicas: int, max_microbatch: int) -> Iterator[Problem]:
    values = {"global batch": global_batch, "replicas": replicas, "max microbatch": max_microbatch}
    wrong = [invalid(name, value) for name, value in values.items() if not is_count(value, 1)]
    yield from wrong
    if not wrong and (cells := -(-global_batch // (replicas * max_microbatch)) * replicas) > MAX_CELLS:
        yield Problem(
            "SR-BATCH-HUGE",
            f"{global_batch} dealt to {replicas} replicas, at most {max_microbatch} at a time: {cells} microbatches",
            hint="raise the largest microbatch, or check the global batch: is it samples, not tokens?",
            expected=f"at most {MAX_CELLS}",
            found=cells,
        )


def invalid(name: str, value: Any, expected: str = "a whole number of at least 1") -> Problem:
    return Problem("SR-BATCH-INVALID", f"{name} cannot be {value!r}", expected=expected, found=repr(value))

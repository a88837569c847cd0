"""The orders of Megatron-LM's pretraining samplers, as `--dataloader-type single` and `cyclic` build them.

Derived from `megatron/training/datasets/data_samplers.py` (Megatron-LM main of August 2026, the same rules as in core
0.13 to 0.19), and compared with ids that this file emitted (`tests/golden/order`).

Both samplers know one number of the past, `consumed_train_samples`, and take the data-parallel size from the job at
hand. The sequential one means the same samples by it at any size. The cyclic one does not: with `data_sharding` (the
default) every rank shuffles a bucket of its own, so what the first `c` samples of an epoch *are* depends on the number
of ranks and on the microbatch. Megatron itself, resumed at another size, goes on at the same count of another order.
Here the order of the size at which the epoch began is kept, and dealt to any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samerun.core.order import Ids, require_span
from samerun.core.orders.randperm import Draw, torch_randperm
from samerun.errors import Problem, Severity


@dataclass(frozen=True, slots=True)
class MegatronSequentialOrder:
    """`MegatronPretrainingSampler`: ids 0, 1, 2, ... of one pass over the data set. Independent of the ranks.

    Each microbatch step takes the next `micro_batch_size * data_parallel_size` ids and gives rank r the r-th contiguous
    part. With `drop_last` (the default) the last short step is dropped, which is why those two sizes count at the end.
    The GPT data set repeats its documents inside its own index; the sampler sees a single epoch. It is repeated here so
    that the order never ends, as `cyclic_iter` would.
    """

    length: int
    micro_batch_size: int = 1
    data_parallel_size: int = 1
    drop_last: bool = True

    def __post_init__(self) -> None:
        _require_sizes(self.length, self.micro_batch_size, self.data_parallel_size)
        if not self.num_samples(0):
            raise ValueError(f"dropping the tail leaves no sample in an epoch: {self}")

    def num_samples(self, epoch: int) -> int:
        """Returns the number of samples that are handed out, the same in every epoch."""
        step = self.micro_batch_size * self.data_parallel_size
        return self.length - self.length % step if self.drop_last else self.length

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the positions themselves."""
        require_span(start, stop, self.num_samples(epoch))
        return np.arange(start, stop, dtype=np.int64)

    def identity(self) -> dict[str, Any]:
        """Returns the kind and what decides how many samples there are."""
        return {"kind": "megatron-sequential", "num_samples": self.num_samples(0)}


@dataclass(frozen=True, slots=True)
class MegatronCyclicOrder:
    """`MegatronPretrainingRandomSampler` at the data-parallel size and microbatch under which it ran.

    Position `p` of an epoch belongs to microbatch step `p // (micro * dp)`; within a step the ranks come one after the
    other, each with its whole microbatch. So the first `consumed_train_samples % num_samples` positions are exactly
    what all ranks have consumed of the epoch. Epoch e is drawn with seed e: Megatron's sampler ignores `--seed`.

    With `data_sharding`, rank r owns ids r * bucket .. (r + 1) * bucket - 1 for a bucket of
    `length // (micro * dp) * micro`, and all ranks walk one permutation of the bucket. Without, the ranks take turns
    in one permutation of `length // micro * micro`.
    """

    length: int
    micro_batch_size: int
    data_parallel_size: int
    data_sharding: bool = True
    draw: Draw = field(default=torch_randperm, compare=False, repr=False)

    def __post_init__(self) -> None:
        _require_sizes(self.length, self.micro_batch_size, self.data_parallel_size)
        if not self.num_samples(0):
            raise ValueError(f"an epoch has no whole step: {self}")

    def num_samples(self, epoch: int) -> int:
        """Returns the samples in the whole steps of an epoch; the rest is never seen."""
        return self.length - self.length % (self.micro_batch_size * self.data_parallel_size)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the ids at positions start..stop-1."""
        require_span(start, stop, self.num_samples(epoch))
        position = np.arange(start, stop, dtype=np.int64)
        step, within = np.divmod(position, self.micro_batch_size * self.data_parallel_size)
        rank, place = np.divmod(within, self.micro_batch_size)
        of_rank = step * self.micro_batch_size + place
        if self.data_sharding:
            bucket = self.num_samples(epoch) // self.data_parallel_size
            return rank * bucket + self.draw(bucket, epoch)[of_rank]
        whole = self.length // self.micro_batch_size * self.micro_batch_size
        return self.draw(whole, epoch)[of_rank * self.data_parallel_size + rank]

    def identity(self) -> dict[str, Any]:
        """Returns the four arguments that decide the order."""
        return {
            "kind": "megatron-cyclic",
            "num_samples": self.length,
            "micro_batch_size": self.micro_batch_size,
            "data_parallel_size": self.data_parallel_size,
            "data_sharding": self.data_sharding,
        }


def check_cyclic(order: MegatronCyclicOrder) -> Iterator[Problem]:
    """Yields SR-ORDER-RAGGED where Megatron's own ranks would leave the epoch at different steps.

    Without data sharding the permutation is longer than the whole steps are, and ranks r = 0, 1, ... may still fill a
    microbatch from what is left while the last rank cannot. They take it, count it as consumed, and begin the next
    epoch one step late, with the next seed.
    """
    if order.data_sharding:
        return
    micro, ranks = order.micro_batch_size, order.data_parallel_size
    left = order.length // micro * micro - order.num_samples(0)
    ahead = [rank for rank in range(ranks) if len(range(rank, left, ranks)) >= micro]
    if ahead:
        yield Problem(
            "SR-ORDER-RAGGED",
            f"{len(ahead)} of {ranks} ranks find one more microbatch in every epoch than the others",
            severity=Severity.WARNING,
            where={"rank": ahead[0]},
            expected=f"{order.num_samples(0)} samples per epoch on whole steps",
            found=f"{left} more samples, dealt to ranks {ahead[0]} to {ahead[-1]} only",
            hint="from the second epoch on, these ranks are another step and another seed along than the rest; the "
            "order holds within the first epoch only. Use data sharding, or a length that micro x dp divides",
        )


def _require_sizes(*sizes: int) -> None:
    if any(size < 1 for size in sizes):
        raise ValueError(f"length, micro_batch_size and data_parallel_size are at least 1, not {sizes}")

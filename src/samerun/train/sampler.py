"""The sampler whose only state is how many samples of a global order are committed.

In a training loop, with any DataLoader (workers, prefetch, persistent workers, pinned memory):

    sampler = ElasticSampler(len(dataset), global_batch=32, replicas=3, replica=r, max_microbatch=2, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    for update in sampler.updates(loader, until=total_updates):     # over as many epochs as it takes
        for microbatch in update:                                   # update.passes of them, the same on every replica
            ...                                                     # microbatch.batch is what the loader collated
        optimizer.step()
        sampler.commit(tokens=...)

`updates` insists on the commit: a position that nobody advances would give the same samples again. The position moves
at `commit` and never when the loader reads ahead, so whatever was prefetched and not committed is issued again after a
restart. Save `sampler.state_dict()` (or the sampler itself: it is a DCP `Stateful`) between a commit and the next
update, and load it on any number of replicas.

A loop that counts for itself may leave `updates` out: the sampler, iterated, yields the microbatches of the rest of the
epoch; `sampler.passes` of them make the current update, and `commit` ends it.

Every replica makes the same number of passes, so that collectives match. Where samples do not reach (the last update of
an epoch, or microbatches of one sample that the replicas do not divide) a microbatch is empty: `microbatch.is_empty`.
Such a pass must still run forward and backward, at zero weight. With `empty="list"` the loader's `collate_fn` is given
`[]` and may build a batch of the right shape without a valid token; with `empty="placeholder"` it is given one real
sample of the same update, no `collate_fn` needs to know, and the loop multiplies that pass's loss by zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch.utils.data import Sampler

from samerun.core.batch import Dealing, RampUp, deal
from samerun.core.mesh import Layout
from samerun.core.order import GlobalOrder
from samerun.core.orders.distributed import DistributedSamplerOrder
from samerun.core.orders.randperm import Draw
from samerun.core.progress import Committed, LastBatch, UpdateSpan, next_update, seek
from samerun.errors import Problem, UsageError
from samerun.train.committed import CommittedSampler
from samerun.train.draw import torch_draw
from samerun.train.sampler_checks import (
    Empty,
    check_choices,
    check_dealing,
    check_final,
    check_order_arguments,
    require_some_update,
)
from samerun.train.update import Microbatch, Update

__all__ = ["ElasticSampler", "Microbatch", "TorchDistributedOrder", "Update"]


@dataclass(frozen=True, slots=True)
class TorchDistributedOrder(DistributedSamplerOrder):
    """`DistributedSamplerOrder` with the permutations drawn by torch itself: same ids, faster."""

    draw: Draw = field(default=torch_draw, compare=False, repr=False)


class EndlessBatches(Sampler[list[int]]):
    """What `ElasticSampler.endless` returns: its microbatches from the committed position on, without a length."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.all_microbatches()


class ElasticSampler(CommittedSampler):
    """Batch sampler that deals a global order to any number of batch replicas; see the module's own description.

    Deterministic, without communication: every rank computes the same dealing from the same arguments and the same
    committed position. Tensor-, context- and pipeline-parallel ranks of one replica pass the same `replica`.

    Args:
        order: the global order, or a number of samples, which means `TorchDistributedOrder(order, seed, shuffle)`: the
            permutations of `DistributedSampler`, without padding.
        global_batch: samples per update over all replicas.
        replicas: batch replicas now (`Layout.batch_replicas`).
        replica: which one this is, 0-based (`Layout.batch_replica(rank)`).
        max_microbatch: most samples in one pass of one replica. The dealing is `deal(global_batch, replicas,
            max_microbatch)`, unless `dealing` says otherwise.
        dealing: another dealing of the same global batch to the same replicas.
        ramp: how the batch grows to `global_batch`, with committed samples; each size is dealt as `deal` does.
        seed: of the order, only with a number of samples; an order has its own.
        shuffle: likewise.
        last_batch: what happens at an epoch's end to samples that do not fill a global batch: `keep` (a smaller
            update), `drop` (no update), `carry` (the next epoch completes it).
        empty: what an empty microbatch is to the loader: `list` (`[]`) or `placeholder` (one sample of the update).

    Raises:
        UsageError: naming everything about the arguments that makes no sense.
    """

    def __init__(
        self,
        order: int | GlobalOrder,
        *,
        global_batch: int,
        replicas: int,
        replica: int,
        max_microbatch: int | None = None,
        dealing: Dealing | None = None,
        ramp: RampUp | None = None,
        seed: int = 0,
        shuffle: bool = True,
        last_batch: LastBatch = "keep",
        empty: Empty = "list",
    ) -> None:
        if max_microbatch is None and dealing is not None:
            max_microbatch = dealing.max_microbatch
        problems = check_choices(last_batch, empty)
        problems += check_dealing(global_batch, replicas, replica, max_microbatch, dealing)
        problems += check_order_arguments(order, seed, shuffle)
        problems += check_final(global_batch, ramp)
        if problems:
            raise UsageError(problems)
        super().__init__()
        self.order: GlobalOrder = TorchDistributedOrder(order, seed, shuffle) if isinstance(order, int) else order
        self.global_batch = global_batch
        self.ramp = ramp
        self.replicas = replicas
        self.replica = replica
        self.max_microbatch = max_microbatch or 1
        self.last_batch: LastBatch = last_batch
        self.empty: Empty = empty
        whole = dealing or deal(global_batch, replicas, self.max_microbatch)
        self._dealings = {global_batch: whole}
        self._positions = {global_batch: whole.replica_positions(replica)}
        require_some_update(self.order, global_batch, last_batch)

    @classmethod
    def from_layout(cls, layout: Layout, rank: int, order: int | GlobalOrder, **arguments: Any) -> Self:
        """Returns the sampler of `rank` in `layout`; other arguments as for the class."""
        return cls(order, replicas=layout.batch_replicas, replica=layout.batch_replica(rank), **arguments)

    @property
    def dealing(self) -> Dealing:
        """How a whole global batch is dealt."""
        return self._dealings[self.global_batch]

    @property
    def update_dealing(self) -> Dealing:
        """How the current update is dealt, that is the first one not committed: `dealing`, or a smaller last one."""
        return self._dealing(self._span().num_samples)

    def seek(self, num_updates: int) -> Committed:
        """Goes to where a run is after its first `num_updates` updates with this global batch, and returns it.

        For checkpoints of a run that saved no position, or used `DistributedSampler`; see `core.progress.seek`.
        """
        return self._go_to(seek(self.order, num_updates, self.global_batch, self.last_batch, ramp=self.ramp))

    def batch_at(self, committed: Committed) -> int:
        """Returns the global batch of the update after `committed`, where the epoch's end does not make it smaller."""
        return self.global_batch if self.ramp is None else self.ramp.batch_at(committed.samples)

    def endless(self) -> EndlessBatches:
        """Returns this sampler as a batch sampler without an end, for trainers that count updates by themselves.

        Such a trainer takes `dealing.passes` microbatches for every update, and the length of an epoch once, when it
        starts. So every update must be a whole global batch, and an epoch must have no length:

            loader = DataLoader(dataset, batch_sampler=sampler.endless(), num_workers=2)
            # gradient accumulation: sampler.dealing.passes; end of training: a number of updates

        Its iteration begins at the committed position and goes on over epochs. Commit after each update all the same.

        Raises:
            UsageError: with `last_batch="keep"`, whose last update of an epoch can be smaller, or while the batch grows
                (SR-ORDER-INVALID).
        """
        if self.ramp is not None and self.batch_at(self._committed) != self.global_batch:
            message = "an endless sampler makes equal updates only, and the batch is still growing"
            hint = "train with `updates` until the ramp is over"
            raise UsageError(Problem("SR-ORDER-INVALID", message, found=str(self.ramp), hint=hint))
        if self.last_batch == "keep":
            hint = "make the sampler with last_batch='carry' (every sample once) or 'drop'"
            message = "an endless sampler makes whole updates only"
            raise UsageError(Problem("SR-ORDER-INVALID", message, found="last_batch='keep'", hint=hint))
        return EndlessBatches(self)

    def __len__(self) -> int:
        """Microbatches that an iteration begun now yields: what is left of the epoch."""
        return sum(count * self._dealing(size).passes for size, count in self._left_in_epoch())

    def _left_in_epoch(self) -> list[tuple[int, int]]:
        """Sizes of the updates of an iteration begun now, each with how many have it."""
        if self.ramp is not None:
            return [(span.num_samples, 1) for _, span in self._spans(self._committed)]
        first = self._span()
        last = first.spans[-1]
        whole, rest = divmod(self.order.num_samples(last.epoch) - last.stop, self.global_batch)
        sizes = [(first.num_samples, 1), (self.global_batch, whole)]
        return [*sizes, (rest, 1)] if rest and self.last_batch == "keep" else sizes

    def _span(self, at: Committed | None = None) -> UpdateSpan:
        at = at or self._committed
        return next_update(self.order, at, self.batch_at(at), self.last_batch)

    def _dealing(self, num_samples: int) -> Dealing:
        if num_samples not in self._dealings:
            dealing = deal(num_samples, self.replicas, self.max_microbatch)
            self._dealings[num_samples] = dealing
            self._positions[num_samples] = dealing.replica_positions(self.replica)
        return self._dealings[num_samples]

    def _dealt(self, span: UpdateSpan) -> Dealing:
        return self._dealing(span.num_samples)

    def _parts(self, span: UpdateSpan) -> Sequence[Sequence[int]]:
        self._dealing(span.num_samples)
        return self._positions[span.num_samples]

    def _may_be_empty(self) -> bool:
        return any(self._dealing(size).num_empty for size, count in self._left_in_epoch() if count)

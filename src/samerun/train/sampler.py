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

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import Sampler, default_collate

from samerun.core.batch import Dealing, deal
from samerun.core.mesh import Layout
from samerun.core.order import GlobalOrder, Ids, check_order
from samerun.core.orders.distributed import DistributedSamplerOrder
from samerun.core.orders.randperm import Draw
from samerun.core.progress import (
    Committed,
    LastBatch,
    UpdateSpan,
    after,
    check_phase,
    next_update,
    replica_ids,
    seek,
)
from samerun.errors import FormatError, Problem, UsageError, VerificationError
from samerun.train.draw import torch_draw
from samerun.train.sampler_checks import (
    Empty,
    check_choices,
    check_dealing,
    check_order_arguments,
    require_own,
    require_some_update,
)
from samerun.train.update import Microbatch, Phase, Update, early_commit, uncommitted

__all__ = ["ElasticSampler", "Microbatch", "TorchDistributedOrder", "Update"]

SCHEMA = "samerun/sampler/1"


@dataclass(frozen=True, slots=True)
class TorchDistributedOrder(DistributedSamplerOrder):
    """`DistributedSamplerOrder` with the permutations drawn by torch itself: same ids, faster."""

    draw: Draw = field(default=torch_draw, compare=False, repr=False)


class ElasticSampler(Sampler[list[int]]):
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
        if problems:
            raise UsageError(problems)
        self.order: GlobalOrder = TorchDistributedOrder(order, seed, shuffle) if isinstance(order, int) else order
        self.global_batch = global_batch
        self.replicas = replicas
        self.replica = replica
        self.max_microbatch = max_microbatch or 1
        self.last_batch: LastBatch = last_batch
        self.empty: Empty = empty
        whole = dealing or deal(global_batch, replicas, self.max_microbatch)
        self._dealings = {global_batch: whole}
        self._positions = {global_batch: whole.replica_positions(replica)}
        self._committed = Committed()
        self._exhausted_at: Committed | None = None
        self._begin: torch.Tensor | None = None
        self._phase = Phase()
        require_some_update(self.order, global_batch, last_batch)

    @classmethod
    def from_layout(cls, layout: Layout, rank: int, order: int | GlobalOrder, **arguments: Any) -> Self:
        """Returns the sampler of `rank` in `layout`; other arguments as for the class."""
        return cls(order, replicas=layout.batch_replicas, replica=layout.batch_replica(rank), **arguments)

    @property
    def committed(self) -> Committed:
        """How far the run is; a save between two updates needs nothing else of the data."""
        return self._committed

    @property
    def dealing(self) -> Dealing:
        """How a whole global batch is dealt."""
        return self._dealings[self.global_batch]

    @property
    def update_dealing(self) -> Dealing:
        """How the current update is dealt, that is the first one not committed: `dealing`, or a smaller last one."""
        return self._dealing(self._span().num_samples)

    @property
    def passes(self) -> int:
        """Passes of the current update."""
        return self.update_dealing.passes

    def update_ids(self, replica: int | None = None) -> Ids:
        """Returns the current update's ids of this (or another) replica in the order of its passes, int64."""
        span = self._span()
        if replica is None or replica == self.replica:
            return np.concatenate(self._ids(span))
        return np.concatenate(replica_ids(span.ids(self.order), self._dealing(span.num_samples), replica))

    def global_ids(self) -> Ids:
        """Returns the current update's ids over all replicas, in the global order."""
        return self._span().ids(self.order)

    def commit(self, tokens: int | None = None, *, skipped: bool = False) -> Committed:
        """Says that the current update is done; call it on every rank once the optimizer has stepped.

        Args:
            tokens: the update's valid tokens over all replicas (`ContributionMean.total`), if the run counts them.
            skipped: the optimizer did not step (loss-scale overflow): the samples are consumed, the update is not
                counted.

        Returns:
            The new position.
        """
        self._committed = after(self._committed, self._span(), tokens=tokens, skipped=skipped)
        self._phase = Phase()
        return self._committed

    def seek(self, num_updates: int) -> Committed:
        """Goes to where a run is after its first `num_updates` updates with this global batch, and returns it.

        For checkpoints of a run that saved no position, or used `DistributedSampler`; see `core.progress.seek`.
        """
        return self._go_to(seek(self.order, num_updates, self.global_batch, self.last_batch))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the order's identity: equal on every rank, independent of their number.

        Within an update of `updates` it also tells how many of its passes were taken (`passes_taken`): loading it
        issues the update again from its first pass, with a warning.
        """
        taken = self._phase.passes_taken
        phase = {"passes_taken": taken} if taken else {}
        return {"schema": SCHEMA, **self._committed.to_json(), **phase, "order": self.order.identity()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a saved position. Iterators made before go on where they were: make a new one.

        Raises:
            FormatError: if this is no sampler's state (SR-ORDER-STATE).
            VerificationError: if the position counts samples of another order (SR-ORDER-MISMATCH, one per difference).
        """
        committed = Committed.from_json(state_dict)
        identity = state_dict.get("order")
        if not isinstance(identity, Mapping):
            hint = "if the order is known to be this one, go to the position with `seek`"
            raise FormatError(Problem("SR-ORDER-STATE", "the saved position names no order", hint=hint))
        if problems := check_order(identity, self.order.identity()):
            raise VerificationError(problems)
        if committed.samples_in_epoch > (length := self.order.num_samples(committed.epoch)):
            raise FormatError(
                Problem(
                    "SR-ORDER-STATE",
                    f"the saved position lies beyond the end of epoch {committed.epoch}",
                    where={"key": "samples_in_epoch"},
                    expected=f"at most {length}",
                    found=committed.samples_in_epoch,
                )
            )
        for problem in check_phase(state_dict):
            warnings.warn(f"{problem.code}: {problem.message}; {problem.hint}", stacklevel=2)
        self._phase = Phase()
        self._go_to(committed)

    def __len__(self) -> int:
        """Microbatches that an iteration begun now yields: what is left of the epoch."""
        return sum(count * self._dealing(size).passes for size, count in self._left_in_epoch())

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this replica's microbatches from the committed position to the end of the epoch.

        With `carry`, up to the last update that ends in the epoch; the next iteration begins with the one in between.
        """
        if self._exhausted_at == self._committed:
            warnings.warn(
                "ElasticSampler is iterated again from the same position although a whole iteration was read and "
                "nothing committed; call commit() after each optimizer step",
                stacklevel=2,
            )
        return self._microbatches(self._committed)

    def updates(self, loader: Iterable[Any], *, until: int | None = None) -> Iterator[Update]:
        """Yields updates, over epochs, until `until` are committed (for ever if None).

        Args:
            loader: a DataLoader with `batch_sampler=self` (or anything that yields one batch per microbatch of
                `iter(self)`). It is iterated anew for every epoch, and whenever the position was moved by
                `load_state_dict` or `seek` within the loop.
            until: the run's last update, 1-based; updates before a resume count.

        Raises:
            UsageError: if the loop goes on without `commit` (SR-ORDER-UNCOMMITTED), commits before all passes are
                taken (SR-ORDER-PASSES), or the loader is not this sampler's (SR-ORDER-LOADER) or cannot collate an
                empty microbatch (SR-ORDER-EMPTY).
        """
        require_own(loader, self)
        while until is None or self._committed.update < until:
            self._require_collatable(loader)
            self._go_to(self._committed)
            yield from self._updates_of_epoch(iter(loader), until)

    def _updates_of_epoch(self, stream: Iterator[Any], until: int | None) -> Iterator[Update]:
        for before, span in self._spans(self._committed):
            if until is not None and self._committed.update >= until:
                return
            update = Update(self._committed.update + 1, span, self._dealing(span.num_samples), self._ids(span), stream)
            self._phase = update.phase
            yield update
            expected = _place(after(before, span))
            if _place(self._committed) == _place(before):
                raise UsageError(uncommitted(update.number))
            if _place(self._committed) != expected:
                return  # moved on purpose: read on from there
            if update.passes_left:
                raise UsageError(early_commit(update))

    def share_position(self) -> None:
        """Tells workers that live on over epochs where the next iteration begins (`ElasticStream`).

        `updates`, `load_state_dict` and `seek` do this by themselves once it was called. `commit` must not: a worker
        may begin an iteration after the first updates of it are committed.
        """
        if self._begin is None:
            self._begin = torch.zeros(4, dtype=torch.int64).share_memory_()
        at = self._committed
        self._begin.copy_(torch.tensor([at.update, at.epoch, at.samples_in_epoch, at.samples]))

    def shared_microbatches(self) -> Iterator[list[int]]:
        """Yields this replica's microbatches from where the iteration begins, also in a worker started long before."""
        if self._begin is None:
            return self._microbatches(self._committed)
        update, epoch, samples_in_epoch, samples = self._begin.tolist()
        return self._microbatches(
            Committed(update=update, epoch=epoch, samples_in_epoch=samples_in_epoch, samples=samples, tokens=None)
        )

    def _go_to(self, at: Committed) -> Committed:
        self._committed = at
        if self._begin is not None:
            self.share_position()
        return at

    def _microbatches(self, at: Committed) -> Iterator[list[int]]:
        for _, span in self._spans(at):
            for ids in self._ids(span):
                sample_ids: list[int] = ids.tolist()
                yield sample_ids or ([] if self.empty == "list" else span.ids(self.order)[:1].tolist())
        self._exhausted_at = at

    def _spans(self, at: Committed) -> Iterator[tuple[Committed, UpdateSpan]]:
        """Yields the updates of one iteration, each with the position before it."""
        span = self._span(at)
        epoch = span.spans[-1].epoch
        while span.spans[-1].epoch == epoch:
            yield at, span
            at = after(at, span)
            span = self._span(at)

    def _left_in_epoch(self) -> list[tuple[int, int]]:
        """Sizes of the updates of an iteration begun now, each with how many have it."""
        first = self._span()
        last = first.spans[-1]
        whole, rest = divmod(self.order.num_samples(last.epoch) - last.stop, self.global_batch)
        sizes = [(first.num_samples, 1), (self.global_batch, whole)]
        return [*sizes, (rest, 1)] if rest and self.last_batch == "keep" else sizes

    def _span(self, at: Committed | None = None) -> UpdateSpan:
        return next_update(self.order, at or self._committed, self.global_batch, self.last_batch)

    def _dealing(self, num_samples: int) -> Dealing:
        if num_samples not in self._dealings:
            dealing = deal(num_samples, self.replicas, self.max_microbatch)
            self._dealings[num_samples] = dealing
            self._positions[num_samples] = dealing.replica_positions(self.replica)
        return self._dealings[num_samples]

    def _ids(self, span: UpdateSpan) -> tuple[Ids, ...]:
        self._dealing(span.num_samples)
        ids = span.ids(self.order)
        return tuple(
            ids[part.start : part.stop : part.step] if isinstance(part, range) else ids[list(part)]
            for part in self._positions[span.num_samples]
        )

    def _require_collatable(self, loader: Iterable[Any]) -> None:
        if self.empty != "list" or getattr(loader, "collate_fn", None) is not default_collate:
            return
        if any(self._dealing(size).num_empty for size, count in self._left_in_epoch() if count):
            raise UsageError(
                Problem(
                    "SR-ORDER-EMPTY",
                    "some microbatch of this epoch is empty, and torch's default collate_fn cannot make a batch of it",
                    where={"key": f"replicas {self.replicas}, global batch {self.global_batch}"},
                    hint='pass empty="placeholder" and give passes with `is_empty` zero weight, or a collate_fn that '
                    "takes []",
                )
            )


def _place(at: Committed) -> tuple[int, int, int]:
    return at.epoch, at.samples_in_epoch, at.samples

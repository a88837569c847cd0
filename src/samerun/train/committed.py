"""What every sampler here is: a committed position in a global order, and the updates that follow from it.

How large an update is, and how it is dealt, is a subclass's: `ElasticSampler` counts samples, `TokenSampler` valid
tokens.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, default_collate

from samerun.core.batch import Dealing, TokenDealing
from samerun.core.order import GlobalOrder, Ids, check_order
from samerun.core.progress import Committed, UpdateSpan, after, check_phase
from samerun.errors import FormatError, Problem, UsageError, VerificationError
from samerun.train.sampler_checks import Empty, require_own
from samerun.train.update import Phase, Update, early_commit, uncommitted

SCHEMA = "samerun/sampler/1"


class CommittedSampler(Sampler[list[int]], ABC):
    """A batch sampler whose only state is how far the run is; see `samerun.train.sampler`.

    A subclass says which part of the order an update takes (`_span`), and how it is dealt (`_dealt`).
    """

    order: GlobalOrder
    replicas: int
    replica: int
    empty: Empty

    def __init__(self) -> None:
        self._committed = Committed()
        self._exhausted_at: Committed | None = None
        self._begin: torch.Tensor | None = None
        self._phase = Phase()

    @abstractmethod
    def _span(self, at: Committed | None = None) -> UpdateSpan:
        """Returns what the update after `at` (after what is committed, if left out) takes of the order."""

    @abstractmethod
    def _dealt(self, span: UpdateSpan) -> Dealing | TokenDealing:
        """Returns how an update is dealt to replicas and passes."""

    def _parts(self, span: UpdateSpan) -> Sequence[Sequence[int]]:
        """Returns this replica's positions within an update, by pass."""
        return self._dealt(span).replica_positions(self.replica)

    @abstractmethod
    def _may_be_empty(self) -> bool:
        """Returns whether some microbatch of the rest of the epoch may be empty, on any replica."""

    @property
    def committed(self) -> Committed:
        """How far the run is; a save between two updates needs nothing else of the data."""
        return self._committed

    @property
    def update_dealing(self) -> Dealing | TokenDealing:
        """How the current update is dealt, that is the first one not committed."""
        return self._dealt(self._span())

    @property
    def passes(self) -> int:
        """Passes of the current update."""
        return self.update_dealing.passes

    def update_ids(self, replica: int | None = None) -> Ids:
        """Returns the current update's ids of this (or another) replica in the order of its passes, int64."""
        span = self._span()
        if replica is None or replica == self.replica:
            return np.concatenate(self._ids(span))
        return np.concatenate(take(span.ids(self.order), self._dealt(span).replica_positions(replica)))

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
        return sum(self._dealt(span).passes for _, span in self._spans(self._committed))

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this replica's microbatches from the committed position to the end of the epoch.

        With `carry`, up to the last update that ends in the epoch; the next iteration begins with the one in between.
        """
        if self._exhausted_at == self._committed:
            warnings.warn(
                "the sampler is iterated again from the same position although a whole iteration was read and "
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
            update = Update(self._committed.update + 1, span, self._dealt(span), self._ids(span), stream)
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

    def all_microbatches(self) -> Iterator[list[int]]:
        """Yields this replica's microbatches from the committed position on, over as many epochs as are asked for."""
        at = self._committed
        while True:
            span = self._span(at)
            yield from self._lists(span)
            at = after(at, span)

    def _go_to(self, at: Committed) -> Committed:
        self._committed = at
        if self._begin is not None:
            self.share_position()
        return at

    def _microbatches(self, at: Committed) -> Iterator[list[int]]:
        for _, span in self._spans(at):
            yield from self._lists(span)
        self._exhausted_at = at

    def _lists(self, span: UpdateSpan) -> Iterator[list[int]]:
        for ids in self._ids(span):
            sample_ids: list[int] = ids.tolist()
            yield sample_ids or ([] if self.empty == "list" else span.ids(self.order)[:1].tolist())

    def _spans(self, at: Committed) -> Iterator[tuple[Committed, UpdateSpan]]:
        """Yields the updates of one iteration, each with the position before it."""
        span = self._span(at)
        epoch = span.spans[-1].epoch
        while span.spans[-1].epoch == epoch:
            yield at, span
            at = after(at, span)
            span = self._span(at)

    def _ids(self, span: UpdateSpan) -> tuple[Ids, ...]:
        return take(span.ids(self.order), self._parts(span))

    def _require_collatable(self, loader: Iterable[Any]) -> None:
        if self.empty != "list" or getattr(loader, "collate_fn", None) is not default_collate:
            return
        if self._may_be_empty():
            raise UsageError(
                Problem(
                    "SR-ORDER-EMPTY",
                    "some microbatch of this epoch is empty, and torch's default collate_fn cannot make a batch of it",
                    where={"key": f"replicas {self.replicas}"},
                    hint='pass empty="placeholder" and give passes with `is_empty` zero weight, or a collate_fn that '
                    "takes []",
                )
            )


def take(ids: Ids, parts: Sequence[Sequence[int]]) -> tuple[Ids, ...]:
    """Returns an update's ids at the positions of each pass."""
    return tuple(
        ids[part.start : part.stop : part.step] if isinstance(part, range) else ids[list(part)] for part in parts
    )


def _place(at: Committed) -> tuple[int, int, int]:
    return at.epoch, at.samples_in_epoch, at.samples

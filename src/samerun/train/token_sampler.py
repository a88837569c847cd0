"""A sampler whose updates hold so many valid tokens, not so many samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from samerun.core.batch import TokenDealing, deal_tokens
from samerun.core.progress import Committed, LastBatch, UpdateSpan
from samerun.core.tokens import MeasuredOrder, next_token_update
from samerun.errors import Problem, UsageError
from samerun.train.committed import CommittedSampler
from samerun.train.sampler_checks import Empty, check_choices


class TokenSampler(CommittedSampler):
    """Batch sampler for token budgets; used like `ElasticSampler`, and moved like it.

        order = MeasuredSamples(KeyedOrder(len(dataset), seed=0), lengths)
        sampler = TokenSampler(order, global_tokens=65_536, replicas=3, replica=r, max_tokens=8192)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    Which samples an update has is settled along the global order, before it is dealt (`next_token_update`), so no
    number of ranks changes it. Its samples then go to replicas by their tokens (`deal_tokens`): nearly equal shares, as
    many passes on every replica, none above `max_tokens`. Passes are of unequal size, so the loss needs
    `ContributionMean`. The position counts samples and valid tokens; `commit` knows an update's tokens by itself.

    Every rank computes the same without communication; an update costs its number of samples times that of replicas.
    `len(sampler)` walks through the rest of the epoch.

    Args:
        order: an order with measured samples: `MeasuredSamples`, or `PackedOrder`, whose rows are measured too.
        global_tokens: most valid tokens per update over all replicas.
        replicas: batch replicas now.
        replica: which one this is, 0-based.
        max_tokens: most valid tokens in one pass of one replica. At least the longest sample: none is ever cut.
        last_batch: as for `ElasticSampler`, for the samples at an epoch's end that leave room in an update.
        empty: likewise; with `list` the loader needs a `collate_fn` that takes `[]`.

    Raises:
        UsageError: naming everything about the arguments that makes no sense.
    """

    def __init__(
        self,
        order: MeasuredOrder,
        *,
        global_tokens: int,
        replicas: int,
        replica: int,
        max_tokens: int,
        last_batch: LastBatch = "keep",
        empty: Empty = "list",
    ) -> None:
        problems = [] if replicas >= 1 else [_invalid("replicas", replicas, "at least 1")]
        least = max(order.longest, 1)
        budgets = {"global_tokens": global_tokens, "max_tokens": max_tokens}
        whole = f"at least {least}, the longest sample: none is cut"
        problems += [_invalid(name, value, whole) for name, value in budgets.items() if value < least]
        if not 0 <= replica < max(replicas, 1):
            problems.append(_invalid("replica", replica, f"0 to {replicas - 1}"))
        problems += check_choices(last_batch, empty)
        if problems:
            raise UsageError(problems)
        super().__init__()
        self.order, self._measured = order, order
        self.global_tokens, self.max_tokens = global_tokens, max_tokens
        self.replicas, self.replica = replicas, replica
        self.last_batch: LastBatch = last_batch
        self.empty: Empty = empty
        self._last: tuple[UpdateSpan, TokenDealing] | None = None
        self._dealt(self._span())

    @property
    def update_tokens(self) -> int:
        """Valid tokens of the current update over all replicas."""
        return self._tokens(self._span())

    def commit(self, tokens: int | None = None, *, skipped: bool = False) -> Committed:
        """Says that the current update is done, as `ElasticSampler.commit` does.

        Raises:
            UsageError: if `tokens` is given and is not what the update's samples have (SR-ORDER-TOKENS).
        """
        known = self.update_tokens
        if tokens is not None and tokens != known:
            hint = (
                "the lengths that the order was given are not what the loss counts: shifted labels, truncation, masks?"
            )
            problem = Problem(
                "SR-ORDER-TOKENS",
                "the update was counted otherwise than its samples were measured",
                where={"update": self.committed.update + 1},
                expected=known,
                found=tokens,
                hint=hint,
            )
            raise UsageError(problem)
        return super().commit(known, skipped=skipped)

    def _span(self, at: Committed | None = None) -> UpdateSpan:
        try:
            return next_token_update(self._measured, at or self._committed, self.global_tokens, self.last_batch)
        except ValueError as error:
            hint = "use last_batch='keep' or 'carry'"
            raise UsageError(Problem("SR-ORDER-INVALID", str(error), hint=hint)) from None

    def _dealt(self, span: UpdateSpan) -> TokenDealing:
        if self._last is None or self._last[0] != span:
            lengths: list[int] = self._measured.tokens(span.ids(self.order)).tolist()
            self._last = (span, deal_tokens(lengths, self.replicas, self.max_tokens))
        return self._last[1]

    def _may_be_empty(self) -> bool:
        return True  # to know would cost a walk through the epoch, and ragged samples need a collate_fn anyway

    def _tokens(self, span: UpdateSpan) -> int:
        return int(np.sum(self._measured.tokens(span.ids(self.order))))


def _invalid(name: str, found: Any, expected: str) -> Problem:
    return Problem("SR-ORDER-INVALID", f"{name} cannot be {found!r}", expected=expected, found=repr(found))

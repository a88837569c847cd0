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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from samerun.core.batch import Dealing, check_batch, deal
from samerun.core.mesh import Layout
from samerun.core.order import GlobalOrder, Ids, check_order, require_span
from samerun.core.progress import Committed, LastBatch, UpdateSpan, after, next_update, replica_ids, seek
from samerun.errors import FormatError, Problem, UsageError, VerificationError, has_errors

Empty = Literal["list", "placeholder"]

SCHEMA = "samerun/sampler/1"


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int) -> Ids:
    """What `DistributedSampler` draws for `seed` (its own plus the epoch): read-only, 8 bytes per sample."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    drawn: Ids = torch.randperm(length, generator=generator).numpy()
    drawn.setflags(write=False)
    return drawn


@dataclass(frozen=True, slots=True)
class TorchDistributedOrder:
    """The order in which `torch.utils.data.DistributedSampler` (torch 2.13.0) hands out samples before it cuts by rank.

    Its permutation depends on seed + epoch only; the padding of an epoch's tail (or its drop) depends on the number of
    ranks. So a run that was started with `DistributedSampler(num_replicas=R, ...)` keeps *that* R here for good,
    whatever number of replicas it is dealt to later. With the default of 1 nothing is padded or dropped.

    `length` is the data set's, `drop_last` the *sampler's* (cut the tail instead of padding it). `loader_batch` is the
    batch size per rank if the run's *DataLoader* had `drop_last=True` and so never saw the last short batch of each
    rank; else None.
    """

    length: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    num_replicas: int = 1
    loader_batch: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1 or self.num_replicas < 1 or (self.loader_batch is not None and self.loader_batch < 1):
            raise ValueError(f"length, num_replicas and loader_batch are whole numbers of at least 1: {self}")
        if not self.num_samples(0):
            raise ValueError(f"dropping the tail leaves no sample in an epoch: {self}")

    def num_samples(self, epoch: int) -> int:
        """Returns the positions of an epoch over all ranks, padding included; the same in every epoch."""
        each = self.length // self.num_replicas if self.drop_last else -(-self.length // self.num_replicas)
        if self.loader_batch is not None:
            each -= each % self.loader_batch
        return each * self.num_replicas

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the ids at positions start..stop-1; padding starts the epoch's permutation over again."""
        require_span(start, stop, self.num_samples(epoch))
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64) % self.length
        drawn = _permutation(self.length, self.seed + epoch)
        return drawn[start:stop] if stop <= self.length else drawn[np.arange(start, stop) % self.length]

    def identity(self) -> dict[str, Any]:
        """Returns the arguments that decide the order. `seed` is None where nothing is shuffled."""
        return {
            "kind": "torch-distributed",
            "num_samples": self.length,
            "seed": self.seed if self.shuffle else None,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "num_replicas": self.num_replicas,
            "loader_batch": self.loader_batch,
        }


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


class Update:
    """One update of one replica: iterate it once for its `passes` microbatches.

    Attributes:
        number: the update's 1-based index, which it has once it is committed.
        num_samples: samples over all replicas.
        dealing: how they are dealt; `dealing.passes` is the number of passes.
        ids: this replica's sample ids by pass.
        epoch: the epoch in which the update ends.
    """

    def __init__(self, number: int, span: UpdateSpan, dealing: Dealing, ids: Sequence[Ids], stream: Iterator[Any]):
        self.number = number
        self.num_samples = span.num_samples
        self.epoch = span.spans[-1].epoch
        self.dealing = dealing
        self.ids = tuple(tuple(part.tolist()) for part in ids)
        self._stream = stream
        self._taken = 0

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
        if self._taken == self.passes:
            raise StopIteration
        self._taken += 1
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
        return Microbatch(batch, self.ids[self._taken - 1])

    @property
    def passes_left(self) -> int:
        """Microbatches not yet taken."""
        return self.passes - self._taken


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
        problems = _check_choices(last_batch, empty)
        problems += _check_dealing(global_batch, replicas, replica, max_microbatch, dealing)
        problems += _check_order_arguments(order, seed, shuffle)
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
        _require_some_update(self.order, global_batch, last_batch)

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
        return self._committed

    def seek(self, num_updates: int) -> Committed:
        """Goes to where a run is after its first `num_updates` updates with this global batch, and returns it.

        For checkpoints of a run that saved no position, or used `DistributedSampler`; see `core.progress.seek`.
        """
        self._committed = seek(self.order, num_updates, self.global_batch, self.last_batch)
        return self._committed

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the order's identity: equal on every rank, independent of their number."""
        return {"schema": SCHEMA, **self._committed.to_json(), "order": self.order.identity()}

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
        self._committed = committed

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
        _require_own(loader, self)
        while until is None or self._committed.update < until:
            self._require_collatable(loader)
            yield from self._updates_of_epoch(iter(loader), until)

    def _updates_of_epoch(self, stream: Iterator[Any], until: int | None) -> Iterator[Update]:
        for before, span in self._spans(self._committed):
            if until is not None and self._committed.update >= until:
                return
            update = Update(self._committed.update + 1, span, self._dealing(span.num_samples), self._ids(span), stream)
            yield update
            expected = _place(after(before, span))
            if _place(self._committed) == _place(before):
                raise UsageError(_uncommitted(update.number))
            if _place(self._committed) != expected:
                return  # moved on purpose: read on from there
            if update.passes_left:
                raise UsageError(_early_commit(update))

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


def _uncommitted(number: int) -> Problem:
    return Problem(
        "SR-ORDER-UNCOMMITTED",
        "the loop asks for another update but has not committed this one",
        where={"update": number},
        hint="call sampler.commit(tokens=...) on every rank after each optimizer step, also after a skipped one",
    )


def _early_commit(update: Update) -> Problem:
    return Problem(
        "SR-ORDER-PASSES",
        "the update was committed before all of its passes had run",
        where={"update": update.number},
        expected=f"{update.passes} passes",
        found=f"{update.passes - update.passes_left}",
        hint="iterate the whole update; every replica must make the same number of passes",
    )


def _invalid(name: str, found: Any, expected: str) -> Problem:
    return Problem("SR-ORDER-INVALID", f"{name} cannot be {found!r}", expected=expected, found=repr(found))


def _check_choices(last_batch: str, empty: str) -> list[Problem]:
    choices = (("last_batch", last_batch, get_args(LastBatch)), ("empty", empty, get_args(Empty)))
    return [_invalid(name, value, f"one of {', '.join(known)}") for name, value, known in choices if value not in known]


def _check_dealing(
    global_batch: int, replicas: int, replica: int, max_microbatch: int | None, dealing: Dealing | None
) -> list[Problem]:
    if max_microbatch is None:
        return [_invalid("max_microbatch", None, "a whole number of at least 1, unless a dealing is given")]
    problems = [problem for problem in check_batch(global_batch, replicas, max_microbatch) if has_errors([problem])]
    if problems:
        return problems
    if not 0 <= replica < replicas:
        problems.append(_invalid("replica", replica, f"0 to {replicas - 1}"))
    if dealing is not None:
        found = {"global_batch": dealing.global_batch, "replicas": dealing.replicas}
        expected = {"global_batch": global_batch, "replicas": replicas}
        problems += [
            _invalid(f"dealing.{name}", found[name], str(expected[name]))
            for name in found
            if found[name] != expected[name]
        ]
        if dealing.max_microbatch > max_microbatch:
            problems.append(_invalid("dealing.max_microbatch", dealing.max_microbatch, f"at most {max_microbatch}"))
    return problems


def _check_order_arguments(order: int | GlobalOrder, seed: int, shuffle: bool) -> list[Problem]:
    if isinstance(order, int):
        return [] if order >= 1 and not isinstance(order, bool) else [_invalid("order", order, "at least one sample")]
    if seed != 0 or not shuffle:
        return [_invalid("seed and shuffle", (seed, shuffle), "left out: the order that was given has its own")]
    return []


def _require_some_update(order: GlobalOrder, global_batch: int, last_batch: LastBatch) -> None:
    try:
        next_update(order, Committed(), global_batch, last_batch)
    except ValueError as error:
        raise UsageError(Problem("SR-ORDER-INVALID", str(error), hint="use last_batch='keep' or 'carry'")) from None


def _require_own(loader: Iterable[Any], sampler: ElasticSampler) -> None:
    if isinstance(loader, DataLoader) and loader.batch_sampler is not sampler:
        raise UsageError(
            Problem(
                "SR-ORDER-LOADER",
                "the loader does not take its batches from this sampler",
                hint="DataLoader(dataset, batch_sampler=sampler, ...), without batch_size, shuffle, sampler, drop_last",
            )
        )

"""Progress as one global coordinate, and its mapping onto updates and ranks.

A run is at `Committed`: how many samples of a declared global order have gone into completed updates. Not a batch
index, not a rank's cursor: both change their meaning with the number of ranks. The next update is computed from the
coordinate, the order and the batch alone, so any rank set computes the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from samerun.core.batch import Dealing, RampUp
from samerun.core.order import GlobalOrder, Ids
from samerun.errors import FormatError, Problem, Severity

LastBatch = Literal["keep", "drop", "carry"]
"""What happens to the samples at an epoch's end that do not fill a global batch: a smaller update (`keep`), no update
(`drop`), or the first part of an update that the next epoch completes (`carry`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What has gone into completed updates; everything else is still to come.

    `update` counts completed optimizer steps, `samples` and `tokens` count since the run began (over epochs; `tokens`
    is None when some update's count was not told), `epoch` and `samples_in_epoch` say where in the order the run is.
    """

    update: int = 0
    epoch: int = 0
    samples_in_epoch: int = 0
    samples: int = 0
    tokens: int | None = 0

    def to_json(self) -> dict[str, int | None]:
        """Returns the fields as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `to_json` back; other keys are ignored.

        Raises:
            FormatError: naming every field that is missing or no count (SR-ORDER-STATE).
        """
        names = ("update", "epoch", "samples_in_epoch", "samples", "tokens")
        values = {name: _plain(body.get(name)) for name in names}
        wrong = [
            Problem(
                "SR-ORDER-STATE",
                f"the saved progress has no usable {name!r}",
                where={"key": name},
                expected="a whole number of at least 0",
                found=repr(value),
                hint="this is not what a sampler saved, or it was damaged; give the position by hand with `seek`",
            )
            for name, value in values.items()
            if not (isinstance(value, int) and value >= 0) and not (name == "tokens" and value is None)
        ]
        if wrong:
            raise FormatError(wrong)
        return cls(**values)


def check_phase(state: Mapping[str, Any]) -> list[Problem]:
    """Returns SR-ORDER-PHASE for a sampler's state that was saved within an update, after some of its passes."""
    taken = _plain(state.get("passes_taken"))
    if not taken:
        return []
    return [
        Problem(
            "SR-ORDER-PHASE",
            f"the position was saved within an update, after {taken} of its passes",
            severity=Severity.WARNING,
            where={"key": "passes_taken"},
            expected="a checkpoint between commit and the next update",
            found=taken,
            hint="the whole update is issued again: begin it with zero gradients, also if the checkpoint holds some",
        )
    ]


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # a zero-dimensional tensor or array, as some checkpoints give counters back
    value = item() if callable(item) else value
    return None if isinstance(value, bool) else value


@dataclass(frozen=True, slots=True)
class Span:
    """Positions start..stop-1 of one epoch's order."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class UpdateSpan:
    """The part of the order that one update takes: one span, or several when it is carried over an epoch's end."""

    spans: tuple[Span, ...]

    @property
    def num_samples(self) -> int:
        """Samples of this update over all replicas."""
        return sum(map(len, self.spans))

    def ids(self, order: GlobalOrder) -> Ids:
        """Returns the global batch's ids in order, shape `(num_samples,)`."""
        parts = [order.ids(span.epoch, span.start, span.stop) for span in self.spans]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def next_update(order: GlobalOrder, at: Committed, global_batch: int, last_batch: LastBatch = "keep") -> UpdateSpan:
    """Returns what the first update after `at` takes. Pure: every rank computes the same.

    Raises:
        ValueError: if no update can ever be made (`drop` with epochs shorter than the global batch).
    """
    epoch, start = at.epoch, at.samples_in_epoch
    spans: list[Span] = []
    missing = global_batch
    while missing:
        length = order.num_samples(epoch)
        rest = length - start
        if last_batch == "drop" and rest < missing:
            if start == 0:
                raise ValueError(
                    f"epoch {epoch} has {length} samples, fewer than the global batch {global_batch}: "
                    "dropping the last batch drops everything"
                )
            epoch, start = epoch + 1, 0
            continue
        if rest > 0:
            spans.append(Span(epoch, start, start + min(rest, missing)))
            missing -= len(spans[-1])
        if spans and last_batch == "keep":
            break
        epoch, start = epoch + 1, 0
    return UpdateSpan(tuple(spans))


def after(at: Committed, update: UpdateSpan, *, tokens: int | None = None, skipped: bool = False) -> Committed:
    """Returns the coordinate once `update` is committed.

    `tokens` is the update's global number of valid tokens. A `skipped` optimizer step (loss-scale overflow) consumed
    its samples all the same, but is no completed update.
    """
    last = update.spans[-1]
    return Committed(
        update=at.update + (not skipped),
        epoch=last.epoch,
        samples_in_epoch=last.stop,
        samples=at.samples + update.num_samples,
        tokens=None if tokens is None or at.tokens is None else at.tokens + tokens,
    )


def seek(
    order: GlobalOrder,
    num_updates: int,
    global_batch: int,
    last_batch: LastBatch = "keep",
    *,
    ramp: RampUp | None = None,
) -> Committed:
    """Returns the coordinate of a run after its first `num_updates` updates, none of them skipped.

    For checkpoints that tell the update and nothing else: the batch must have been the same all along, but for a
    `ramp` that grew to it. `tokens` is unknown (None) unless nothing was consumed. Costs a step per epoch, and per
    update of the ramp.
    """
    at = Committed()
    while at.update < num_updates:
        batch = global_batch if ramp is None else ramp.batch_at(at.samples)
        if batch != global_batch:
            at = after(at, next_update(order, at, batch, last_batch))
            continue
        whole = _whole_updates(order, at, global_batch, num_updates - at.update)
        if whole > 1:
            taken = whole * global_batch
            start = at.samples_in_epoch + taken
            at = replace(at, update=at.update + whole, samples_in_epoch=start, samples=at.samples + taken, tokens=None)
        else:
            at = after(at, next_update(order, at, global_batch, last_batch))
    return at


def _whole_updates(order: GlobalOrder, at: Committed, global_batch: int, wanted: int) -> int:
    return min(wanted, (order.num_samples(at.epoch) - at.samples_in_epoch) // global_batch)


def replica_ids(global_ids: Ids, dealing: Dealing, replica: int) -> tuple[Ids, ...]:
    """Returns the ids of each pass of `replica`, given one update's global ids in order.

    Raises:
        ValueError: if the dealing is of another number of samples.
    """
    if len(global_ids) != dealing.global_batch:
        raise ValueError(f"a dealing of {dealing.global_batch} samples cannot deal {len(global_ids)}")
    return tuple(
        global_ids[part.start : part.stop : part.step] if isinstance(part, range) else global_ids[list(part)]
        for part in dealing.replica_positions(replica)
    )

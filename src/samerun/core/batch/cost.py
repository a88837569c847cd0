"""What an option costs beyond its passes: updates left, what an evaluation interval means, where a schedule ends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from samerun.core.batch.option import BatchOption


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """The price of an option, beside the batch that it replaces. None where the question did not give the number.

    `pass_slots` are the microbatches of an update over all replicas, idle ones included, in units of the largest that
    occurs: what the update costs in forward-backward passes. `updates_left` in the epoch count a smaller last one.
    `eval_samples` are the samples between two evaluations at an interval of so many updates, and `eval_updates` the
    interval that keeps the old number of samples (None: no whole number does). `schedule_samples` are what a schedule
    of so many updates will have seen at its end, and `schedule_updates` the length that keeps the samples.
    """

    passes: int
    peak_microbatch: int
    utilisation: float
    pass_slots: int
    updates_left: int | None = None
    eval_samples: int | None = None
    eval_updates: int | None = None
    schedule_samples: int | None = None
    schedule_updates: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


def cost_of(
    option: BatchOption,
    target: int,
    *,
    samples_left: int | None = None,
    eval_every: int | None = None,
    schedule_updates: int | None = None,
    updates_done: int = 0,
) -> OptionCost:
    """Returns what `option` costs.

    Args:
        option: one of `plan_batch`'s.
        target: the global batch that the run had.
        samples_left: samples of the epoch that are not committed.
        eval_every: updates between evaluations (or saves, or logs).
        schedule_updates: the updates after which the learning-rate schedule ends.
        updates_done: committed updates, all of them at the old batch.
    """
    batch = option.global_batch
    kept_interval = None if eval_every is None else eval_every * target / batch
    left = None if schedule_updates is None else max(schedule_updates - updates_done, 0)
    return OptionCost(
        passes=option.passes,
        peak_microbatch=option.max_microbatch,
        utilisation=option.utilisation,
        pass_slots=option.passes * (option.replicas + option.idle_replicas),
        updates_left=None if samples_left is None else -(-samples_left // batch),
        eval_samples=None if eval_every is None else eval_every * batch,
        eval_updates=int(kept_interval) if kept_interval is not None and kept_interval.is_integer() else None,
        schedule_samples=None if left is None else updates_done * target + left * batch,
        schedule_updates=None if left is None else updates_done + left * target / batch,
    )

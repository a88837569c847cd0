"""Which batch option the manifest chose, and what becomes of the layout and the learning rate with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.batch import (
    LEARNING_RATE_POLICY,
    BatchOption,
    LearningRateChoice,
    SourceBatch,
    learning_rate_factor,
    plan_batch,
)
from samerun.core.mesh import Layout
from samerun.core.schedule import Progress
from samerun.errors import PlanError, Problem, UndecidedError
from samerun.manifest.models import Batch, ChangedBatch, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRatePlan:
    """What becomes of the learning rate: every group's rate times `factor`, or the base rate `value`.

    `policy` is None where the batch stays as it is and nothing has to be decided. `schedule` says what the position in
    the schedule follows: the updates that were made, or the samples that were committed.
    """

    policy: str | None = None
    factor: float | None = 1.0
    value: float | None = None
    schedule: Progress = "updates"

    def to_json(self) -> dict[str, Any]:
        """Returns the fields."""
        body = {"policy": self.policy, "factor": self.factor, "value": self.value}
        return body if self.schedule == "updates" else {**body, "schedule": self.schedule}


def list_options(batch: Batch, destination: Layout, source: Source | None = None) -> tuple[BatchOption, ...]:
    """Returns every honest way to deal the manifest's global batch on the destination; chooses none.

    Raises:
        UsageError: if the numbers make no sense.
    """
    equation = source_equation(source) if source is not None else None
    return plan_batch(batch.global_batch, destination.batch_replicas, batch.max_microbatch, source=equation)


def source_equation(source: Source) -> SourceBatch | None:
    """Returns the source's `replicas x microbatch x accumulation`, if the manifest gives it."""
    if source.microbatch is None or source.accumulation is None:
        return None
    replicas = source.layout.to_layout().batch_replicas
    return SourceBatch(replicas=replicas, micro=source.microbatch, accum=source.accumulation)


def choose_option(batch: Batch, options: Sequence[BatchOption], destination: Layout) -> BatchOption:
    """Returns the option that the manifest chose.

    Raises:
        UndecidedError: if it chose none and there is more than one (SR-PLAN-BATCH-UNDECIDED).
        PlanError: if what it chose cannot be had (SR-PLAN-BATCH-IMPOSSIBLE).
    """
    if batch.option is None:
        if len(options) == 1:
            return options[0]
        raise UndecidedError(_undecided(batch, options, destination))
    if batch.changed is not None:
        return _changed_option(batch, batch.changed, destination)
    found = next((option for option in options if option.kind == batch.option), None)
    if found is None:
        raise PlanError(_impossible(batch, options, destination))
    return found


def _undecided(batch: Batch, options: Sequence[BatchOption], destination: Layout) -> Problem:
    kinds = " | ".join(dict.fromkeys(option.kind for option in options))
    return Problem(
        "SR-PLAN-BATCH-UNDECIDED",
        f"{batch.global_batch} samples can be dealt to {destination.batch_replicas} replicas in several ways, "
        "and which one is your decision",
        where={"key": "batch.option"},
        expected=kinds,
        hint="compare them in the table; none is taken by default because they are different runs or different costs",
    )


def _impossible(batch: Batch, options: Sequence[BatchOption], destination: Layout) -> Problem:
    kinds = " | ".join(dict.fromkeys(option.kind for option in options))
    return Problem(
        "SR-PLAN-BATCH-IMPOSSIBLE",
        f"{batch.global_batch} samples cannot be dealt {batch.option} to {destination.batch_replicas} replicas "
        f"at microbatches of at most {batch.max_microbatch}",
        where={"key": "batch.option"},
        expected=kinds,
        found=batch.option,
        hint=f"possible here: {kinds}",
    )


def _changed_option(batch: Batch, changed: ChangedBatch, destination: Layout) -> BatchOption:
    size, replicas = changed.global_batch, destination.batch_replicas
    even = next(
        (option for option in plan_batch(size, replicas, batch.max_microbatch) if option.kind == "uniform"), None
    )
    if even is None:
        below, above = size // replicas * replicas, (size // replicas + 1) * replicas
        raise PlanError(
            Problem(
                "SR-PLAN-BATCH-IMPOSSIBLE",
                f"the changed batch of {size} samples is not dealt evenly to {replicas} replicas either",
                where={"key": "batch.changed.global_batch"},
                expected=" or ".join(str(other) for other in (below, above) if other),
                found=size,
                hint="change the batch only to one that is dealt evenly; the old one can be kept with option ragged",
            )
        )
    factors = (learning_rate_factor("linear", batch.global_batch, size),)
    factors += (learning_rate_factor("square-root", batch.global_batch, size),)
    return BatchOption(
        kind="changed-batch",
        dealing=even.dealing,
        exact=False,
        idle_replicas=0,
        utilisation=even.utilisation,
        needs=(*even.needs, LEARNING_RATE_POLICY),
        learning_rate=LearningRateChoice(*factors),
        reason=changed.reason,
    )


def plan_learning_rate(batch: Batch) -> LearningRatePlan:
    """Returns what the manifest's policy makes of the learning rate; nothing where the batch is not changed."""
    if batch.changed is None:
        return LearningRatePlan()
    rate = batch.changed.learning_rate
    if rate.policy == "value":
        return LearningRatePlan(policy="value", factor=None, value=rate.value, schedule=rate.schedule)
    factor = learning_rate_factor(rate.policy, batch.global_batch, batch.changed.global_batch)
    return LearningRatePlan(policy=rate.policy, factor=factor, schedule=rate.schedule)


def effective_layout(destination: Layout, option: BatchOption) -> Layout:
    """Returns the layout that is launched: the destination's, with fewer data-parallel ranks if replicas are idle.

    Whole replicas of HSDP are left out where that gives the number, else `dp_shard` shrinks.

    Raises:
        PlanError: if no such layout exists (SR-PLAN-BATCH-IMPOSSIBLE).
    """
    replicas = option.replicas
    if replicas == destination.batch_replicas:
        return destination
    axes = destination.to_dict()
    if destination.dp_shard == 1:
        axes |= {"dp_replicate": replicas}
    elif replicas % destination.dp_shard == 0:
        axes |= {"dp_replicate": replicas // destination.dp_shard}
    else:
        axes |= {"dp_replicate": 1, "dp_shard": replicas}
    try:
        return Layout.from_dict(axes)
    except ValueError as error:
        message = f"{replicas} replicas do not make a layout like {destination}: {error}"
        hint = "name the smaller layout as the destination and take option uniform"
        raise PlanError(
            Problem("SR-PLAN-BATCH-IMPOSSIBLE", message, where={"key": "batch.option"}, hint=hint)
        ) from error

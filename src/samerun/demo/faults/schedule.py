"""Faults of the learning-rate schedule."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from samerun.demo.faults.catalog import Kind, in_job
from samerun.demo.faults.wrap import after_scheduler_load, wrap


@in_job("scheduler-ahead", Kind.SCHEDULE, "SR-LOAD-SCHED")
def step_once_more() -> None:
    """The schedule is restored and then stepped once more."""

    def then(scheduler: Any) -> None:
        scheduler.optimizer._opt_called = True
        scheduler.step()

    after_scheduler_load(then)


@in_job("scheduler-forgotten", Kind.SCHEDULE, "SR-LOAD-SCHED")
def forget_the_schedule() -> None:
    """The schedule is not restored: warm-up begins again."""
    from torch.optim.lr_scheduler import LambdaLR

    def around(original: Any, scheduler: Any, state: Any) -> None:
        for group, rate, factor in zip(
            scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = rate * factor(0)

    wrap(LambdaLR, "load_state_dict", around)


@in_job("learning-rate-doubled", Kind.SCHEDULE, "SR-LOAD-LR")
def double_the_rate() -> None:
    """Somebody tuned the learning rate while restarting."""

    def then(scheduler: Any) -> None:
        scheduler.base_lrs = [2 * rate for rate in scheduler.base_lrs]
        for group in scheduler.optimizer.param_groups:
            group["lr"] *= 2

    after_scheduler_load(then)


@in_job("rate-a-thousandth", Kind.SCHEDULE, "SR-LOAD-LR")
def change_the_rate_slightly() -> None:
    """The learning rate is a thousandth higher than it was."""

    def then(scheduler: Any) -> None:
        scheduler.base_lrs = [1.001 * rate for rate in scheduler.base_lrs]
        for group in scheduler.optimizer.param_groups:
            group["lr"] *= 1.001

    after_scheduler_load(then)


@in_job("horizon-changed", Kind.SCHEDULE, "SR-UPD-LR")
def shorten_the_horizon() -> None:
    """The end of the schedule is computed from the new number of ranks; at the resume the rate is still right."""

    def shortened(factor: Callable[[float], float], now: int) -> Callable[[int], float]:
        return lambda step: factor(now + (step - now) * 4 / 3)

    def then(scheduler: Any) -> None:
        scheduler.lr_lambdas = [shortened(factor, scheduler.last_epoch) for factor in scheduler.lr_lambdas]

    after_scheduler_load(then)


@in_job("schedule-per-rank", Kind.SCHEDULE, "SR-UPD-LR")
def step_once_per_process() -> None:
    """The schedule is stepped once per process and update."""

    def then(scheduler: Any) -> None:
        original = scheduler.step

        def step(*rest: Any) -> None:
            for _ in range(int(os.environ["WORLD_SIZE"])):
                original(*rest)

        scheduler.step = step

    after_scheduler_load(then)


@in_job("schedule-detached", Kind.SCHEDULE, "SR-UPD-LR")
def bind_to_stale_groups() -> None:
    """The schedule is bound to groups that the optimizer no longer uses, so the rate stays where it is."""

    def then(scheduler: Any) -> None:
        original, optimizer = scheduler.step, scheduler.optimizer

        def step(*rest: Any) -> None:
            rates = [group["lr"] for group in optimizer.param_groups]
            original(*rest)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        scheduler.step = step

    after_scheduler_load(then)

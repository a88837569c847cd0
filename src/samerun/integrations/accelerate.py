"""Accelerate: a loop with `save_state` and `load_state`, recorded, on any number of processes.

    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler, sampler)   # and not prepare: see `attach`
    attach(recorder, accelerator, model, optimizer, scheduler, sampler=sampler)
    accelerator.load_state(path)
    begin_update(accelerator)

Derived from accelerate 1.15.0 (`accelerator.py`, `scheduler.py`, `checkpointing.py`). Needs the package `accelerate`.
"""

from __future__ import annotations

from typing import Any

from samerun.errors import Problem, UsageError
from samerun.train.recorder import Recorder

__all__ = ["attach", "begin_update", "check_prepared"]


def attach(
    recorder: Recorder, accelerator: Any, model: Any, optimizer: Any, scheduler: Any = None, **more: Any
) -> None:
    """Attaches a recorder to what Accelerate has wrapped. Every process calls it, once everything is prepared.

    Args:
        recorder: the recorder.
        accelerator: the Accelerator; its gradient scaler is read.
        model: the prepared model.
        optimizer: the prepared optimizer.
        scheduler: the scheduler, not prepared but registered for checkpointing.
        more: as for `Recorder.attach`: `sampler`, `layout`, `batch`, `config`, `objects`.

    Raises:
        UsageError: for a prepared scheduler that steps once per process, or a sampler that Accelerate would deal again.
    """
    if problems := check_prepared(accelerator, scheduler):
        raise UsageError(problems)
    recorder.attach(
        model,
        getattr(optimizer, "optimizer", optimizer),
        _inner(scheduler),
        getattr(accelerator, "scaler", None),
        **more,
    )


def check_prepared(accelerator: Any, scheduler: Any) -> list[Problem]:
    """Returns a finding (SR-REC-USE) if the schedule would depend on the number of processes.

    `AcceleratedScheduler.step` steps the schedule once for every process unless the batches are split.
    """
    steps = accelerator.num_processes
    if _inner(scheduler) is scheduler or scheduler.split_batches or not scheduler.step_with_optimizer or steps == 1:
        return []
    return [
        Problem(
            "SR-REC-USE",
            f"Accelerate steps a prepared scheduler {steps} times per update, once for every process",
            where={"key": "scheduler"},
            expected="1 step per update",
            found=steps,
            hint="do not prepare the scheduler; register it: accelerator.register_for_checkpointing(scheduler)",
        )
    ]


def begin_update(accelerator: Any) -> None:
    """Says that the next pass is the first of an update. Every process calls it after `load_state`.

    Accelerate saves how many passes it counted and goes on from there, on the processes that existed when it saved.
    With another number of passes per update, the next step would come in the middle of one, and not on every process.
    """
    accelerator.step = 0


def _inner(scheduler: Any) -> Any:
    if type(scheduler).__name__ == "AcceleratedScheduler":
        return scheduler.scheduler
    return scheduler

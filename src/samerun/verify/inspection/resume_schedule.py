"""Whether a scheduler stands where the counters and the parameter groups say that it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samerun.core.schedule import schedulers_of
from samerun.core.state import LogicalState
from samerun.errors import Problem, Severity


def check_scheduler(state: LogicalState) -> list[Problem]:
    """Compares the scheduler's position with the update counter, and its last rates with the groups'."""
    schedulers = schedulers_of(state.scheduler)
    problems: list[Problem] = []
    update, epoch = state.progress.update, state.progress.epoch
    for position in dict.fromkeys(
        scheduler.get("last_epoch") for scheduler in schedulers if _counts_updates(scheduler)
    ):
        if isinstance(position, int) and update is not None and position not in (update, epoch):
            problems.append(_position_differs(position, update))
            problems += _check_processes(state, position, update)
    return [*problems, *_check_rates(state, schedulers), *(note for one in schedulers for note in _check_shape(one))]


def _counts_updates(scheduler: Mapping[str, Any]) -> bool:
    """Whether a scheduler is stepped by training. ReduceLROnPlateau is stepped by evaluations, whenever they come."""
    return "num_bad_epochs" not in scheduler


def _check_rates(state: LogicalState, schedulers: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Compares the rates that schedulers set last with the groups': all together, or the last one's to be stepped."""
    rates = [group.hyperparameters.get("lr") for group in state.groups]
    last = [list(one["_last_lr"]) for one in schedulers if isinstance(one.get("_last_lr"), list)]
    together = [rate for each in last for rate in each]
    tellings = [told for told in (together, *last) if len(told) == len(rates)]
    if not tellings or None in rates or rates in tellings:
        return []
    return [
        Problem(
            "SR-SCHED-LR",
            "the scheduler's last learning rates are not those of the parameter groups",
            severity=Severity.WARNING,
            where={"key": "_last_lr"},
            expected=rates,
            found=tellings[-1],
            hint="one of the two was saved at another update, or changed by hand",
        )
    ]


def _check_shape(scheduler: Mapping[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    shapes = scheduler.get("lr_lambdas")
    if isinstance(shapes, list) and shapes and not any(shapes):  # None for a function, {} for a partial of one
        problems.append(
            Problem(
                "SR-SCHED-LAMBDA",
                "the schedule is a function in the training script and is not saved, only its position is",
                severity=Severity.NOTE,
                where={"key": "lr_lambdas"},
                hint="build it with the same warm-up and horizon; one that depends on the world size changes the rates",
            )
        )
    return problems


def _position_differs(position: int, update: int) -> Problem:
    times = f", {position // update} times per update" if update and position and position % update == 0 else ""
    return Problem(
        "SR-SCHED-POSITION",
        f"the scheduler was stepped {position} times in {update} updates{times}",
        severity=Severity.WARNING,
        where={"key": "last_epoch"},
        expected=update,
        found=position,
        hint="if it is stepped once per process, its rate depends on the world size; if once more, it is one off",
    )


def _check_processes(state: LogicalState, position: int, update: int) -> list[Problem]:
    """Accelerate steps a scheduler once per process: files of fewer processes are not all that there were."""
    world_size = state.topology.world_size
    times = position // update if update and position % update == 0 else 0
    if state.format != "accelerate" or world_size is None or times <= world_size:
        return []
    return [
        Problem(
            "SR-RNG-LOST",
            f"the scheduler was stepped {times} times per update, as Accelerate does on {times} processes, and "
            f"generator states are of {world_size}",
            severity=Severity.WARNING,
            where={"file": f"random_states_{world_size}.pkl", "rank": world_size},
            expected=times,
            found=world_size,
            hint="if the run had more processes, gather every process's random_states file; right if the script steps "
            "the scheduler more often by itself",
        )
    ]

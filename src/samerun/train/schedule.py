"""The next rates of a live scheduler, found without touching the run."""

from __future__ import annotations

import copy
from typing import Any

import torch


def next_rates(scheduler: Any, count: int) -> list[list[float]]:
    """Returns the rates by group that the next `count` updates will use if the scheduler is stepped once per update.

    A copy is stepped, on an optimizer with one number per group: parameters, state, and the scheduler itself stay as
    they are. Also for `LambdaLR`, whose function no checkpoint holds.

    Raises:
        TypeError: for `ReduceLROnPlateau`, which follows the loss and has no next rates.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError("ReduceLROnPlateau follows the loss: its next rates are not known")
    groups = scheduler.optimizer.param_groups
    bare = [{**group, "params": [torch.nn.Parameter(torch.zeros(()))]} for group in groups]
    optimizer = torch.optim.SGD(bare, lr=0.0)
    optimizer.step()  # torch warns of a scheduler that is stepped first
    twin = _twin(scheduler, optimizer)
    found: list[list[float]] = []
    for _ in range(count):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        twin.step()
    return found


def _twin(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    twin = copy.copy(scheduler)
    twin.optimizer = optimizer
    for name, value in vars(scheduler).items():
        if name == "_schedulers":
            twin._schedulers = [_twin(part, optimizer) for part in value]
        elif name != "optimizer" and isinstance(value, list | dict):
            setattr(twin, name, copy.copy(value))
    return twin

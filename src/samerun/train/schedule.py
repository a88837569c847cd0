"""Schedules in a job: one that follows what is committed, and the next rates of any, found without touching the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from samerun.core.progress import Committed
from samerun.core.schedule import parse_schedule
from samerun.errors import Problem, UsageError

CommittedUnit = Literal["updates", "samples", "tokens"]


class CommittedLR:
    """Rates as a function of what is committed: updates, samples or valid tokens. Never of calls, and never of time.

    At another batch, a schedule by samples is at the same rate after the same samples. It has no step of its own to
    forget: a skipped update (whose samples are consumed, but which completes nothing) advances it by its unit.

        schedule = CommittedLR(optimizer, parse_schedule(saved).rates, unit="samples", per=32, begin=sampler.committed,
                               position=saved["last_epoch"])
        for update in sampler.updates(loader, until=total):
            ...
            schedule.follow(sampler.commit(tokens=mean.total))

    Args:
        optimizer: whose groups are given their rates, at once and at every `follow`.
        rates: position -> one rate per group; `core.schedule.Schedule.rates`, or any function of a float.
        unit: what the position counts.
        per: so many units are one step of `rates` (the old global batch, where `rates` counted its updates).
        begin: where the run is now. position: and where in `rates` that is.

    Raises:
        UsageError: for an unknown unit, `per` not above 0, or another number of rates than groups (SR-SCHEDULE-FOLLOW).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Callable[[float], Sequence[float]],
        *,
        unit: CommittedUnit,
        per: float = 1.0,
        begin: Committed | None = None,
        position: float = 0.0,
    ) -> None:
        if unit not in get_args(CommittedUnit) or per <= 0:
            known = f"{', '.join(get_args(CommittedUnit))}; per above 0"
            raise _cannot_follow("a schedule cannot follow this", known, f"unit={unit!r}, per={per!r}")
        self.optimizer, self.rates = optimizer, rates
        self.unit: CommittedUnit = unit
        self.per, self.origin = per, float(position)
        self.begin = self._count(begin or Committed())
        self.at = self.begin
        self._set()

    @property
    def position(self) -> float:
        """Where in `rates` the run is, in its steps."""
        return self.origin + (self.at - self.begin) / self.per

    def follow(self, committed: Committed) -> None:
        """Sets the rates of the next update; call it with what `ElasticSampler.commit` returned."""
        self.at = self._count(committed)
        self._set()

    def get_last_lr(self) -> list[float]:
        """Returns the rates by group that are set now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns unit and place; the function is the script's."""
        return {"unit": self.unit, "per": self.per, "begin": self.begin, "origin": self.origin, "at": self.at}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a saved place and sets its rates.

        Raises:
            UsageError: if the saved schedule counts in another unit (SR-SCHEDULE-FOLLOW).
        """
        if state_dict["unit"] != self.unit:
            raise _cannot_follow("the saved schedule follows something else", self.unit, state_dict["unit"])
        self.per, self.begin = float(state_dict["per"]), int(state_dict["begin"])
        self.origin, self.at = float(state_dict["origin"]), int(state_dict["at"])
        self._set()

    def _count(self, at: Committed) -> int:
        count = {"updates": at.update, "samples": at.samples, "tokens": at.tokens}[self.unit]
        if count is None:
            raise _cannot_follow("nobody counted the tokens of this run", "a number of tokens", None)
        return count

    def _set(self) -> None:
        rates, groups = self.rates(self.position), self.optimizer.param_groups
        if len(rates) != len(groups):
            raise _cannot_follow("the schedule has another number of rates than groups", len(groups), len(rates))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _cannot_follow(message: str, expected: Any, found: Any) -> UsageError:
    hint = "declare one unit for the whole run; commit(tokens=...) counts tokens"
    return UsageError(Problem("SR-SCHEDULE-FOLLOW", message, expected=expected, found=found, hint=hint))


def next_rates(scheduler: Any, count: int) -> list[list[float]]:
    """Returns the rates by group that the next `count` updates will use if the scheduler is stepped once per update.

    A copy is stepped, on an optimizer with one number per group: parameters, state, and the scheduler itself stay as
    they are. Also for `LambdaLR`, whose function no checkpoint holds. `ReduceLROnPlateau` follows the loss: its rates
    are returned until its patience can run out, so there may be fewer than `count`.
    """
    groups = scheduler.optimizer.param_groups
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return [[*rates] for rates in parse_schedule(scheduler.state_dict(), groups).next_rates(count)]
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

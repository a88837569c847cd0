"""Learning-rate schedules as functions of the position, read from what torch's schedulers save.

A scheduler in a job is a recursion on its optimizer: to know the rate of a later update one has to step it. Read from
the saved state it is a formula, which can be printed before a job is launched and compared with what the job then
used. The formulas are torch 2.13.0's closed forms (`torch/optim/lr_scheduler.py`); its recursions agree with them to
rounding.

Progress is committed updates (or samples), never time. `LambdaLR` follows a function that is not in the checkpoint, and
is refused by name. `ReduceLROnPlateau` follows the loss, but not at once: until its patience can run out its rates are
known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from samerun.core.trainer_rates import TRAINER_FACTORS
from samerun.errors import Problem, UsageError

Progress = Literal["updates", "samples"]
MEGATRON = "OptimizerParamScheduler"
PLATEAU = "ReduceLROnPlateau"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One scheduler's state as a formula. `kind` names torch's class, `arguments` what its formula needs.

    `base` are the base rates by parameter group; `parts` and `milestones` belong to `SequentialLR`, `phases` to
    `OneCycleLR`. `position` is `last_epoch`: how often it was stepped. `unit` is what a step counts: updates,
    or samples for Megatron's. `certain` is the number of steps whose rates are known whatever the loss does (plateau);
    None: all.
    """

    kind: str
    base: tuple[float, ...]
    position: int
    arguments: Mapping[str, Any]
    parts: tuple[Schedule, ...] = ()
    milestones: tuple[int, ...] = ()
    peaks: tuple[tuple[float, float, float], ...] = ()
    unit: Progress = "updates"
    phases: tuple[tuple[float, str, str], ...] = ()
    certain: int | None = None

    @property
    def horizon(self) -> int | None:
        """After how many steps the schedule has run its course, or None for one that never does (step, exponential)."""
        if self.kind == "SequentialLR":
            last = self.parts[-1].horizon
            return None if last is None else self.milestones[-1] + last
        if self.kind == MEGATRON:
            return int(self.arguments["decay"])
        if self.kind == "OneCycleLR":
            return int(self.phases[-1][0]) + 1
        if self.kind == "MultiStepLR":
            return max((mark for mark, _ in self.arguments["marks"]), default=0)
        length = self.arguments.get({"CosineAnnealingLR": "T_max"}.get(self.kind, "total_iters"))
        return None if length is None else int(length)

    def rates(self, position: float) -> tuple[float, ...]:
        """Returns the rate of every group at `position` steps (0: before the first). Fractions lie in between."""
        if self.kind == "SequentialLR":
            index = bisect_right(self.milestones, position)
            return self.parts[index].rates(position - (self.milestones[index - 1] if index else 0))
        if self.kind == MEGATRON:
            return tuple(_megatron(high, low, position, self.arguments) for high, low, _ in self.peaks)
        if self.kind == "OneCycleLR":
            return tuple(
                self._one_cycle(dict(zip(("initial_lr", "max_lr", "min_lr"), p, strict=True)), position)
                for p in self.peaks
            )
        if self.kind.startswith(TRAINER):
            factor = TRAINER_FACTORS[self.kind.removeprefix(TRAINER)](position, self.arguments)
            return tuple(base * factor for base in self.base)
        return tuple(_FORMULAS[self.kind](base, position, self.arguments) for base in self.base)

    def next_rates(self, count: int, *, stride: float = 1.0, factor: float = 1.0) -> tuple[tuple[float, ...], ...]:
        """Returns the rates that the next `count` updates use, in order; fewer where no more are certain.

        Args:
            count: updates. stride: steps of the schedule per update: 1 where it is stepped once per update; the number
            of processes under
                Accelerate's default; new batch / old batch where progress is counted in samples (`stride_of`).
            factor: what a learning-rate policy multiplies every rate by.
        """
        if self.certain is not None:
            count = min(count, math.ceil(self.certain / stride))
        return tuple(
            tuple(rate * factor for rate in self.rates(self.position + stride * update)) for update in range(count)
        )

    def _one_cycle(self, group: Mapping[str, float], position: float) -> float:
        begin = 0.0
        for number, (end, first, last) in enumerate(self.phases):
            if position <= end or number == len(self.phases) - 1:
                part = (position - begin) / (end - begin)
                low, high = group[first], group[last]
                if self.arguments["linear"]:
                    return (high - low) * part + low
                return high + (low - high) / 2.0 * (math.cos(math.pi * part) + 1)
            begin = end
        raise ValueError("a one-cycle schedule has phases")


def stride_of(progress: Progress, old_batch: int, new_batch: int) -> float:
    """Returns how many of the old run's updates one new update counts for: 1 by updates, new / old by samples."""
    return 1.0 if progress == "updates" else new_batch / old_batch


def _cosine(base: float, at: float, given: Mapping[str, Any]) -> float:
    low = given["eta_min"]
    return low + (base - low) * (1 + math.cos(math.pi * at / given["T_max"])) / 2


def _restarts(base: float, at: float, given: Mapping[str, Any]) -> float:
    length, factor = given["T_0"], given["T_mult"]
    if factor == 1:
        within, period = at % length, length
    else:
        number = int(math.log(at / length * (factor - 1) + 1, factor) + 1e-12)
        within, period = at - length * (factor**number - 1) / (factor - 1), length * factor**number
    low = given["eta_min"]
    return low + (base - low) * (1 + math.cos(math.pi * within / period)) / 2


def _linear(base: float, at: float, given: Mapping[str, Any]) -> float:
    first, last, total = given["start_factor"], given["end_factor"], given["total_iters"]
    return base * (first + (last - first) * min(total, at) / total)


def _polynomial(base: float, at: float, given: Mapping[str, Any]) -> float:
    total = given["total_iters"]
    return base * (1 - min(total, at) / total) ** given["power"]


def _step(base: float, at: float, given: Mapping[str, Any]) -> float:
    return base * given["gamma"] ** (at // given["step_size"])


def _multi_step(base: float, at: float, given: Mapping[str, Any]) -> float:
    return base * given["gamma"] ** sum(count for mark, count in given["marks"] if mark <= at)


def _exponential(base: float, at: float, given: Mapping[str, Any]) -> float:
    return base * given["gamma"] ** at


def _constant(base: float, at: float, given: Mapping[str, Any]) -> float:
    return base * (given["factor"] if at < given["total_iters"] else 1.0)


def _as_it_is(base: float, at: float, given: Mapping[str, Any]) -> float:
    return base


_FORMULAS: dict[str, Callable[[float, float, Mapping[str, Any]], float]] = {
    "StepLR": _step,
    "MultiStepLR": _multi_step,
    "ExponentialLR": _exponential,
    "ConstantLR": _constant,
    "LinearLR": _linear,
    "PolynomialLR": _polynomial,
    "CosineAnnealingLR": _cosine,
    "CosineAnnealingWarmRestarts": _restarts,
    PLATEAU: _as_it_is,
}

TRAINER = "Trainer's "
"""Begins the kind of a schedule that Hugging Face's Trainer built: `Trainer's cosine`."""


def trainer_schedule(kind: str, base: tuple[float, ...], position: int, given: Mapping[str, Any]) -> Schedule:
    """Returns a schedule of Hugging Face's Trainer.

    Args:
        kind: `lr_scheduler_type`. base: rates by group. position: steps that were made.
        given: `warm_up` and `total` in steps, `rate` (the Trainer's `learning_rate`), and `lr_scheduler_kwargs`.

    Raises:
        ValueError: for a kind whose rates follow from more than that.
    """
    if kind not in TRAINER_FACTORS:
        raise ValueError(f"the Trainer's {kind} schedule follows more than its arguments")
    total = {} if kind in ("constant", "constant_with_warmup", "inverse_sqrt") else {"total_iters": given["total"]}
    return Schedule(TRAINER + kind, base, position, {**given, **total})


_NEEDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("CosineAnnealingWarmRestarts", ("T_0", "T_mult", "eta_min")),
    ("CosineAnnealingLR", ("T_max", "eta_min")),
    ("StepLR", ("step_size", "gamma")),
    ("LinearLR", ("start_factor", "end_factor", "total_iters")),
    ("PolynomialLR", ("total_iters", "power")),
    ("ConstantLR", ("factor", "total_iters")),
    ("ExponentialLR", ("gamma",)),
)
"""What tells one class's state from another's: torch does not save the class. Anything beside it is another class."""

_EVERY = frozenset(
    {"base_lrs", "last_epoch", "verbose", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr"}
)
"""What torch's base class saves (2.13, and earlier versions)."""


def schedulers_of(state: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    """Returns the schedulers that a run saved: one as it is, several from the mapping by number that holds them.

    >>> schedulers_of({"0": {"last_epoch": 4}, "1": {"last_epoch": 4}})
    ({'last_epoch': 4}, {'last_epoch': 4})
    """
    if not state:
        return ()
    numbered = [state.get(str(number)) for number in range(len(state))]
    parts = tuple(cast("Mapping[str, Any]", part) for part in numbered if isinstance(part, Mapping))
    return parts if len(parts) == len(state) > 1 else (state,)


def number_schedulers(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns several schedulers as one mapping by number, one as it is; the inverse of `schedulers_of`."""
    if len(found) < 2:
        return found[0] if found else None
    return {str(number): part for number, part in enumerate(found)}


def position_of(state: Mapping[str, Any] | None) -> int | None:
    """Returns how often a scheduler was stepped, `last_epoch`; of several if they agree."""
    found = {part.get("last_epoch") for part in schedulers_of(state)}
    position = found.pop() if len(found) == 1 else None
    return position if type(position) is int else None


def parse_schedule(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()) -> Schedule:
    """Reads the state dict of one of torch's schedulers.

    Args:
        state: what `scheduler.state_dict()` gave.
        groups: hyperparameters of the optimizer's groups, which `OneCycleLR` keeps its rates in; a plateau's are there
            too, or in its own `_last_lr`.

    Raises:
        UsageError: SR-SCHEDULE-UNKNOWN where the rates are not in the checkpoint: lambdas, and other classes.
    """
    return _checked(_read(state, groups), state)


def _read(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Schedule:
    if "lr_decay_style" in state and "num_steps" in state:
        return _read_megatron(state, groups)
    if (several := len(schedulers_of(state))) > 1:
        raise _unknown(f"there are {several}, and which of them sets the rates is the script's")
    position = state.get("last_epoch")
    if not isinstance(position, int):
        raise _unknown("it does not tell where it stands")
    if "patience" in state:
        return _read_plateau(state, groups, position)
    if "lr_lambdas" in state or "lmbdas" in state:
        raise _unknown("LambdaLR follows a function of the script, which is not saved")
    if "_schedulers" in state and "_milestones" in state:
        parts = tuple(_read(part, groups) for part in state["_schedulers"])
        marks = tuple(int(mark) for mark in state["_milestones"])
        return Schedule("SequentialLR", parts[0].base, position, {}, parts, marks)
    if "_schedule_phases" in state:
        return _read_one_cycle(state, groups, position)
    base = tuple(float(rate) for rate in state.get("base_lrs", ()))
    if not base:
        raise _unknown("it has no base rates")
    own = {str(name) for name in state} - _EVERY - {"T_cur", "T_i"}
    if own == {"milestones", "gamma"}:
        marks = sorted((int(mark), int(count)) for mark, count in dict(state["milestones"]).items())
        return Schedule("MultiStepLR", base, position, {"gamma": float(state["gamma"]), "marks": marks})
    for kind, names in _NEEDS:
        if own == set(names):
            return Schedule(kind, base, position, {name: float(state[name]) for name in names})
    raise _unknown(f"no class of torch's that has a formula saves {', '.join(sorted(map(str, state)))}")


def _checked(schedule: Schedule, state: Mapping[str, Any]) -> Schedule:
    """Returns the schedule if its formula gives the rates that the state says were set last.

    A subclass with a `get_lr` of its own, or rates that the script scaled by hand, is told by nothing else.
    """
    last = state.get("_last_lr")
    if not isinstance(last, list | tuple):
        return schedule
    found = [float(rate) for rate in cast("Sequence[Any]", last)]
    if not _rates_agree(schedule.rates(schedule.position), found, 1e-6):
        raise _unknown("the rates that it set last are not those of its class's formula")
    return schedule


def _read_one_cycle(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], position: int) -> Schedule:
    names = ("initial_lr", "max_lr", "min_lr")
    if not groups or any(name not in group for group in groups for name in names):
        raise _unknown("OneCycleLR keeps its rates in the optimizer's groups, which were not saved with it")
    peaks = tuple((float(g["initial_lr"]), float(g["max_lr"]), float(g["min_lr"])) for g in groups)
    phases = tuple((float(p["end_step"]), str(p["start_lr"]), str(p["end_lr"])) for p in state["_schedule_phases"])
    linear = float(state.get("_anneal_func_type") == "linear")
    return Schedule("OneCycleLR", tuple(p[0] for p in peaks), position, {"linear": linear}, peaks=peaks, phases=phases)


def _read_plateau(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], position: int) -> Schedule:
    """torch 2.13.0: a step without improvement counts as bad, and the rates fall at the step that makes more bad ones
    than `patience`; while it cools down, steps do not count."""
    rates = tuple(float(group["lr"]) for group in groups if "lr" in group) or tuple(
        map(float, state.get("_last_lr", ()))
    )
    if not rates:
        raise _unknown("ReduceLROnPlateau keeps its rates in the optimizer's groups, which were not saved with it")
    cooling = int(state["cooldown_counter"])
    bad = 0 if cooling else int(state["num_bad_epochs"])
    return Schedule(PLATEAU, rates, position, {}, certain=cooling + int(state["patience"]) - bad + 1)


def _read_megatron(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Schedule:
    """megatron-core 0.16.1, `optimizer_param_scheduler.py`. It is stepped by the samples of each update."""
    style, warm_up, position = str(state["lr_decay_style"]), int(state["lr_warmup_steps"]), int(state["num_steps"])
    if style not in ("constant", "linear", "cosine", "inverse-square-root"):
        raise _unknown(f"Megatron's {style} decay has parts that are not saved")
    if any(group.get("lr_mult", 1.0) != 1.0 for group in groups):
        raise _unknown("lr_mult means something in some versions of Megatron only")

    def own(group: Mapping[str, Any], name: str) -> float:
        return float(state[name] if group.get(name) is None else group[name])

    peaks = tuple((own(group, "max_lr"), own(group, "min_lr"), 0.0) for group in groups or ({},))
    given = {"style": style, "warm_up": warm_up, "decay": int(state["lr_decay_steps"])}
    base = tuple(high for high, _, _ in peaks)
    return Schedule(MEGATRON, base, position, given, peaks=peaks, unit="samples")


def _megatron(high: float, low: float, at: float, given: Mapping[str, Any]) -> float:
    style, warm_up, decay = given["style"], given["warm_up"], given["decay"]
    if warm_up and at < warm_up:
        raise ValueError("Megatron does not save the rate that its warm-up begins with")
    if style == "constant" or (warm_up and at == warm_up):
        return high
    if at > decay:
        return low
    if style == "inverse-square-root":
        return max(low, high * max(warm_up, 1) ** 0.5 / max(at, 1) ** 0.5)
    ratio = (at - warm_up) / (decay - warm_up)
    part = 1.0 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    return low + part * (high - low)


def _unknown(why: str) -> UsageError:
    return UsageError(
        Problem(
            "SR-SCHEDULE-UNKNOWN",
            f"the learning rates of the next updates cannot be computed: {why}",
            hint="compare the rates that the control's trace recorded; the job itself can print more of its schedule",
        )
    )


def check_rates(
    expected: Sequence[Sequence[float]], found: Sequence[Sequence[float]], *, first_update: int, rtol: float = 1e-6
) -> list[Problem]:
    """Returns SR-SCHEDULE-RATE for the first update whose rates are not those that the plan printed.

    Args:
        expected: rates by group of consecutive updates, from `next_rates`.
        found: what the job recorded for the same updates; fewer are compared as far as they go.
        first_update: index of the first.
        rtol: recursions and closed forms differ by rounding: 1e-6 leaves 1e10 steps of it in fp64.

    Groups may stand in another order. Where one side has more groups (a job may split or join them), the rates that
    occur must be the same.
    """
    for number, (wanted, got) in enumerate(zip(expected, found, strict=False)):
        if not _rates_agree(wanted, got, rtol):
            return [
                Problem(
                    "SR-SCHEDULE-RATE",
                    f"update {first_update + number} used another learning rate than the schedule says",
                    where={"update": first_update + number},
                    expected=[f"{rate:.6g}" for rate in wanted],
                    found=[f"{rate:.6g}" for rate in got],
                    hint="was the scheduler restored, stepped once per update, and its horizon kept?",
                )
            ]
    return []


def _rates_agree(wanted: Sequence[float], got: Sequence[float], rtol: float) -> bool:
    def close(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=rtol, abs_tol=1e-15)

    if len(wanted) == len(got):
        return all(map(close, sorted(wanted), sorted(got)))
    return all(any(close(a, b) for b in got) for a in wanted) and all(any(close(a, b) for a in wanted) for b in got)

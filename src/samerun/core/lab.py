"""The optimization lab's arithmetic: one weight, f(x) = x^2 / 2, and five update rules.

The one definition of every number that `samerun lab` shows. The page computes with the same operations in the same
order, and is checked against `lab_vectors` when it opens: addition, multiplication, division and square root are exact
IEEE operations in Python and in a browser, so both give the same bits. Powers are products for that reason.

Heavy-ball momentum and Adam are written as torch.optim.SGD and torch.optim.Adam (2.13) define them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

MOMENTUM = 0.9
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
HORIZON_UPDATES = 10
"""The schedule falls in a straight line and reaches zero after as many updates."""
SAMPLES = (3.0, -1.0, -3.0, 1.0)
"""The data set: sample i has the loss (x - SAMPLES[i])^2 / 2. Their mean is f, up to a constant."""
CHECKPOINT_UPDATES = 3
"""Where the lab's resumes begin: the checkpoint is taken after as many updates."""


class Rule(StrEnum):
    """How a run goes on from where it is."""

    GRADIENT = "gradient"
    MOMENTUM = "momentum"
    ADAM = "adam"
    SCHEDULE = "schedule"
    SAMPLES = "samples"


@dataclass(frozen=True, slots=True)
class LabState:
    """Everything that decides how a run goes on, but its learning rate and its rule."""

    x: float
    """The weight: what a look at the current value shows."""
    m: float = 0.0
    """Momentum, or Adam's mean of gradients."""
    v: float = 0.0
    """Adam's mean of squared gradients."""
    step: int = 0
    """Adam's own count of updates; decides its bias correction."""
    index: int = 0
    """Where the schedule stands, in updates."""
    cursor: int = 0
    """How many samples have been consumed."""


HIDDEN: dict[Rule, tuple[str, ...]] = {
    Rule.GRADIENT: (),
    Rule.MOMENTUM: ("m",),
    Rule.ADAM: ("m", "v", "step"),
    Rule.SCHEDULE: ("index",),
    Rule.SAMPLES: ("cursor",),
}
"""What a run under each rule needs beside x; everything else keeps its default."""


def gradient(rule: Rule, state: LabState) -> float:
    """Returns the gradient that the next update uses: f'(x) = x, or that of the next sample's loss.

    >>> gradient(Rule.GRADIENT, LabState(2.0)), gradient(Rule.SAMPLES, LabState(2.0, cursor=1))
    (2.0, 3.0)
    """
    return state.x - SAMPLES[state.cursor % len(SAMPLES)] if rule is Rule.SAMPLES else state.x


def rate(rule: Rule, eta: float, state: LabState) -> float:
    """Returns the learning rate that the next update uses.

    >>> rate(Rule.SCHEDULE, 0.5, LabState(2.0, index=5)), rate(Rule.ADAM, 0.5, LabState(2.0, index=5))
    (0.25, 0.5)
    """
    if rule is not Rule.SCHEDULE:
        return eta
    return eta * (max(HORIZON_UPDATES - state.index, 0) / HORIZON_UPDATES)


def advance(rule: Rule, eta: float, state: LabState) -> LabState:
    """Returns the state after one update.

    >>> advance(Rule.GRADIENT, 1.5, LabState(2.0)).x
    -1.0
    >>> advance(Rule.MOMENTUM, 0.1, LabState(2.0, m=1.0))
    LabState(x=1.71, m=2.9, v=0.0, step=0, index=0, cursor=0)
    """
    g = gradient(rule, state)
    now = rate(rule, eta, state)
    match rule:
        case Rule.GRADIENT:
            return replace(state, x=state.x - now * g)
        case Rule.MOMENTUM:
            m = MOMENTUM * state.m + g
            return replace(state, x=state.x - now * m, m=m)
        case Rule.ADAM:
            return _advance_adam(now, g, state)
        case Rule.SCHEDULE:
            return replace(state, x=state.x - now * g, index=state.index + 1)
        case Rule.SAMPLES:
            return replace(state, x=state.x - now * g, cursor=state.cursor + 1)


def _advance_adam(eta: float, g: float, state: LabState) -> LabState:
    step = state.step + 1
    m = BETA1 * state.m + (1.0 - BETA1) * g
    v = BETA2 * state.v + (1.0 - BETA2) * (g * g)
    mean = m / (1.0 - power(BETA1, step))
    spread = math.sqrt(v / (1.0 - power(BETA2, step)))
    return replace(state, x=state.x - eta * mean / (spread + EPSILON), m=m, v=v, step=step)


def power(base: float, exponent: int) -> float:
    """Returns `base` multiplied by itself, factor by factor: every platform rounds that alike.

    >>> power(0.5, 3), power(0.9, 0)
    (0.125, 1.0)
    """
    product = 1.0
    for _ in range(exponent):
        product *= base
    return product


def forget(state: LabState, parts: Iterable[str]) -> LabState:
    """Returns the state of a resume that restored everything but `parts`, which start as in a new run.

    >>> forget(LabState(0.5, m=2.0, v=3.0, step=7), ["m", "step"])
    LabState(x=0.5, m=0.0, v=3.0, step=0, index=0, cursor=0)

    Raises:
        ValueError: if a part is not one that a resume can lose.
    """
    fresh = LabState(state.x)
    lost = {part: getattr(fresh, part, None) for part in parts}
    if unknown := [part for part, value in lost.items() if value is None or part == "x"]:
        raise ValueError(f"no part of the state is called {', '.join(unknown)}")
    return replace(state, **lost)


def is_right(predicted: float, actual: float) -> bool:
    """Returns whether a prediction is right: within a thousandth of the value.

    >>> is_right(0.25, 0.25), is_right(-0.25, 0.25), is_right(0.0, 0.0)
    (True, False, True)
    """
    return abs(predicted - actual) <= 0.001 * abs(actual)


def trajectory(rule: Rule, eta: float, start: LabState, num_updates: int) -> tuple[LabState, ...]:
    """Returns the states from `start` on, which comes first; `num_updates + 1` in all.

    >>> [state.x for state in trajectory(Rule.GRADIENT, 1.5, LabState(2.0), 3)]
    [2.0, -1.0, 0.5, -0.25]
    """
    states = [start]
    for _ in range(num_updates):
        states.append(advance(rule, eta, states[-1]))
    return tuple(states)


def lab_vectors() -> list[dict[str, Any]]:
    """Returns runs with every number that they pass through, as plain JSON data.

    Numbers are written so that reading them gives back the same double. Each has `rule`, `eta`, `lost` (what a resume
    after `CHECKPOINT_UPDATES` did not restore; None for a run that was not resumed) and `states`.
    """
    vectors: list[dict[str, Any]] = []
    for rule in Rule:
        for eta, x0 in ((0.5, 2.0), (1.5, 2.0), (0.1, -1.7), (0.3, 1e-3), (2.5, 123.456)):
            whole = trajectory(rule, eta, LabState(x0), 3 * CHECKPOINT_UPDATES)
            vectors.append(_vector(rule, eta, None, whole))
            saved = whole[CHECKPOINT_UPDATES]
            for lost in (HIDDEN[rule], *((part,) for part in HIDDEN[rule] if len(HIDDEN[rule]) > 1)):
                if lost:
                    resumed = trajectory(rule, eta, forget(saved, lost), 2 * CHECKPOINT_UPDATES)
                    vectors.append(_vector(rule, eta, lost, resumed))
    return vectors


def _vector(rule: Rule, eta: float, lost: tuple[str, ...] | None, states: tuple[LabState, ...]) -> dict[str, Any]:
    rows = [asdict(state) for state in states]
    return {"rule": rule.value, "eta": eta, "lost": None if lost is None else list(lost), "states": rows}

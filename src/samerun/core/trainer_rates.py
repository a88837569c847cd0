"""The learning-rate schedules of Hugging Face's Trainer, as factors of the base rate.

They are functions of the script to torch (`LambdaLR`), and so in no scheduler's state; but the Trainer builds them from
its arguments, which are in the checkpoint. Formulas of transformers 5.24.0 (`optimization.py`), compared with the rates
that its schedulers set (`tests/golden/order/trainer_schedule.json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Given = Mapping[str, Any]
"""`warm_up` and `total` in steps, and the schedule's own arguments."""
Factor = Callable[[float, Given], float]


def _warming(at: float, given: Given) -> float | None:
    return at / max(1, given["warm_up"]) if at < given["warm_up"] else None


def _part(at: float, given: Given) -> float:
    """How much of the steps after the warm-up is done."""
    return (at - given["warm_up"]) / max(1, given["total"] - given["warm_up"])


def _wave(part: float, cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * part))


def _linear(at: float, given: Given) -> float:
    return max(0.0, 1.0 - _part(at, given))


def _cosine(at: float, given: Given) -> float:
    return max(0.0, _wave(_part(at, given), given.get("num_cycles", 0.5)))


def _restarts(at: float, given: Given) -> float:
    part = _part(at, given)
    return 0.0 if part >= 1.0 else max(0.0, _wave(given.get("num_cycles", 1) * part % 1.0, 0.5))


def _polynomial(at: float, given: Given) -> float:
    end = given.get("lr_end", 1e-7) / given["rate"]
    if at > given["total"]:
        return end
    left = 1 - (at - given["warm_up"]) / (given["total"] - given["warm_up"])
    return (1 - end) * left ** given.get("power", 1.0) + end


def _inverse_root(at: float, given: Given) -> float:
    scale = given.get("timescale") or given["warm_up"] or 10_000
    return 1.0 / math.sqrt((at + scale - given["warm_up"]) / scale)


def _cosine_to_least(at: float, given: Given) -> float:
    least = given["min_lr"] / given["rate"] if given.get("min_lr") is not None else given["min_lr_rate"]
    return max(0.0, _wave(_part(at, given), given.get("num_cycles", 0.5)) * (1 - least) + least)


_BENDS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda part, cycles: 1.0 - part,
    "cosine": _wave,
    "1-sqrt": lambda part, cycles: 1.0 - math.sqrt(part),
}
"""How a warm-up, stable, decay schedule falls; its warm-up rises by what these leave of 1."""


def _stable(at: float, given: Given) -> float:
    least, warm_up, decay = given.get("min_lr_ratio", 0), given["warm_up"], given["num_decay_steps"]
    stable = given.get("num_stable_steps")
    begin = warm_up + stable if stable is not None else given["total"] - decay
    if at < warm_up:
        bent = _BENDS[given.get("warmup_type", "linear")]
        part = at / max(1, warm_up)
        rise = 1.0 - math.sqrt(1.0 - part) if bent is _BENDS["1-sqrt"] else 1.0 - bent(part, 0.5)
        return max(0.0, rise * (1.0 - least) + least)
    if at < begin:
        return 1.0
    if at >= begin + decay:
        return least
    fall = _BENDS[given.get("decay_type", "cosine")]((at - begin) / max(1, decay), given.get("num_cycles", 0.5))
    return max(0.0, fall * (1.0 - least) + least)


def _after_warm_up(factor: Factor) -> Factor:
    def whole(at: float, given: Given) -> float:
        warming = _warming(at, given)
        return factor(at, given) if warming is None else warming

    return whole


TRAINER_FACTORS: dict[str, Factor] = {
    "constant": lambda at, given: 1.0,
    "constant_with_warmup": _after_warm_up(lambda at, given: 1.0),
    "linear": _after_warm_up(_linear),
    "cosine": _after_warm_up(_cosine),
    "cosine_with_restarts": _after_warm_up(_restarts),
    "polynomial": _after_warm_up(_polynomial),
    "inverse_sqrt": _after_warm_up(_inverse_root),
    "cosine_with_min_lr": _after_warm_up(_cosine_to_least),
    "warmup_stable_decay": _stable,
}
"""By `lr_scheduler_type`: the factor of every group's base rate after so many steps."""

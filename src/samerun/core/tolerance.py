"""Tolerances: how far a candidate may lie from the control, per metric and update, and where that limit comes from.

A limit is declared before any candidate runs, from one of four places, and the band remembers which:

* `control`: the reference was run again with a harmlessly different order of summation. What those two runs differ
  by is what rounding alone does to this model on this data, so the limit is
  `max(floor, factor x the largest deviation seen up to that update)`. The running maximum is taken because rounding
  differences feed back through the weights and do not shrink again, while a single update may agree by luck.
* `precision`: the controls repeat bit for bit, or there is only one; the floor alone is the limit.
* `analysis`: the bound of `samerun.core.rounding`, from the type, the lengths of sums, the depth and the statistics of
  the control's gradients.
* `user`: a number and a reason, taken as they are.

The floor is numerical analysis, not experience. Two orders of summing the same n rounded terms differ by about
`u * sqrt(n)` and hardly ever by more than a small multiple of it, with `u` the unit round-off of the type in which the
terms are computed (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput.
41(5), 2019). A mean divides by n, so the rounding of its n terms leaves a relative `u / sqrt(n)`; the accumulation
itself runs in fp32 and leaves some `u32`. Hence `floor = max(accumulated x u32, rounded x u / sqrt(n))`. A metric of
single examples averages nothing, so there n is 1; and a norm that is held in the compute type cannot be known better
than `2 u`. The two factors say how much arithmetic lies between the inputs and the metric (`GROWTH`), and `CEILING` is
the point at which a band no longer judges anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from samerun.core.dtype import DTYPES, DType
from samerun.errors import Problem

METRICS = (*("loss", "grad_norm", "update_norm", "parameter_gradient", "parameter_delta", "eval_loss", "eval_logits"),)

PER_TENSOR = ("parameter_gradient", "parameter_delta")
"""Metrics that every tensor has a band of its own for."""

DIRECTIONS = ("gradient_direction", "change_direction")
"""Where each tensor's gradient and change point in the first update; `verify.updates.directions` makes their bands."""

_EACH = (*PER_TENSOR, *DIRECTIONS)

GROWTH: Mapping[str, tuple[float, float]] = {
    "loss": (16.0, 4.0),  # one mean over all tokens behind the whole forward pass
    "grad_norm": (128.0, 128.0),  # forward, backward and a sum of squares over all parameters
    "update_norm": (64.0, 32.0),  # the same, through the optimizer, which divides by small numbers
    "parameter_gradient": (256.0, 256.0),  # one tensor alone: little averages its noise away
    "parameter_delta": (256.0, 256.0),  # the same, through the optimizer
    "eval_loss": (8.0, 2.0),  # of one example, without dividing by its tokens
    "eval_logits": (16.0, 4.0),  # the largest of many differences, against the largest logit
}
"""How many round-offs of difference are ordinary for each metric when only the order of sums changed: `accumulated` in
units of fp32's, `rounded` in units of the compute type's over sqrt(n).

Measured between layouts (4 ranks to 3, 2, TP 2 x DP 2, HSDP 2 x 2) on a small GPT; `docs/judging.md` has the table."""

SINGLE = frozenset({"eval_loss", "eval_logits"})
"""Metrics of single examples: nothing is averaged, whatever the size of an update."""

HELD_IN_COMPUTE_TYPE = frozenset({"grad_norm", "parameter_gradient"})
"""Metrics that a trainer may hold in the compute type itself: clipping computes the norm of bf16 gradients in bf16."""

CEILING: Mapping[str, float] = {
    "loss": 0.02,
    "grad_norm": 0.25,
    "update_norm": 0.25,
    "parameter_gradient": 0.25,
    "parameter_delta": 0.5,
    "eval_loss": 0.05,
    "eval_logits": 0.1,
    "gradient_direction": 0.7,
    "change_direction": 0.7,
}
"""Largest relative limit that still judges something: beyond it a wrongly scaled gradient, a reset optimizer or a wrong
batch could hide inside the band. No band from controls is wider."""

SPARE = 3.0
"""A band must be at least this many times as wide as what the controls themselves differ by. Where the ceiling leaves
less, an innocent candidate could fail, so the answer is to abstain."""

Origin = Literal["control", "precision", "analysis", "user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The limit for one metric, update by update.

    `limits[i]` belongs to update `first_update + i`; a metric measured once (evaluation) has one limit. `observed` are
    the controls' own deviations, in the same order. `tensor` names the tensor for metrics that every tensor has
    (`PER_TENSOR` and `DIRECTIONS`).
    """

    metric: str
    first_update: int
    limits: tuple[float, ...]
    origin: Origin
    absolute: bool = False
    floor: float = 0.0
    factor: float | None = None
    observed: tuple[float, ...] = ()
    reason: str = ""
    tensor: str | None = None

    def __post_init__(self) -> None:
        if self.metric not in CEILING:
            raise ValueError(f"unknown metric {self.metric!r}; known: {', '.join(CEILING)}")
        if not self.limits:
            raise ValueError(f"the band for {self.metric} has no limits")
        if bad := [limit for limit in self.limits if math.isnan(limit) or limit < 0]:
            raise ValueError(f"limits for {self.metric} must be 0 or more, not {bad[0]!r}")

    def limit(self, update: int) -> float:
        """Returns the limit at `update`. Raises ValueError outside the window the band was made for."""
        index = update - self.first_update
        if not 0 <= index < len(self.limits):
            last = self.first_update + len(self.limits) - 1
            raise ValueError(f"update {update} is outside the band for {self.metric}, {self.first_update}..{last}")
        return self.limits[index]

    def covers(self, update: int) -> bool:
        """Returns whether the band has a limit for `update`."""
        return 0 <= update - self.first_update < len(self.limits)

    def to_json(self) -> dict[str, Any]:
        """Returns the form that is sealed."""
        return {
            "metric": self.metric,
            "tensor": self.tensor,
            "origin": self.origin,
            "absolute": self.absolute,
            "first_update": self.first_update,
            "limits": list(self.limits),
            "floor": self.floor,
            "factor": self.factor,
            "observed": list(self.observed),
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads the sealed form back."""
        fields: dict[str, Any] = {**body, "limits": tuple(body["limits"]), "observed": tuple(body["observed"])}
        return cls(**fields)


def deviation(control: float, candidate: float, *, absolute: bool = False) -> float:
    """Returns how far `candidate` lies from `control`: relative to the control unless `absolute`.

    A control of exactly zero makes the deviation absolute: relative to nothing, everything is infinite. Two numbers of
    which one is not finite are infinitely far apart, never equal.

    >>> deviation(2.0, 2.5)
    0.25
    >>> deviation(1.0, float("nan"))
    inf
    """
    if not (math.isfinite(control) and math.isfinite(candidate)):
        return math.inf
    distance = abs(candidate - control)
    return distance if absolute or control == 0 else distance / abs(control)


def running_max(values: Sequence[float]) -> tuple[float, ...]:
    """Returns, at each place, the largest value so far.

    >>> running_max([1.0, 0.5, 2.0])
    (1.0, 1.0, 2.0)
    """
    largest = 0.0
    result: list[float] = []
    for value in values:
        largest = max(largest, value)
        result.append(largest)
    return tuple(result)


ASSUMED_TERMS = 256
"""How many tokens an update is taken to average over, for the floors, where nobody counts them."""


def terms_per_update(tokens: int | None, updates: int | None) -> int:
    """Returns how many tokens an update averages over, from those committed since the run began.

    >>> terms_per_update(12000, 12), terms_per_update(None, 12)
    (1000, 256)
    """
    return max(tokens // updates, 1) if tokens and updates else ASSUMED_TERMS


def precision_floor(metric: str, dtype: DType, num_terms: int) -> float:
    """Returns the relative difference that a changed order of sums may make to `metric` (see the module's formula).

    Args:
        metric: one of `METRICS`.
        dtype: the type in which activations and gradients are computed.
        num_terms: valid tokens (or samples) of one update, over which its metrics average.
    """
    accumulation = DTYPES["float32"].unit_roundoff if dtype.num_bytes <= 4 else dtype.unit_roundoff
    terms = 1 if metric in SINGLE else max(num_terms, 1)
    accumulated, rounded = GROWTH[metric]
    floor = max(accumulated * accumulation, rounded * dtype.unit_roundoff / math.sqrt(terms))
    return max(floor, 2 * dtype.unit_roundoff) if metric in HELD_IN_COMPUTE_TYPE else floor


def band_from_controls(
    metric: str,
    first_update: int,
    observed: Sequence[Sequence[float]],
    *,
    factor: float,
    floor: float,
    absolute: bool = False,
    tensor: str | None = None,
) -> Band:
    """Returns the band that repeated controls give: `max(floor, factor x running maximum)` at each update.

    A relative band does not become wider than the metric's ceiling.

    Args:
        metric: one of `METRICS`.
        first_update: the update that the first deviation belongs to.
        observed: one row of deviations per repetition, each against the first control; at least one row.
        factor: how many times the observed variation is allowed.
        floor: smallest limit, in the same unit as the deviations.
        absolute: whether the deviations are absolute.
        tensor: the tensor's name, for a metric that is measured per tensor.
    """
    worst = tuple(max(column) for column in zip(*observed, strict=True))
    largest = running_max(worst)
    ceiling = math.inf if absolute else max(CEILING[metric], floor)
    return Band(
        metric=metric,
        tensor=tensor,
        first_update=first_update,
        limits=tuple(min(max(floor, factor * value), ceiling) for value in largest),
        origin="control" if max(largest) > 0 else "precision",
        absolute=absolute,
        floor=floor,
        factor=factor,
        observed=worst,
    )


def band_from_user(
    metric: str, first_update: int, num_updates: int, *, limit: float, reason: str, absolute: bool = False
) -> Band:
    """Returns a band with the user's own limit and the reason given for it."""
    return Band(
        metric=metric,
        first_update=first_update,
        limits=(limit,) * num_updates,
        origin="user",
        absolute=absolute,
        reason=reason,
    )


def band_from_analysis(
    metric: str, first_update: int, limits: Sequence[float], *, reason: str, tensor: str | None = None
) -> Band:
    """Returns a band with the bounds of an analysis; an infinite one says that nothing is known there."""
    return Band(
        metric=metric,
        first_update=first_update,
        limits=tuple(limits),
        origin="analysis",
        reason=reason,
        tensor=tensor,
    )


def bands_to_json(bands: Sequence[Band], noise: Sequence[str]) -> dict[str, Any]:
    """Returns the sealed form: a band by metric, one by tensor for those that each has, and the tensors left out."""
    body: dict[str, Any] = {"parameter_delta": {}, "noise": list(noise)}
    for band in bands:
        if band.tensor is not None:
            body.setdefault(band.metric, {})[band.tensor] = band.to_json()
        else:
            body[band.metric] = band.to_json()
    return body


def bands_from_json(body: Mapping[str, Any]) -> tuple[Band, ...]:
    """Reads `bands_to_json` back."""
    whole = [Band.from_json(item) for name, item in body.items() if name not in (*_EACH, "noise")]
    each = [Band.from_json(item) for name in _EACH for item in body.get(name, {}).values()]
    return (*whole, *each)


def check_band(band: Band) -> list[Problem]:
    """Returns a finding when the band judges nothing: the controls disagree too much, or the floor is too high.

    A limit that the user gave is the user's decision and is not questioned; neither is an absolute one, whose scale is
    not known here.
    """
    ceiling = CEILING[band.metric]
    if band.origin == "user" or band.absolute:
        return []
    if band.origin == "analysis":
        return _check_bound(band, ceiling)
    spread = running_max(band.observed)
    noisy = [index for index, value in enumerate(spread) if value * SPARE > ceiling]
    if not noisy and band.floor <= ceiling:
        return []
    first = noisy[0] if noisy else 0
    return [
        Problem(
            "SR-CONTROL-NOISY",
            f"the controls differ so much in {band.metric} that no candidate could be judged by it"
            if noisy
            else f"the floor of {band.metric} is so high that no candidate could be judged by it",
            where={"update": band.first_update + first, "key": band.metric, "stage": "control"},
            expected=f"a deviation of at most {ceiling / SPARE:.3g}" if noisy else f"a floor of at most {ceiling:g}",
            found=f"{spread[first]:.3g}" if noisy else f"{band.floor:.3g}",
            hint="make the run more repeatable (deterministic kernels, fp32, dropout off), shorten the window, or give "
            f"tolerances.{band.metric} your own limit with its reason",
        )
    ]


def _check_bound(band: Band, ceiling: float) -> list[Problem]:
    wide = next((place for place, limit in enumerate(band.limits) if not limit <= ceiling), None)
    if wide is None:
        return []
    return [
        Problem(
            "SR-CONTROL-NOISY",
            f"the bound that analysis gives for {band.metric} is so wide that no candidate could be judged by it",
            where={"update": band.first_update + wide, "key": band.metric, "stage": "control"},
            expected=f"a bound of at most {ceiling:g}",
            found=f"{band.limits[wide]:.3g}",
            hint="shorten the window, measure it on the controls ({from: control}), or give "
            f"tolerances.{band.metric} your own limit with its reason",
        )
    ]

"""Where two runs part first: the module whose output differs, the parameter whose gradient does. Pure.

A loss or a norm says that something differs; these say where to look. They decide nothing: the sealed bands do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samerun.core.tolerance import deviation

Modules = Sequence[tuple[str, float, int]]
"""Name, L2 norm of the output and its elements, in the order of the forward pass."""


Details = Mapping[str, tuple[float, str]]
"""By module: L2 norm of the output projected on fixed signs, and its element type."""


@dataclass(frozen=True, slots=True)
class Place:
    """The first place of a difference: its name, the control's number there and the candidate's.

    `reordered` is set where those agree and only the `projections` do not: the same features, in another order.
    """

    name: str
    expected: float
    found: float
    reordered: bool = False
    projections: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.reordered:
            return f"{self.name} (of the same norm, {self.found:.9g}, and other features)"
        return f"{self.name} ({self.found:.9g}, in the control {self.expected:.9g})"


def first_module(
    control: Modules, candidate: Modules, limit: float, *, details: tuple[Details, Details] = ({}, {})
) -> Place | None:
    """Returns the first module, in the order of the control's forward pass, whose output differs by over `limit`.

    Outputs of another size are passed over: a tensor-parallel rank sees its own part only. A module comes after those
    inside it, so the first one is the innermost. Where norms agree, the projections in `details` (the control's, the
    candidate's) are compared, relative to the norm.
    """
    found = {name: (norm, elements) for name, norm, elements in candidate}
    for name, norm, elements in control:
        other, count = found.get(name, (norm, 0))
        if count != elements:
            continue
        if deviation(norm, other) > limit:
            return Place(name, norm, other)
        one, two = (side.get(name) for side in details)
        if one is not None and two is not None and norm and not abs(one[0] - two[0]) / norm <= limit:
            return Place(name, norm, other, reordered=True, projections=(one[0], two[0]))
    return None


def other_dtype(control: Details, candidate: Details) -> tuple[str, str, str] | None:
    """Returns (module, the control's element type, the candidate's) of the first module that gives out another type."""
    for name, (_, dtype) in control.items():
        if name in candidate and candidate[name][1] != dtype:
            return name, dtype, candidate[name][1]
    return None


def common_factor(control: Mapping[str, float], candidate: Mapping[str, float]) -> float | None:
    """Returns the one factor by which every norm differs, to a part in a hundred of its distance from 1, if it is one.

    >>> common_factor({"a": 1.0, "b": 2.0}, {"a": 0.75, "b": 1.5})
    0.75
    """
    ratios = sorted(candidate[name] / norm for name, norm in control.items() if norm > 0 and name in candidate)
    if len(ratios) < 2:
        return None
    middle = ratios[len(ratios) // 2]
    within = all(abs(ratio - middle) <= 0.01 * abs(middle - 1) for ratio in ratios)
    return middle if within and middle != 1 else None


def worst_gradient(control: Mapping[str, float] | None, candidate: Mapping[str, float] | None) -> Place | None:
    """Returns the parameter whose gradient norm differs most, as a part of the whole gradient; None if none differs."""
    if not control or not candidate:
        return None
    shared = control.keys() & candidate.keys()
    differing = {name: _distance(control[name], candidate[name]) for name in shared if control[name] != candidate[name]}
    if not differing:
        return None
    name = min(differing, key=lambda name: (-differing[name], name))
    return Place(name, control[name], candidate[name])


def _distance(expected: float, found: float) -> float:
    return abs(expected - found) if math.isfinite(found) else math.inf

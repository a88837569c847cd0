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


@dataclass(frozen=True, slots=True)
class Place:
    """The first place of a difference: its name, the control's number there and the candidate's."""

    name: str
    expected: float
    found: float

    def __str__(self) -> str:
        return f"{self.name} ({self.found:.9g}, in the control {self.expected:.9g})"


def first_module(control: Modules, candidate: Modules, limit: float) -> Place | None:
    """Returns the first module, in the order of the control's forward pass, whose output norm differs by over `limit`.

    Outputs of another size are passed over: a tensor-parallel rank sees its own part only. A module comes after those
    inside it, so the first one is the innermost.
    """
    found = {name: (norm, elements) for name, norm, elements in candidate}
    for name, norm, elements in control:
        other, count = found.get(name, (norm, 0))
        if count == elements and deviation(norm, other) > limit:
            return Place(name, norm, other)
    return None


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

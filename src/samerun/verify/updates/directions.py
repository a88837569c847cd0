"""Which way each tensor's gradient and change point in the first update, against the control's.

Norms do not see a tensor that moves the other way, or whose elements change places. The recorder keeps a few
projections of each, from which follows how far two directions lie apart: 0 if equal, 1.4 if unrelated, 2 if opposite.
The bands are coarse: fine differences are what the norms are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from samerun.core.dtype import DType
from samerun.core.sketch import apart
from samerun.core.tolerance import Band, band_from_controls, check_band
from samerun.errors import Problem, Severity
from samerun.manifest.tolerances import AnalysisTolerance, ControlTolerance, UserTolerance
from samerun.verify.evidence.observed import ObservedUpdate
from samerun.verify.evidence.window import WindowPlan
from samerun.verify.updates.controls import Controls, Tolerance

Pairs = Sequence[tuple[ObservedUpdate, ObservedUpdate]]
Directions = Mapping[str, Sequence[float]]

FACTOR = 10.0
"""Times the controls' own difference, where the manifest has no factor for the change of a parameter."""

_FULL_BYTES = 4
_FLOORS = (0.05, 0.4)
"""Smallest limits: in fp32 and wider, and in 16 bits, where Adam turns a good part of small elements round."""


@dataclass(frozen=True, slots=True)
class _Kind:
    metric: str
    read: Callable[[ObservedUpdate], Directions | None]
    what: str
    kind: str | None


_KINDS = (
    _Kind("gradient_direction", lambda item: item.gradients_direction, "gradient", "loss normalisation"),
    _Kind("change_direction", lambda item: item.moved_direction, "change", None),
)
"""In causal order."""


def direction_floor(dtype: DType) -> float:
    """Returns the smallest limit for directions of a run that computes in `dtype`."""
    return _FLOORS[dtype.num_bytes < _FULL_BYTES]


def direction_bands(controls: Controls, tolerance: Tolerance, update: int, precision: DType) -> list[Band]:
    """Returns a band for every direction that the reference recorded in its first update.

    Args:
        controls: the controls.
        tolerance: that of `parameter_delta`: its factor counts, or `FACTOR`, and its floor or limit if that is larger
            than the floor for directions.
        update: the first update.
        precision: the type in which the run computes.
    """
    found = [item for observed in controls.observed if (item := observed.by_update().get(update)) is not None]
    if not found:
        return []
    reference, *others = found
    factor = tolerance.factor if isinstance(tolerance, ControlTolerance) else FACTOR
    floor = max(direction_floor(precision), _stated(tolerance))
    bands: list[Band] = []
    for kind in _KINDS:
        recorded = [kind.read(item) or {} for item in others]
        for tensor, direction in sorted((kind.read(reference) or {}).items()):
            rows = [[apart(direction, other[tensor])] for other in recorded if tensor in other] or [[0.0]]
            bands.append(band_from_controls(kind.metric, update, rows, factor=factor, floor=floor, tensor=tensor))
    return bands


def _stated(tolerance: Tolerance) -> float:
    """Returns by how much the norm of a change may differ in any case: its direction may as well."""
    if tolerance.absolute or isinstance(tolerance, AnalysisTolerance):
        return 0.0
    return tolerance.limit if isinstance(tolerance, UserTolerance) else tolerance.floor or 0.0


def split_directions(bands: Sequence[Band], vanish: frozenset[str]) -> tuple[list[Band], list[Problem]]:
    """Returns the bands of directions that judge, and notes about those in which the controls themselves differ.

    A gradient that is rounding alone (`vanish`) points anywhere, and so does what Adam makes of it.
    """
    kept: list[Band] = []
    notes: list[Problem] = []
    for kind in _KINDS:
        all_of = [band for band in bands if band.metric == kind.metric and band.tensor not in vanish]
        noisy = {band.tensor: band for band in all_of if check_band(band)}
        kept += [band for band in all_of if band.tensor not in noisy]
        if noisy:
            worst = max(noisy.values(), key=lambda band: max(band.observed))
            notes.append(_not_judged(kind, worst, len(noisy), len(all_of)))
    return kept, notes


def _not_judged(kind: _Kind, worst: Band, count: int, total: int) -> Problem:
    return Problem(
        "SR-CONTROL-DIRECTION",
        f"the {kind.what} of {count} of {total} tensors points elsewhere in each control, so that its direction is not "
        "judged",
        Severity.NOTE,
        where={"stage": "control", "key": kind.metric, "tensor": worst.tensor, "update": worst.first_update},
        found=f"{max(worst.observed):.3g}",
        hint="their norms are judged all the same; a more repeatable run (fp32, deterministic kernels) judges both",
    )


def check_directions(pairs: Pairs, plan: WindowPlan, worst: dict[str, dict[str, object]]) -> Iterator[Problem]:
    """Compares the directions of the first update, tensor by tensor; one finding each for gradients and changes."""
    for kind in _KINDS:
        bands = {band.tensor: band for band in plan.bands if band.metric == kind.metric}
        for control, candidate in pairs if bands else ():
            expected, found = kind.read(control), kind.read(candidate)
            if expected is None or found is None:
                continue
            rows: list[tuple[float, str, Band]] = []
            for tensor in sorted(expected.keys() & found.keys()):
                band = bands.get(tensor)
                if band is not None and band.covers(candidate.update):
                    rows.append((apart(expected[tensor], found[tensor]), tensor, band))
            rows.sort(key=lambda row: -row[0] / row[2].limit(candidate.update))
            if not rows:
                continue
            distance, tensor, band = rows[0]
            limit = band.limit(candidate.update)
            worst[kind.metric] = {
                "used": distance / limit,
                "update": candidate.update,
                "deviation": distance,
                "limit": limit,
                "tensor": tensor,
            }
            outside = [row for row in rows if row[0] > row[2].limit(candidate.update)]
            if outside:
                yield _turned(kind, outside, candidate, plan)


def _turned(
    kind: _Kind, outside: Sequence[tuple[float, str, Band]], candidate: ObservedUpdate, plan: WindowPlan
) -> Problem:
    distance, first, band = outside[0]
    others = ", ".join(tensor for _, tensor, _ in outside[1:6])
    plural = f"the {kind.what}s of {len(outside)} tensors point" if others else f"the {kind.what} of a tensor points"
    return Problem(
        "SR-UPD-DIRECTION",
        f"{plural} another way than the control's in update {candidate.update}, most of all that of {first}",
        where=candidate.where(stage=plan.stage, tensor=first, key=kind.metric),
        expected=f"a distance of at most {band.limit(candidate.update):.3g} between the two directions",
        found=f"{distance:.3g} (0 is the same way, 1.4 an unrelated one, 2 the opposite)",
        hint=(f"also {others}; " if others else "")
        + "a sign is turned or elements are in other places: look at how it is cut, fused or transposed, and at its "
        "moments",
        kind=kind.kind,
    )

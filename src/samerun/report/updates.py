"""Charts of the numbers that were compared: updates of the window, fixed examples, the change of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from samerun.core.tolerance import Band, deviation
from samerun.report.charts import Chart, Panel, Series, Value, number_text
from samerun.report.model import EVAL, ReportModel
from samerun.verify.evidence.observed import Observed, ObservedUpdate
from samerun.verify.updates.numbers import NUMBERS

_TITLES: Mapping[str, str] = {
    "loss": "Loss",
    "grad_norm": "Gradient norm before clipping",
    "update_norm": "Norm of the update",
}

MAX_BESIDE = 200
"""Updates of the control that are drawn however few the candidate made."""


def plan_charts(model: ReportModel) -> tuple[Chart, ...]:
    """Returns the charts that there is anything to draw for."""
    return (*_update_charts(model), *_evaluation_chart(model), *_movement_chart(model))


def _update_charts(model: ReportModel) -> Iterator[Chart]:
    control = model.control.observed if model.control else None
    candidate = model.followed.observed if model.followed else None
    indices = _indices(control, candidate)
    if not indices:
        return
    names = tuple(map(str, indices))
    bands = {band.metric: band for band in model.bands if band.tensor is None}
    repeats = [job.observed.by_update() for job in model.controls[1:]]
    one, two = _by_update(control), _by_update(candidate)
    for metric in NUMBERS:
        left, right = _column(one, indices, metric), _column(two, indices, metric)
        if not any(value is not None for value in (*left, *right)):
            continue
        band = bands.get(metric)
        others = [_column(repeat, indices, metric) for repeat in repeats]
        yield _compared(metric, names, indices, left, right, others, band)
    if one or two:
        yield _rates(names, indices, one, two)


def _indices(control: Observed | None, candidate: Observed | None) -> list[int]:
    """Returns the updates to draw: all of them, but of a ledger that is much longer than the window only that."""
    found = sorted({*_by_update(control), *_by_update(candidate)})
    mine = sorted(_by_update(candidate))
    if not mine or len(found) <= max(4 * len(mine), MAX_BESIDE):
        return found
    return [index for index in found if mine[0] <= index <= mine[-1]]


def _by_update(observed: Observed | None) -> dict[int, ObservedUpdate]:
    return observed.by_update() if observed else {}


def _column(updates: Mapping[int, ObservedUpdate], indices: Sequence[int], metric: str) -> tuple[Value, ...]:
    return tuple(getattr(updates[index], metric) if index in updates else None for index in indices)


def _compared(
    metric: str,
    names: tuple[str, ...],
    indices: Sequence[int],
    left: tuple[Value, ...],
    right: tuple[Value, ...],
    repeats: Sequence[tuple[Value, ...]],
    band: Band | None,
) -> Chart:
    absolute = bool(band and band.absolute)
    limits = tuple(band.limit(i) if band and band.covers(i) else None for i in indices)
    found = _deviations(left, right, absolute)
    lower = [Series(label="deviation", style="deviation", values=found)]
    for number, row in enumerate(repeats):
        own = _deviations(left, row, absolute)
        if any(value is not None for value in own):
            lower.append(Series(label=_repeat_name(number), style="noise", values=own))
    upper = [Series(label="control", style="control", values=left)]
    if any(value is not None for value in right):
        upper.append(Series(label="candidate", style="candidate", values=right))
    limit = Series(label="sealed limit", style="limit", values=limits) if band else None
    kind = "absolute" if absolute else "relative"
    return Chart(
        key=metric,
        title=_TITLES[metric],
        summary=_summary("update", names, found, limits),
        x_title="update",
        names=names,
        panels=(
            Panel(title=_TITLES[metric].split(" before")[0].lower(), scale="linear", series=tuple(upper)),
            Panel(title=f"{kind} deviation", scale="log", series=tuple(lower), limit=limit, note=band_note(band)),
        ),
    )


def _repeat_name(number: int) -> str:
    return "control against itself" + (f" ({number + 1})" if number else "")


def _deviations(left: Sequence[Value], right: Sequence[Value], absolute: bool) -> tuple[Value, ...]:
    return tuple(
        None if a is None or b is None else deviation(a, b, absolute=absolute) for a, b in zip(left, right, strict=True)
    )


def band_note(band: Band | None) -> str:
    """Returns in words where a band comes from."""
    if band is None:
        return "no band was sealed"
    if band.origin == "user":
        return f"limit from the manifest: {band.reason}"
    if band.origin == "precision":
        return "the controls agree bit for bit; the limit is the floor"
    return f"limit: {band.factor:g} × control's own, ≥ {number_text(band.floor)}"


def _summary(what: str, names: Sequence[str], found: Sequence[Value], limits: Sequence[Value]) -> str:
    """Returns the chart in a sentence: what someone who cannot see it needs to know. `what` is update, tensor, ..."""
    known = [(value, index) for index, value in enumerate(found) if value is not None]
    span = f"{len(names)} tensors" if what == "tensor" else _span(what, names)
    if not known:
        return f"The control's {span}; there is no candidate to compare."
    if not any(value for value, _ in known):
        return f"{span.capitalize()}: equal everywhere, to the last bit."
    outside = [names[i] for v, i in known if (limit := limits[i]) is not None and v > limit]
    if outside:
        others = f" and at {len(outside) - 1} more" if len(outside) > 1 else ""
        return f"{span.capitalize()}: leaves its band at {what} {outside[0]}{others}."
    value, index = max(known, key=lambda item: (math.isinf(item[0]), _used(item[0], limits[item[1]])))
    limit = limits[index]
    if limit is None:
        return f"{span.capitalize()}: the largest deviation is {number_text(value)}, at {what} {names[index]}."
    share = f"{100 * _used(value, limit):.2g} %"
    return (
        f"{span.capitalize()}: uses at most {share} of its band, at {what} {names[index]} "
        f"({number_text(value)} of {number_text(limit)})."
    )


def _span(what: str, names: Sequence[str]) -> str:
    return f"{what}s {names[0]} to {names[-1]}" if len(names) > 1 else f"{what} {names[0]}"


def _used(value: float, limit: Value) -> float:
    if limit is None:
        return value
    return value / limit if limit else (math.inf if value else 0.0)


def _rates(
    names: tuple[str, ...],
    indices: Sequence[int],
    one: Mapping[int, ObservedUpdate],
    two: Mapping[int, ObservedUpdate],
) -> Chart:
    groups = max((len(item.lr) for item in (*one.values(), *two.values())), default=0)
    series: list[Series] = []
    differing: list[str] = []
    for group in range(groups):
        name = f", group {group}" if groups > 1 else ""
        left, right = _rate_column(one, indices, group), _rate_column(two, indices, group)
        series.append(Series(label=f"control{name}", style="control", values=left))
        if two:
            series.append(Series(label=f"candidate{name}", style="candidate", values=right))
        differing += [n for n, a, b in zip(names, left, right, strict=True) if None not in (a, b) and a != b]
    if not two:
        note = "the control's own rates"
    elif differing:
        note = f"differs at {len(set(differing))} updates, first at update {min(differing, key=int)}"
    else:
        note = "equal at every update, to the last bit"
    return Chart(
        key="lr",
        title="Learning rate",
        summary=f"{groups} parameter group{'s' * (groups != 1)}, {_span('update', names)}: {note}.",
        x_title="update",
        names=names,
        panels=(Panel(title="rate that the step used", scale="linear", series=tuple(series)),),
    )


def _rate_column(updates: Mapping[int, ObservedUpdate], indices: Sequence[int], group: int) -> tuple[Value, ...]:
    return tuple(
        updates[index].lr[group] if index in updates and group < len(updates[index].lr) else None for index in indices
    )


def _evaluation_chart(model: ReportModel) -> Iterator[Chart]:
    job = model.candidates.get(EVAL)
    one = next((job.observed.evals[0] for job in model.controls if job.observed.evals), None)
    two = job.observed.evals[0] if job and job.observed.evals else None
    if one is None or not one.losses:
        return
    names = tuple(map(str, range(1, len(one.losses) + 1)))
    left: tuple[Value, ...] = one.losses
    right: tuple[Value, ...] | None = two.losses if two and len(two.losses) == len(left) else None
    band = next((band for band in model.bands if band.metric == "eval_loss"), None)
    limits: tuple[Value, ...] = tuple(band.limits[0] if band else None for _ in names)
    found = _deviations(left, right, bool(band and band.absolute)) if right else tuple(None for _ in names)
    upper = [Series(label="control", style="control", values=left)]
    upper += [Series(label="candidate", style="candidate", values=right)] if right else []
    yield Chart(
        key="evaluation",
        title="Fixed examples, before any update",
        summary=_summary("example", names, found, limits),
        x_title="example",
        names=names,
        ordered=False,
        synced=False,
        panels=(
            Panel(title="loss", scale="linear", series=tuple(upper)),
            Panel(
                title="deviation",
                scale="log",
                series=(Series(label="deviation", style="deviation", values=found),),
                limit=Series(label="sealed limit", style="limit", values=limits) if band else None,
                note=band_note(band),
            ),
        ),
    )


def first_movements(model: ReportModel) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Returns the norm of each tensor's change in the first update: a control's, the candidate's."""
    control = next((moved for job in model.controls if (moved := _first_moved(job.observed))), {})
    return control, _first_moved(model.followed.observed) if model.followed else {}


def _first_moved(observed: Observed) -> Mapping[str, float]:
    return next((item.moved for item in observed.updates if item.moved is not None), {})


def _movement_chart(model: ReportModel) -> Iterator[Chart]:
    one, two = first_movements(model)
    bands = {band.tensor: band for band in model.bands if band.metric == "parameter_delta"}
    names = tuple(name for name in one if name in two and (one[name] or two[name]))
    if not names:
        return
    absolute = any(band.absolute for band in bands.values())
    found: tuple[Value, ...] = tuple(deviation(one[name], two[name], absolute=absolute) for name in names)
    limits: tuple[Value, ...] = tuple(bands[name].limits[0] if name in bands else None for name in names)
    sealed = any(limit is not None for limit in limits)
    left_out = len(set(model.noise) & set(names))
    note = f"{left_out} tensors have no band: their exact gradient is zero or nearly so" if left_out else ""
    yield Chart(
        key="movement",
        title="Change of each tensor in the first update",
        summary=_summary("tensor", names, found, limits),
        x_title="tensor, in the model's order",
        names=names,
        numeric=False,
        ordered=False,
        synced=False,
        panels=(
            Panel(
                title="deviation of its norm",
                scale="log",
                series=(Series(label="deviation", style="deviation", values=found),),
                limit=Series(label="sealed limit", style="limit", values=limits) if sealed else None,
                note=note,
            ),
        ),
    )

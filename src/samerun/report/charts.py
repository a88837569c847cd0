"""Curves without a plotting library: numbers in, SVG path data and tick positions out. Pure.

A chart is one row of x positions shared by several panels, each with its own vertical scale. Its drawing area is a
canvas of 1000 x 100 units that the page stretches to whatever width it has, so lines are given without a width and all
text stays outside, placed by percent. x position `i` of `n` lies in the middle of the i-th of n equal slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

Value = float | None
Scale = Literal["linear", "log"]
Style = Literal["control", "repeat", "candidate", "deviation", "limit", "noise", "rate"]

WIDTH, HEIGHT = 1000.0, 100.0
MAX_POINTS = 2000
"""Most points that a drawn line has; longer ones are drawn by the extremes of each slot of the drawing."""
MAX_DOTS = 80
"""Up to so many points each gets a dot."""
MAX_DECADES = 16
"""Decades that a logarithmic scale shows; what lies further below the top is drawn as zero."""
LARGEST, SMALLEST = 1e300, 1e-280
"""Beyond them a number is as good as infinite, or as zero."""


def is_drawable(value: Value) -> TypeGuard[float]:
    """Returns whether there is a number to draw."""
    return value is not None and math.isfinite(value) and abs(value) < LARGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One row of numbers, one per x position; None where nothing was measured."""

    label: str
    style: Style
    values: tuple[Value, ...]
    unit: str = ""

    @property
    def finite(self) -> list[float]:
        """The values that can be drawn."""
        return [value for value in self.values if is_drawable(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One vertical scale with its series. `limit` is the upper edge of a band that begins at zero."""

    title: str
    scale: Scale
    series: tuple[Series, ...]
    limit: Series | None = None
    note: str = ""

    @property
    def all_series(self) -> tuple[Series, ...]:
        """The series and the limit."""
        return (*self.series, self.limit) if self.limit else self.series


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels over one row of x positions: `names` of them, which are numbers or labels.

    Lines connect the values only where the positions are `ordered`, as updates are and tensors are not. `synced` charts
    share their pointer and zoom.
    """

    key: str
    title: str
    summary: str
    x_title: str
    names: tuple[str, ...]
    panels: tuple[Panel, ...]
    numeric: bool = True
    ordered: bool = True
    synced: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled position along an axis, in percent from its start. `minor` ones give way where room is short."""

    percent: float
    label: str
    minor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A drawn series: the path of its line, of its dots, and of the marks on what is not finite or above its limit."""

    label: str
    style: Style
    path: str
    dots: str = ""
    outside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A panel, drawn. `band` is the path of the filled band, empty where there is none."""

    title: str
    note: str
    scale: Scale
    low: float
    high: float
    lines: tuple[Line, ...]
    band: str
    edge: str
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """A vertical scale from `low` to `high`. A logarithmic one shows zero on its bottom line."""

    scale: Scale
    low: float
    high: float

    def place(self, value: float) -> float:
        """Returns the height of a value on the canvas, 0 at the top; values beyond the ends lie on them."""
        if value == math.inf:
            return 0.0
        if self.scale == "log":
            share = 0.0 if value <= self.low else math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT * (1 - min(max(share, 0.0), 1.0)), 2)


def number_text(value: float, digits: int = 3) -> str:
    """Returns a number with at most `digits` significant digits, small and large ones with a short exponent.

    >>> number_text(2.3089e-08), number_text(0.125), number_text(20.0)
    ('2.31e-8', '0.125', '20')
    """
    mantissa, mark, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def fit_axis(panel: Panel) -> Axis:
    """Returns a scale on which everything finite in the panel can be seen."""
    values = [value for series in panel.all_series for value in series.finite]
    if panel.scale == "log":
        positive = [value for value in values if value > SMALLEST]
        if not positive:
            return Axis("log", 1e-9, 1e-6)
        high = math.ceil(math.log10(max(positive)) + 0.1)
        low = max(math.floor(math.log10(min(positive))), high - MAX_DECADES)
        return Axis("log", 10.0 ** (low - 1), 10.0**high)  # the lowest decade is where zero lies
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return Axis("linear", low - margin, high + margin)


def draw_panel(panel: Panel) -> Drawing:
    """Returns the panel as paths."""
    axis = fit_axis(panel)
    lines = tuple(_draw_line(series, axis, panel.limit) for series in panel.series)
    return Drawing(
        title=panel.title,
        note=panel.note,
        scale=panel.scale,
        low=axis.low,
        high=axis.high,
        lines=lines,
        band=_band(panel.limit, axis) if panel.limit else "",
        edge=_draw_line(panel.limit, axis).path if panel.limit else "",
        ticks=tuple(_value_ticks(axis)),
    )


def _draw_line(series: Series, axis: Axis, limit: Series | None = None) -> Line:
    count = len(series.values)
    points = [(_across(i, count), value) for i, value in enumerate(series.values)]
    finite = [(x, axis.place(v)) if is_drawable(v) else None for x, v in points]
    return Line(
        label=series.label,
        style=series.style,
        path=_path(thin_out(finite)),
        dots=_dots([point for point in finite if point is not None]) if count <= MAX_DOTS else "",
        outside=_dots([(x, axis.place(v)) for x, v in _outside(points, series, limit)]),
    )


def _outside(points: Sequence[tuple[float, Value]], series: Series, limit: Series | None) -> list[tuple[float, float]]:
    """Returns what deserves a mark: values that are not finite, at the top, and deviations above their limit."""
    limits = limit.values if limit is not None and series.style == "deviation" else (None,) * len(points)
    marked: list[tuple[float, float]] = []
    for (x, value), most in zip(points, limits, strict=True):
        if value is not None and (not is_drawable(value) or (most is not None and value > most)):
            marked.append((x, value if is_drawable(value) else math.inf))
    return marked[:MAX_DOTS]


def _across(index: int, count: int) -> float:
    return round((index + 0.5) / count * WIDTH, 2)


def thin_out(points: Sequence[tuple[float, float] | None]) -> list[tuple[float, float] | None]:
    """Returns at most `MAX_POINTS` points that look the same: the first, lowest, highest and last of every slot.

    None is a gap in the line; a slot keeps one if it had any.
    """
    if len(points) <= MAX_POINTS:
        return list(points)
    slots = MAX_POINTS // 4
    kept: list[tuple[float, float] | None] = []
    for slot in range(slots):
        part = points[slot * len(points) // slots : (slot + 1) * len(points) // slots]
        known = [point for point in part if point is not None]
        if len(known) < len(part):
            kept.append(None)
        if known:
            ends = {known[0], known[-1], min(known, key=_height), max(known, key=_height)}
            kept += sorted(ends)
    return kept


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Returns lines between neighbours; a point between gaps becomes a line of no length, which is seen as a dot."""
    parts: list[str] = []
    for index, point in enumerate(points):
        if point is None:
            continue
        alone = index == 0 or points[index - 1] is None
        last = index + 1 == len(points) or points[index + 1] is None
        parts.append(f"{'M' if alone else 'L'}{point[0]:g} {point[1]:g}{'h0' * (alone and last)}")
    return "".join(parts)


def _dots(points: Sequence[tuple[float, float]]) -> str:
    """Lines of no length, which round line caps make into dots that a stretched canvas does not flatten."""
    return "".join(f"M{x:g} {y:g}h0" for x, y in points)


def _band(limit: Series, axis: Axis) -> str:
    """The area from zero up to the limit, over the whole width: a limit holds for its whole slot."""
    count = len(limit.values)
    parts: list[str] = []
    for first, last, value in _runs(limit.values):
        if not is_drawable(value):
            continue
        left, right, top = first / count * WIDTH, last / count * WIDTH, axis.place(value)
        parts.append(f"M{left:g} {HEIGHT:g}V{top:g}H{right:g}V{HEIGHT:g}Z")
    return "".join(parts)


def _runs(values: Sequence[Value]) -> Iterator[tuple[int, int, Value]]:
    """Yields (first, end, value) of every stretch of equal values; of a long row only every so many are looked at."""
    first, step = 0, max(1, len(values) // MAX_POINTS)
    for index in range(step, len(values), step):
        if values[index] != values[first]:
            yield first, index, values[first]
            first = index
    if values:
        yield first, len(values), values[first]


def _value_ticks(axis: Axis) -> Iterator[Tick]:
    if axis.scale == "log":
        yield Tick(100.0, "0")
        low, high = round(math.log10(axis.low)) + 1, round(math.log10(axis.high))
        step = max(1, math.ceil((high - low) / 4))
        for power in range(low, high + 1, step):
            yield Tick(axis.place(10.0**power), f"1e{power}" if power else "1")
        return
    step = nice_step((axis.high - axis.low) / 4)
    first = math.ceil(axis.low / step)
    for number in range(first, math.floor(axis.high / step) + 1):
        yield Tick(axis.place(number * step), number_text(number * step, 6))


def nice_step(rough: float) -> float:
    """Returns 1, 2 or 5 times a power of ten, not below `rough`.

    >>> nice_step(0.3), nice_step(7)
    (0.5, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999999)


def name_ticks(names: Sequence[str], *, numeric: bool) -> tuple[Tick, ...]:
    """Returns the labels under a chart: round numbers where positions are numbers; names of their own do not fit."""
    count = len(names)
    if not count or not numeric:
        return ()
    if count <= 12:
        chosen = list(range(count))
    else:
        first, last = int(names[0]), int(names[-1])
        step = max(1, round(nice_step((last - first) / 8)))
        numbers = range(math.ceil(first / step) * step, last + 1, step)
        chosen = [0, *(number - first for number in numbers if step / 2 < number - first < count - step / 2), count - 1]
    return tuple(
        Tick(round((index + 0.5) / count * 100, 3), names[index], minor=place % 2 == 1 and place + 1 < len(chosen))
        for place, index in enumerate(chosen)
    )

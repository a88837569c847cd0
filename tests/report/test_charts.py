"""Curves: what is drawn is what was measured, whatever the values."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.report import charts
from samerun.report.charts import (
    Axis,
    Panel,
    Series,
    draw_panel,
    fit_axis,
    name_ticks,
    nice_step,
    number_text,
    thin_out,
)

NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.none()
POINT = re.compile(r"[ML](-?[\d.]+(?:e-?\d+)?) (-?[\d.]+(?:e-?\d+)?)")


def panel_of(values: list[float | None], scale: charts.Scale = "linear", limit: float | None = None) -> Panel:
    series = Series(label="x", style="deviation", values=tuple(values))
    edge = Series(label="limit", style="limit", values=(limit,) * len(values)) if limit is not None else None
    return Panel(title="t", scale=scale, series=(series,), limit=edge)


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.sampled_from(["linear", "log"]))
def test_any_values_give_finite_paths_inside_the_canvas(values: list[float | None], scale: charts.Scale) -> None:
    drawing = draw_panel(panel_of(values, scale, 1.0))
    for line in drawing.lines:
        for path in (line.path, line.dots, line.outside):
            assert "nan" not in path
            assert "inf" not in path
            assert all(0 <= float(x) <= 1000 and 0 <= float(y) <= 100 for x, y in POINT.findall(path))
    assert all(0 <= tick.percent <= 100 for tick in drawing.ticks)


def test_a_gap_breaks_the_line_and_what_is_not_finite_is_marked_at_the_top() -> None:
    drawing = draw_panel(panel_of([1.0, 2.0, None, 3.0, math.nan, math.inf]))
    (line,) = drawing.lines
    assert line.path.count("M") == 2
    assert [y for _, y in POINT.findall(line.outside)] == ["0", "0"]


def test_what_exceeds_its_limit_is_marked() -> None:
    (line,) = draw_panel(panel_of([1e-8, 2e-6, 0.0], "log", 1e-6)).lines
    assert len(POINT.findall(line.outside)) == 1


def test_zero_lies_on_the_bottom_line_of_a_logarithmic_scale() -> None:
    axis = fit_axis(panel_of([0.0, 1e-8, 1e-6], "log"))
    assert axis.place(0.0) == 100
    assert axis.place(1e-8) > axis.place(1e-6) > 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400))
def test_linear_scales_are_monotone(values: list[float]) -> None:
    axis = fit_axis(panel_of(list(values)))
    heights = [axis.place(value) for value in sorted(values)]
    assert heights == sorted(heights, reverse=True)


def test_long_lines_keep_their_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "MAX_POINTS", 40)
    points: list[tuple[float, float] | None] = [(float(i), 50.0) for i in range(1000)]
    points[333] = (333.0, 0.0)
    points[777] = (777.0, 100.0)
    points[500] = None
    kept = thin_out(points)
    assert len(kept) <= 41
    assert (333.0, 0.0) in kept
    assert (777.0, 100.0) in kept
    assert None in kept
    known = [point for point in kept if point is not None]
    assert known == sorted(known)


def test_bands_step_where_the_limit_does() -> None:
    limit = Series(label="limit", style="limit", values=(1e-6, 1e-6, 1e-5))
    series = Series(label="x", style="deviation", values=(1e-7, 1e-7, 1e-7))
    drawing = draw_panel(Panel(title="t", scale="log", series=(series,), limit=limit))
    assert drawing.band.count("Z") == 2
    assert "M0 100" in drawing.band
    assert "H1000" in drawing.band


@given(st.floats(1e-12, 1e12))
def test_steps_are_nice_and_not_too_small(rough: float) -> None:
    step = nice_step(rough)
    assert step >= rough * 0.999
    assert step <= rough * 10.001
    assert f"{step:.1e}"[0] in "125"


def test_ticks_under_a_chart() -> None:
    assert [tick.label for tick in name_ticks(("13", "14", "15"), numeric=True)] == ["13", "14", "15"]
    long = name_ticks(tuple(map(str, range(13, 5013))), numeric=True)
    assert long[0].label == "13"
    assert long[-1].label == "5012"
    assert len(long) <= 12
    assert name_ticks(("a", "b"), numeric=False) == ()


def test_axis_takes_constant_and_empty_series() -> None:
    assert fit_axis(panel_of([2.0, 2.0])).low < 2.0
    assert fit_axis(panel_of([None])) == Axis("linear", -0.08, 1.08)
    assert fit_axis(panel_of([0.0], "log")).high > 0


@pytest.mark.parametrize(("value", "text"), [(2.3089e-8, "2.31e-8"), (1e10, "1e10"), (0.0, "0"), (math.inf, "inf")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text

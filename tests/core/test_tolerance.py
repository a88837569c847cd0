"""Bands: where a limit comes from, that it never shrinks, and when it judges nothing any more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.dtype import parse_dtype
from samerun.core.tolerance import (
    CEILING,
    METRICS,
    Band,
    band_from_controls,
    band_from_user,
    check_band,
    deviation,
    precision_floor,
    running_max,
)

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, finite)
def test_a_deviation_is_relative_to_the_control(control: float, candidate: float) -> None:
    found = deviation(control, candidate)
    assert found >= 0
    assert (found == 0) == (control == candidate)
    expected = abs(control - candidate) / (abs(control) if control else 1.0)
    assert found == pytest.approx(expected)
    assert deviation(control, candidate, absolute=True) == abs(candidate - control)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_never_equal(bad: float) -> None:
    assert deviation(bad, bad) == deviation(1.0, bad) == deviation(bad, 1.0) == math.inf


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_running_maximum_is_numpys(values: list[float]) -> None:
    assert list(running_max(values)) == list(np.maximum.accumulate(values))


@given(st.lists(st.lists(st.floats(0, 1e-3), min_size=4, max_size=4), min_size=1, max_size=3), st.floats(0, 1e-5))
def test_limits_never_shrink_and_hold_every_control(rows: list[list[float]], floor: float) -> None:
    band = band_from_controls("loss", 13, rows, factor=10, floor=floor)
    assert list(band.limits) == sorted(band.limits)
    assert all(limit >= floor for limit in band.limits)
    assert all(row[i] <= band.limit(13 + i) for row in rows for i in range(4))
    assert band.origin == ("control" if any(map(any, rows)) else "precision")
    assert Band.from_json(band.to_json()) == band


def test_a_band_ends_where_its_window_ends() -> None:
    band = band_from_user("loss", 13, 2, limit=1e-3, reason="because")
    assert band.covers(14)
    assert not band.covers(15)
    with pytest.raises(ValueError, match=r"update 15 .* 13\.\.14"):
        band.limit(15)


@pytest.mark.parametrize("limits", [(), (-1.0,), (math.nan,)])
def test_limits_that_make_no_sense_are_refused(limits: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="loss"):
        Band(metric="loss", first_update=1, limits=limits, origin="user")


def test_floors_follow_the_precision() -> None:
    half, single = parse_dtype("bfloat16"), parse_dtype("float32")
    for metric in METRICS:
        assert precision_floor(metric, half, 1000) > precision_floor(metric, single, 1000) > 0
    assert precision_floor("loss", half, 4_000_000) < precision_floor("loss", half, 1000)  # a mean of more terms
    assert precision_floor("eval_logits", half, 10) == precision_floor("eval_logits", half, 10**6)  # of one example
    assert precision_floor("grad_norm", half, 10**9) >= 2 * half.unit_roundoff  # held in bf16 itself
    assert precision_floor("loss", single, 1000) < 1e-6


@pytest.mark.parametrize("terms", [10, 1000, 10**6])
@pytest.mark.parametrize("seed", range(5))
def test_the_floor_covers_another_order_of_summation(terms: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = (rng.standard_normal(terms) ** 2 + 1).astype(np.float32)
    one = float(losses.sum(dtype=np.float32) / np.float32(terms))
    other = float(rng.permutation(losses).sum(dtype=np.float32) / np.float32(terms))
    assert deviation(one, other) <= precision_floor("loss", parse_dtype("float32"), terms)


@pytest.mark.parametrize("metric", METRICS)
def test_a_band_too_wide_to_judge_is_a_finding(metric: str) -> None:
    ceiling = CEILING[metric]
    noisy = band_from_controls(metric, 13, [[0.0, ceiling / 2]], factor=10, floor=0.0)
    found = check_band(noisy)
    assert [problem.code for problem in found] == ["SR-CONTROL-NOISY"]
    assert found[0].where["update"] == 14
    high = band_from_controls(metric, 13, [[0.0, 0.0]], factor=10, floor=2 * ceiling)
    assert [problem.code for problem in check_band(high)] == ["SR-CONTROL-NOISY"]


@pytest.mark.parametrize("metric", METRICS)
def test_no_band_from_controls_is_wider_than_its_ceiling(metric: str) -> None:
    ceiling = CEILING[metric]
    capped = band_from_controls(metric, 13, [[0.0, ceiling / 4]], factor=10, floor=0.0)
    assert capped.limits == (0.0, ceiling)
    assert check_band(capped) == []
    assert band_from_controls(metric, 13, [[9.0]], factor=10, floor=0.0, absolute=True).limits == (90.0,)


def test_a_band_that_judges_or_was_stated_by_a_person_is_none() -> None:
    assert check_band(band_from_controls("loss", 13, [[1e-7, 1e-6]], factor=10, floor=1e-6)) == []
    assert check_band(band_from_user("loss", 13, 2, limit=0.9, reason="a different data set")) == []

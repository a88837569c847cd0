"""Bounds on rounding: against real sums in real low precision, added up in other orders."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from samerun.core.dtype import DTYPES
from samerun.core.rounding import Basis, Drift

TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def basis(dtype: str = "float32", **changes: float) -> Basis:
    values = {"depth": 6, "longest": 64, "tokens": 400, "compared": 1000, "risk": 1e-6, **changes}
    return Basis(dtype=DTYPES[dtype], **values)  # type: ignore[arg-type]


def product(x: np.ndarray, w: np.ndarray, order: np.ndarray, dtype: str) -> np.ndarray:
    """Returns x @ w, added up term by term in fp32 in the given order and rounded once."""
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for term in order:
        total += x[:, term, None].astype(np.float32) * w[None, term].astype(np.float32)
    return total.astype(TYPES[dtype])


def logits(dtype: str, seed: int, order_seed: int, *, rows: int = 400, width: int = 64, depth: int = 6) -> np.ndarray:
    """A forward pass of `depth` normalised layers whose sums are taken in an order of their own."""
    draw, order = np.random.default_rng(seed), np.random.default_rng(order_seed)
    x = draw.standard_normal((rows, width)).astype(TYPES[dtype])
    for _ in range(depth):
        w = (draw.standard_normal((width, width)) / math.sqrt(width)).astype(TYPES[dtype])
        x = product(x, w, order.permutation(width), dtype)
        scale = np.sqrt(np.mean(x.astype(np.float32) ** 2, axis=1, keepdims=True))
        x = (x.astype(np.float32) / scale).astype(TYPES[dtype])
    return x.astype(np.float64)


@pytest.mark.parametrize("dtype", TYPES)
def test_other_orders_of_sums_stay_within_and_wrong_layers_do_not(dtype: str) -> None:
    one = logits(dtype, 3, 0)
    size = math.sqrt(float(np.mean(one**2)))
    bound = basis(dtype, compared=one.size, logit_size=size).logits(float(np.abs(one).max()))
    for order in (1, 2, 3):
        apart = float(np.abs(logits(dtype, 3, order) - one).max() / np.abs(one).max())
        assert 0 < apart < bound
        assert apart > bound / 100  # the bound says something about these numbers
    mean = float(np.mean(one**2, axis=1).mean())
    within = basis(dtype, compared=1, logit_size=size).loss(mean, len(one))
    other = float(np.mean(logits(dtype, 3, 1) ** 2, axis=1).mean())
    assert abs(other - mean) / mean < within
    wrong = one[:, ::-1]
    assert np.abs(wrong - one).max() / np.abs(one).max() > 3 * bound


def test_what_makes_a_bound_wider() -> None:
    plain = basis()
    assert basis(depth=24).forward == pytest.approx(2 * plain.forward)
    assert basis("bfloat16").forward > 1000 * plain.forward
    assert basis(longest=10_000).forward > 10 * plain.forward
    assert basis(tokens=1600).backward < plain.backward
    assert basis(risk=1e-12).spread > plain.spread
    assert plain.loss(4.0, 100) < plain.loss(2.0, 100) < 2 * plain.loss(4.0, 100)
    assert plain.tensor(1.0, 10, 1.0, 10) == plain.backward
    assert plain.tensor(1e-3, 10, 1.0, 10) == pytest.approx(1e3 * plain.backward)
    for unknown in (plain.loss(0.0, 10), plain.logits(0.0), plain.tensor(0.0, 1, 1.0, 10)):
        assert unknown == math.inf
    with pytest.raises(ValueError, match="at least 1"):
        basis(depth=0)


def test_two_runs_come_apart_with_every_update() -> None:
    drift = Drift(bound=1e-6, loss=[4.0, 3.0, 2.0], gradient=[1.0, 2.0, 1.5], step=[0.5, 0.5, 0.5])
    assert [drift.apart(place) for place in range(3)] == [0.0, 5e-7, 1e-6]
    assert drift.of_loss(0) == 0.0
    assert drift.of_loss(2) == pytest.approx(1.5 * 1e-6 / 2.0)
    assert drift.steepest(2) == 2.0
    assert drift.of_gradient(2) == pytest.approx(2.0 * 1e-6 / 1.5)

"""The keyed permutation: a bijection with random access, uniform as far as it can be measured, and fixed for good."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.mix import fold_key, mix64
from samerun.core.orders import KeyedOrder
from samerun.core.permutation import Permutation

HUGE = 10**12 + 39

# The published vectors of docs/order.md, version 1.
VECTORS = [
    (10, 0, 0, [8, 7, 2, 4, 5, 6, 1, 0, 9, 3]),
    (1000, 1, 0, [447, 297, 284, 243, 778]),
    (1000, 1, 1, [472, 20, 445, 168, 940]),
    (HUGE, 42, 3, [3669350034, 376150199826, 180056006196, 219789608354]),
    ((1 << 63) - 1, (1 << 64) - 1, 7, [2161907544021277966, 570264588773682504, 8365120886535836261]),
]


@pytest.mark.parametrize(("length", "seed", "epoch", "first"), VECTORS)
def test_published_vectors(length: int, seed: int, epoch: int, first: list[int]) -> None:
    found = Permutation.of(length, seed, epoch)
    assert found.span(0, len(first)).tolist() == first
    assert found.inverse(first).tolist() == list(range(len(first)))


@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_it_is_a_permutation_and_its_inverse_undoes_it(length: int, seed: int, epoch: int) -> None:
    shuffle = Permutation.of(length, seed, epoch)
    ids = shuffle.span(0, length)
    assert np.array_equal(np.sort(ids), np.arange(length))
    assert np.array_equal(shuffle.inverse(ids), np.arange(length))


@given(st.integers(1, (1 << 63) - 1), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=30, deadline=None)
def test_any_length_has_random_access(length: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    shuffle = Permutation.of(length, seed)
    ids = shuffle.at(positions)
    assert ids.min() >= 0
    assert ids.max() < length
    assert shuffle.inverse(ids).tolist() == positions
    assert len(set(ids.tolist())) == len(set(positions))


def test_a_span_does_not_depend_on_how_it_is_cut() -> None:
    shuffle = Permutation.of(100_000, 5)
    whole = shuffle.span(0, 100_000)
    assert np.array_equal(whole[16_000:50_001], shuffle.span(16_000, 50_001))
    assert np.array_equal(whole[[7, 3, 99_999]], shuffle.at([7, 3, 99_999]))


def chi_square(observed: np.ndarray, expected: float, freedom: int) -> float:
    """How many standard deviations the statistic lies from its mean."""
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_permutation_of_a_few_is_equally_likely(length: int) -> None:
    num_all, num_drawn = math.factorial(length), 1500
    counts = Counter(tuple(Permutation.of(length, seed).span(0, length).tolist()) for seed in range(num_drawn))
    observed = np.array([*counts.values(), *[0] * (num_all - len(counts))])
    assert abs(chi_square(observed, num_drawn / num_all, num_all - 1)) < 4.5


@pytest.mark.parametrize("length", [30, 64])
def test_every_id_is_equally_likely_at_every_position(length: int) -> None:
    num_drawn = 1000
    observed = np.zeros((length, length))
    for seed in range(num_drawn):
        observed[np.arange(length), Permutation.of(length, seed).span(0, length)] += 1
    assert abs(chi_square(observed, num_drawn / length, (length - 1) ** 2)) < 4.5


def test_neighbours_of_a_huge_order_are_spread_evenly() -> None:
    ids = Permutation.of(HUGE, 1).span(0, 1 << 17)
    observed = np.histogram(ids, bins=256, range=(0, HUGE))[0]
    assert abs(chi_square(observed, len(ids) / 256, 255)) < 4.5
    jumps = np.histogram(np.diff(ids) % HUGE, bins=256, range=(0, HUGE))[0]
    assert abs(chi_square(jumps, (len(ids) - 1) / 256, 255)) < 4.5


@pytest.mark.parametrize("change", ["seed", "epoch"])
def test_one_bit_of_seed_or_epoch_changes_half_of_the_bits(change: str) -> None:
    length, positions = 1 << 40, np.arange(512)
    flipped = np.zeros(40)
    trials = 0
    for bit in range(0, 64, 3):
        before = Permutation.of(length, 9, 9).at(positions)
        other = (9 ^ (1 << bit), 9) if change == "seed" else (9, 9 ^ (1 << bit))
        difference = before ^ Permutation.of(length, *other).at(positions)
        flipped += [((difference >> place) & 1).sum() for place in range(40)]
        trials += len(positions)
    deviation = np.abs(flipped - trials / 2) / math.sqrt(trials / 4)
    assert deviation.max() < 4.5


def test_other_lengths_are_other_permutations() -> None:
    first, second = Permutation.of(1000, 1).span(0, 500), Permutation.of(1001, 1).span(0, 500)
    assert (first == second).mean() < 0.02


@pytest.mark.parametrize("wrong", [[-1], [10], [0.5]])
def test_positions_outside_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="whole numbers from 0 to 9"):
        Permutation.of(10, 0).at(wrong)


def test_impossible_permutations_are_refused() -> None:
    for length in (0, 1 << 63):
        with pytest.raises(ValueError, match="positions"):
            Permutation.of(length, 0)
    with pytest.raises(ValueError, match="outside"):
        Permutation.of(10, 0).span(3, 11)
    with pytest.raises(ValueError, match="key"):
        Permutation(10, ())


def test_keys_depend_on_every_word_and_their_order() -> None:
    assert len({fold_key(1, 2), fold_key(2, 1), fold_key(1, 2, 0), fold_key(1)}) == 4
    assert mix64(1) == 0x5692161D100B05E5


def test_an_order_is_reshuffled_in_every_epoch() -> None:
    order = KeyedOrder(1000, seed=3)
    first, second = order.ids(0, 0, 1000), order.ids(1, 0, 1000)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(1000))
    assert (first == second).mean() < 0.02
    assert order.identity() != KeyedOrder(1000, seed=4).identity()

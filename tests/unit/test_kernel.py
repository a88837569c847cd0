"""The compiled kernel gives the numbers of the definition, whatever the width, and stays inside its buffers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.digest import MULTIPLIER_1, MULTIPLIER_2, STRIDE
from samerun.errors import CorruptCheckpoint
from samerun.verify.state.digest import digest_checkpoint
from samerun.verify.state.kernel import BY_HALVES, NATIVE, Step, sum_terms
from support.memory import MemoryCheckpoint

LENGTHS = [
    (0, 0),
    (0, 5),
    (3, 0),
    (1, 1),
    (1, 7),
    (5, 1),
    (3, 257),
    (2, 4099),
    *((3, n) for n in (19, 20, 21, 35, 36, 37)),
]


@pytest.mark.parametrize("step", [NATIVE, BY_HALVES])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(("runs", "length"), LENGTHS)
def test_every_width_and_length_is_summed_as_defined(width: int, runs: int, length: int, step: Step) -> None:
    random = np.random.default_rng(7)
    bits = random.integers(0, 256, runs * length * width, dtype=np.uint8).view(f"u{width}")
    starts = random.integers(0, 1 << 63, runs, dtype=np.uint64)
    seed = 0xFEDC_BA98_7654_3210
    assert sum_terms(bits, starts, length, seed, step=step) == defined(bits, starts, length, seed)


def defined(bits: npt.NDArray[Any], starts: npt.NDArray[np.uint64], length: int, seed: int) -> int:
    """The definition, all elements at once."""
    index = (starts[:, None] + np.arange(length, dtype=np.uint64)).reshape(-1)
    z = bits.astype(np.uint64) ^ (index * np.uint64(STRIDE) + np.uint64(seed))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    runs=st.integers(1, 5),
    length=st.integers(1, 160),
    start=st.integers(0, (1 << 64) - 1),
    seed=st.integers(0, (1 << 64) - 1),
    shift=st.integers(0, 7),
    fill=st.integers(0, 255) | st.none(),
    step=st.sampled_from([NATIVE, BY_HALVES]),
)
def test_steps_and_what_is_left_of_a_run_meet_without_a_gap(
    width: int, runs: int, length: int, start: int, seed: int, shift: int, fill: int | None, step: Step
) -> None:
    """A step takes 20 or 36 elements. Files put values at any address: nothing is assumed of it."""
    random = np.random.default_rng(length)
    size = runs * length * width
    content = np.full(size + shift, fill or 0, np.uint8) if fill else random.integers(0, 256, size + shift, np.uint8)
    starts = (np.uint64(start) + np.arange(runs, dtype=np.uint64) * np.uint64(977)).astype(np.uint64)
    bits = content[shift:].view(f"u{width}")
    assert sum_terms(bits, starts, length, seed, step=step) == defined(bits.copy(), starts, length, seed)


def test_it_reads_nothing_beyond_what_it_is_given() -> None:
    bits, starts = np.zeros(12, np.uint32), np.zeros(2, np.uint64)
    for wrong in (bits[:11], np.zeros(24, np.uint32)[::2]):
        with pytest.raises(ValueError, match="contiguous runs"):
            sum_terms(wrong, starts, 6, 1)
    with pytest.raises(ValueError, match="contiguous runs"):
        sum_terms(bits, starts, 7, 1)


def test_threads_that_need_it_at_once_get_the_same_number() -> None:
    array = np.arange(100_000, dtype=np.uint16)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: sum_terms(array, np.zeros(1, np.uint64), array.size, 3), range(32)))
    assert len(found) == 1


def test_an_overlap_as_large_as_a_gap_is_no_whole_tensor() -> None:
    checkpoint = MemoryCheckpoint({"param:w": np.arange(12.0)}, cuts={"param:w": [4, 8]})
    tiling = checkpoint.state.tensors["param:w"].tiling
    tiling.offsets[1, 0] = 1  # 1..3 are held twice and 5..7 by nobody: the number of elements is right
    with pytest.raises(CorruptCheckpoint) as caught:
        digest_checkpoint(checkpoint)
    codes = {problem.code for problem in caught.value.problems}
    assert codes == {"SR-COV-GAP", "SR-COV-OVERLAP"}

"""Values with steps, read in small parts: the same as NumPy's strided view, and a short file is an error."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.errors import CorruptCheckpoint, ExecutionError
from samerun.execute import move
from samerun.execute.move import read_exactly, read_strided

ROWS, WIDTH = 97, 4096


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, np.ndarray]:
    array = np.random.default_rng(0).random((ROWS, WIDTH), dtype=np.float32)
    path = tmp_path_factory.mktemp("strided") / "data"
    path.write_bytes(b"head" + array.tobytes())
    return os.open(path, os.O_RDONLY), array


def read(descriptor: int, view: np.ndarray, array: np.ndarray, change: object = None) -> np.ndarray:
    offset = 4 + view.__array_interface__["data"][0] - array.__array_interface__["data"][0]
    out = np.zeros(view.shape, np.float32)
    read_strided(
        partial(read_exactly, descriptor, "data"),
        offset,
        view.strides,
        out,
        view.dtype,
        change or (lambda values: values),
    )  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("buffer", [700, 20_000, 256 << 10])
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_it_is_numpys_view(numbers: tuple[int, np.ndarray], buffer: int, data: st.DataObject) -> None:
    descriptor, array = numbers
    rows = slice(data.draw(st.integers(0, 90)), data.draw(st.integers(91, ROWS)), data.draw(st.integers(1, 50)))
    first = data.draw(st.integers(0, WIDTH - 1))
    count = data.draw(st.sampled_from([1, 2, 3, 40, 1100]))
    view = array[rows, first : first + count]
    if data.draw(st.booleans()):
        view = view.T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move, "BUFFER_BYTES", buffer)
        assert np.array_equal(read(descriptor, view, array), view)


def test_values_are_changed_part_by_part(numbers: tuple[int, np.ndarray]) -> None:
    descriptor, array = numbers
    sizes: list[int] = []

    def halved(values: np.ndarray) -> np.ndarray:
        sizes.append(values.nbytes)
        return values / 2

    assert np.array_equal(read(descriptor, array, array, halved), array / 2)
    assert max(sizes) <= move.BUFFER_BYTES < array.nbytes


def test_a_file_that_ends_is_an_error_not_a_signal(tmp_path: Path) -> None:
    array = np.zeros((64, 1024), np.float32)
    path = tmp_path / "data"
    path.write_bytes(b"head" + array.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    os.truncate(path, 100_000)
    with pytest.raises(CorruptCheckpoint, match="SR-FILE-TRUNCATED"):
        read(descriptor, array[:, :512], array)
    os.close(descriptor)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    with pytest.raises(ExecutionError, match="SR-CONVERT-READ"):
        read(memory, array[:, :512], array)
    os.close(memory)

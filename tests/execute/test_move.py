"""Copies give the same bytes whichever way they take, and space that is not there shows before anything is copied."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samerun.execute.move import BUFFER_BYTES, Mover, reserve

CONTENT = np.random.default_rng(5).integers(0, 256, 3 * BUFFER_BYTES + 4099, dtype=np.uint8).tobytes()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    (tmp_path / "source").write_bytes(CONTENT)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    offset=st.integers(0, 9000) | st.sampled_from([0, 4096, 8192]),
    at=st.integers(0, 9000) | st.sampled_from([0, 4096, 8192]),
    length=st.integers(0, 20_000) | st.sampled_from([BUFFER_BYTES, 2 * BUFFER_BYTES + 1, len(CONTENT) - 9000]),
    summed=st.booleans(),
)
def test_every_place_within_a_page_on_both_sides(
    files: tuple[int, int], offset: int, at: int, length: int, summed: bool
) -> None:
    source, target = files
    before = bytes([0xAB]) * (at + length + 5000)
    os.ftruncate(target, 0)
    os.pwrite(target, before, 0)
    mover = Mover(lambda: False)
    if summed:
        assert mover.copy_summed(source, offset, target, at, length, "source") == zlib.crc32(
            CONTENT[offset : offset + length]
        )
    else:
        mover.copy(source, offset, target, at, length, "source")
    found = os.pread(target, len(before) + 1, 0)
    assert found == before[:at] + CONTENT[offset : offset + length] + before[at + length :]


def test_space_that_is_there_is_set_aside_and_reads_as_zeros(files: tuple[int, int]) -> None:
    _, target = files
    os.ftruncate(target, 100_000)
    os.pwrite(target, b"head", 0)
    reserve(target, 100_000)
    assert os.fstat(target).st_size == 100_000
    assert os.pread(target, 100_000, 0) == b"head" + bytes(99_996)


def test_space_that_is_not_there_shows_at_once(files: tuple[int, int]) -> None:
    """No file system holds a file of 2^62 bytes."""
    with pytest.raises(OSError) as caught:
        reserve(files[1], 1 << 62)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)


def test_a_file_system_that_cannot_set_space_aside_is_no_error() -> None:
    """Such as that of a pipe."""
    reading, writing = os.pipe()
    try:
        reserve(writing, 4096)
    finally:
        os.close(reading)
        os.close(writing)

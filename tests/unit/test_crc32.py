"""The folded CRC-32 is zlib's, at every length around its blocks and from every beginning."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from samerun.stores import crc32 as module
from samerun.stores.crc32 import crc32
from samerun.stores.native import compile_loop, cpu_features


@pytest.fixture(autouse=True)
def folds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPILED_FROM_BYTES", 0)
    monkeypatch.setattr(module, "_SMALLEST_FOLD_BYTES", 256)


@pytest.fixture(params=module.WIDTHS, ids=lambda width: width.feature)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> module.Width:
    """Each of the instructions that this processor has, not only the widest."""
    features = cpu_features()
    if not (features.get(request.param.feature) and (request.param.lanes == 1 or features.get("avx512f"))):
        pytest.skip("this processor has no such instruction")
    loop = compile_loop(request.param.text(), 4)
    monkeypatch.setattr(module, "_fold", lambda: (loop, request.param.block_bytes))
    return request.param


@pytest.mark.parametrize("value", [0, 1, 0xDEADBEEF, 0xFFFFFFFF])
def test_it_is_zlibs(value: int, width: module.Width) -> None:
    data = memoryview(np.random.default_rng(3).integers(0, 256, 1_000_003, dtype=np.uint8).tobytes())
    for size in (0, 1, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 511, 512, 513, 1023, 4096, 65_537, len(data)):
        for first in (0, 1, 7):
            part = data[first : first + size]
            assert crc32(part, value) == zlib.crc32(part, value)


@pytest.mark.parametrize("width", module.WIDTHS, ids=lambda width: width.feature)
def test_the_factors_are_those_of_the_polynomial(width: module.Width) -> None:
    def power(exponent: int) -> int:
        """x^exponent modulo P, reflected and shifted by one."""
        found = 1
        for _ in range(exponent):
            found <<= 1
            found ^= 0x1_04C1_1DB7 if found >> 32 else 0
        return int(f"{found:032b}"[::-1], 2) << 1

    bits = 8 * width.block_bytes
    assert (width.far, width.near) == (power(bits + 32), power(bits - 32))


def test_parts_go_on_from_each_other() -> None:
    data = bytes(range(256)) * 40
    assert crc32(data[1000:], crc32(data[:1000])) == zlib.crc32(data)


def test_a_flipped_bit_anywhere_changes_it() -> None:
    data = bytearray(np.random.default_rng(4).integers(0, 256, 640, dtype=np.uint8).tobytes())
    whole = crc32(data)
    for at in range(0, 640, 17):
        data[at] ^= 16
        assert crc32(data) != whole
        data[at] ^= 16


def test_without_the_instruction_zlib_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_fold", lambda: None)
    assert crc32(b"a" * 1000) == zlib.crc32(b"a" * 1000)


def test_short_data_and_small_amounts_load_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPILED_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_summed", [0])
    called: list[int] = []
    monkeypatch.setattr(module, "_fold", lambda: called.append(1))
    crc32(bytes(64 << 10))
    assert called == []
    crc32(bytes(1 << 20))
    assert called == [1]

"""The CRC-32 of zip files, several times as fast as zlib's where the processor multiplies polynomials.

64 bytes at a time, or 256, are folded onto the next as many (Gopal et al.: Fast CRC Computation for Generic Polynomials
Using PCLMULQDQ Instruction, Intel 2009). What is left after the last fold has the same remainder as everything before
it, so `zlib` finishes: no constants for a reduction are needed.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from platform import machine

import numpy as np

from samerun.stores.guard import guard_maps

_SMALLEST_FOLD_BYTES = 32 << 10
_COMPILED_FROM_BYTES = 64 << 20  # summed by zlib so far: before, loading the compiler costs more than it saves
_ALL = 0xFFFF_FFFF
_LANES = range(4)


@dataclass(frozen=True, slots=True)
class Width:
    """How many bits an instruction multiplies, by how many 128-bit lanes it has: `feature` is LLVM's name for it.

    `far` and `near` are x^(n+32) and x^(n-32) modulo P for a block of n bits, bit-reflected and shifted by one, as the
    instruction needs them.
    """

    feature: str
    lanes: int
    intrinsic: str
    far: int
    near: int

    @property
    def block_bytes(self) -> int:
        """Bytes that are folded onto the next as many."""
        return 16 * self.lanes * len(_LANES)

    def text(self) -> str:
        """Returns the loop: (address, number of blocks, checksum to begin with, address of one block of output)."""
        kind = f"<{2 * self.lanes} x i64>"
        factors = f"<{', '.join(f'i64 {self.far}, i64 {self.near}' for _ in range(self.lanes))}>"
        loads = "".join(_LOAD.format(i=i, at=16 * self.lanes * i, kind=kind) for i in _LANES)
        carried = "".join(_CARRIED.format(i=i, first="f0" if i == 0 else f"d{i}", kind=kind) for i in _LANES)
        folds = "".join(
            _FOLD_ONE.format(i=i, at=16 * self.lanes * i, kind=kind, name=self.intrinsic, factors=factors)
            for i in _LANES
        )
        stores = "".join(_STORE.format(i=i, at=16 * self.lanes * i, kind=kind) for i in _LANES)
        return _LOOP.format(
            kind=kind,
            name=self.intrinsic,
            bytes=self.block_bytes,
            loads=loads,
            carried=carried,
            folds=folds,
            stores=stores,
        )


WIDTHS = (
    Width("vpclmulqdq", 4, "llvm.x86.pclmulqdq.512", 0x1_1542_778A, 0x1_322D_1430),
    Width("pclmul", 1, "llvm.x86.pclmulqdq", 0x1_5444_2BD4, 0x1_C6E4_1596),
)

_LOAD = "  %p{i} = getelementptr i8, ptr %data, i64 {at}\n  %d{i} = load {kind}, ptr %p{i}, align 1\n"
_CARRIED = "  %a{i} = phi {kind} [%{first}, %entry], [%r{i}, %fold]\n"
_FOLD_ONE = """
  %q{i} = getelementptr i8, ptr %row, i64 {at}
  %n{i} = load {kind}, ptr %q{i}, align 1
  %l{i} = call {kind} @{name}({kind} %a{i}, {kind} {factors}, i8 0)
  %h{i} = call {kind} @{name}({kind} %a{i}, {kind} {factors}, i8 17)
  %x{i} = xor {kind} %l{i}, %h{i}
  %r{i} = xor {kind} %x{i}, %n{i}
"""
_STORE = "  %o{i} = getelementptr i8, ptr %target, i64 {at}\n  store {kind} %a{i}, ptr %o{i}, align 1\n"
_LOOP = """
declare {kind} @{name}({kind}, {kind}, i8)
define i64 @loop(i64 %at, i64 %blocks, i64 %begin, i64 %out) {{
entry:
  %data = inttoptr i64 %at to ptr
  %target = inttoptr i64 %out to ptr
  %start = insertelement {kind} zeroinitializer, i64 %begin, i32 0
{loads}
  %f0 = xor {kind} %d0, %start
  br label %each
each:
  %block = phi i64 [1, %entry], [%next, %fold]
{carried}
  %done = icmp uge i64 %block, %blocks
  br i1 %done, label %exit, label %fold
fold:
  %offset = mul i64 %block, {bytes}
  %row = getelementptr i8, ptr %data, i64 %offset
{folds}
  %next = add nuw i64 %block, 1
  br label %each
exit:
{stores}
  ret i64 0
}}
"""


def crc32(data: bytes | bytearray | memoryview | mmap.mmap, value: int = 0) -> int:
    """Returns what `zlib.crc32` returns. Other threads run meanwhile.

    >>> crc32(b"123456789") == zlib.crc32(b"123456789") == 0xCBF43926
    True
    """
    view = memoryview(data)
    if view.nbytes >= _SMALLEST_FOLD_BYTES and isinstance(view.obj, mmap.mmap):
        guard_maps()
    fold = _worthwhile(view.nbytes)
    if fold is None:
        return zlib.crc32(view, value)
    content = np.frombuffer(view, np.uint8)
    loop, block = fold
    blocks = content.size // block
    left = ctypes.create_string_buffer(block)
    loop(content.ctypes.data, blocks, value ^ _ALL, ctypes.addressof(left))
    return zlib.crc32(content[blocks * block :].data, zlib.crc32(left.raw, _ALL))


Fold = tuple[Callable[..., int], int]
"""The compiled loop, and the bytes of a block."""


def _worthwhile(num_bytes: int) -> Fold | None:
    """Returns the compiled loop where it gains something: for long data, once enough was summed to pay for it."""
    if num_bytes < _SMALLEST_FOLD_BYTES:
        return None
    _summed[0] += num_bytes
    return _fold() if _summed[0] >= _COMPILED_FROM_BYTES else None


_summed = [0]  # a hint: threads may lose a count


@cache
def _fold() -> Fold | None:
    """Returns the loop for the widest such instruction of this processor, None where it has none."""
    from samerun.stores.native import compile_loop, cpu_features

    if machine() not in ("x86_64", "AMD64"):
        return None
    features = cpu_features()
    for width in WIDTHS:
        if features.get(width.feature) and (width.lanes == 1 or features.get("avx512f")):
            return compile_loop(width.text(), 4), width.block_bytes
    return None

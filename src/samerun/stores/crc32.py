"""The CRC-32 of zip files, several times as fast as zlib's where the processor multiplies polynomials.

64 bytes at a time are folded onto the next 64 (Gopal et al.: Fast CRC Computation for Generic Polynomials Using
PCLMULQDQ Instruction, Intel 2009). What is left after the last fold has the same remainder as everything before it, so
`zlib` finishes: no constants for a reduction are needed.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Callable
from functools import cache
from platform import machine

import numpy as np

from samerun.stores.guard import guard_maps

_SMALLEST_FOLD_BYTES = 32 << 10
_COMPILED_FROM_BYTES = 64 << 20  # summed by zlib so far: before, loading the compiler costs more than it saves
_BLOCK = 64
_ALL = 0xFFFF_FFFF

# x^(4*128+32) and x^(4*128-32) modulo P, bit-reflected and shifted by one, as the instruction needs them.
_FAR, _NEAR = 0x1_5444_2BD4, 0x1_C6E4_1596

_LANES = range(4)
_FOLD = (
    """
declare <2 x i64> @llvm.x86.pclmulqdq(<2 x i64>, <2 x i64>, i8)
define i64 @loop(i64 %at, i64 %blocks, i64 %begin, i64 %out) {
entry:
  %data = inttoptr i64 %at to ptr
  %target = inttoptr i64 %out to ptr
  %start = insertelement <2 x i64> zeroinitializer, i64 %begin, i32 0
"""
    + "".join(
        f"  %p{i} = getelementptr i8, ptr %data, i64 {16 * i}\n  %d{i} = load <2 x i64>, ptr %p{i}, align 1\n"
        for i in _LANES
    )
    + """
  %f0 = xor <2 x i64> %d0, %start
  br label %each
each:
  %block = phi i64 [1, %entry], [%next, %fold]
"""
    + "".join(f"  %a{i} = phi <2 x i64> [%{'f0' if i == 0 else f'd{i}'}, %entry], [%r{i}, %fold]\n" for i in _LANES)
    + """
  %done = icmp uge i64 %block, %blocks
  br i1 %done, label %exit, label %fold
fold:
  %offset = mul i64 %block, 64
  %row = getelementptr i8, ptr %data, i64 %offset
"""
    + "".join(
        f"""
  %q{i} = getelementptr i8, ptr %row, i64 {16 * i}
  %n{i} = load <2 x i64>, ptr %q{i}, align 1
  %l{i} = call <2 x i64> @llvm.x86.pclmulqdq(<2 x i64> %a{i}, <2 x i64> <i64 {_FAR}, i64 {_NEAR}>, i8 0)
  %h{i} = call <2 x i64> @llvm.x86.pclmulqdq(<2 x i64> %a{i}, <2 x i64> <i64 {_FAR}, i64 {_NEAR}>, i8 17)
  %x{i} = xor <2 x i64> %l{i}, %h{i}
  %r{i} = xor <2 x i64> %x{i}, %n{i}
"""
        for i in _LANES
    )
    + """
  %next = add nuw i64 %block, 1
  br label %each
exit:
"""
    + "".join(
        f"  %o{i} = getelementptr i8, ptr %target, i64 {16 * i}\n  store <2 x i64> %a{i}, ptr %o{i}, align 1\n"
        for i in _LANES
    )
    + "  ret i64 0\n}\n"
)


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
    blocks = content.size // _BLOCK
    left = ctypes.create_string_buffer(_BLOCK)
    fold(content.ctypes.data, blocks, value ^ _ALL, ctypes.addressof(left))
    return zlib.crc32(content[blocks * _BLOCK :].data, zlib.crc32(left.raw, _ALL))


def _worthwhile(num_bytes: int) -> Callable[..., int] | None:
    """Returns the compiled loop where it gains something: for long data, once enough was summed to pay for it."""
    if num_bytes < _SMALLEST_FOLD_BYTES:
        return None
    _summed[0] += num_bytes
    return _fold() if _summed[0] >= _COMPILED_FROM_BYTES else None


_summed = [0]  # a hint: threads may lose a count


@cache
def _fold() -> Callable[..., int] | None:
    """Returns the compiled loop, None where the processor has no such instruction."""
    from samerun.stores.native import compile_loop, cpu_features

    if machine() not in ("x86_64", "AMD64") or not cpu_features().get("pclmul"):
        return None
    return compile_loop(_FOLD, 4)

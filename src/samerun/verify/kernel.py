"""The digest's inner loop, compiled at first use for this machine's processor, for one element width at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core import digest
from samerun.stores.native import compile_loop

# One row after another, as `samerun.core.digest` defines it. The index key is multiplied afresh, not carried along:
# on a plain induction variable every version of LLVM uses vector instructions, which are three times as fast.
_LOOP = """
define i64 @loop(i64 %bits.at, i64 %starts.at, i64 %runs, i64 %length, i64 %seed) {{
entry:
  %bits = inttoptr i64 %bits.at to ptr
  %starts = inttoptr i64 %starts.at to ptr
  %no_run = icmp eq i64 %runs, 0
  %no_element = icmp eq i64 %length, 0
  %nothing = or i1 %no_run, %no_element
  br i1 %nothing, label %exit, label %each_run
each_run:
  %run = phi i64 [0, %entry], [%run.next, %run_end]
  %before = phi i64 [0, %entry], [%sum, %run_end]
  %start.at = getelementptr i64, ptr %starts, i64 %run
  %start = load i64, ptr %start.at
  %start.key = mul i64 %start, {stride}
  %first.key = add i64 %seed, %start.key
  %row.first = mul i64 %run, %length
  %row = getelementptr i{width}, ptr %bits, i64 %row.first
  br label %each_element
each_element:
  %element = phi i64 [0, %each_run], [%element.next, %each_element]
  %total = phi i64 [%before, %each_run], [%sum, %each_element]
  %at = getelementptr i{width}, ptr %row, i64 %element
  %stored = load i{width}, ptr %at
  %wide = {widen}
  %step.key = mul i64 %element, {stride}
  %key = add i64 %first.key, %step.key
  %z0 = xor i64 %key, %wide
  %s0 = lshr i64 %z0, 30
  %x0 = xor i64 %z0, %s0
  %z1 = mul i64 %x0, {multiplier_1}
  %s1 = lshr i64 %z1, 27
  %x1 = xor i64 %z1, %s1
  %z2 = mul i64 %x1, {multiplier_2}
  %s2 = lshr i64 %z2, 31
  %term = xor i64 %z2, %s2
  %sum = add i64 %total, %term
  %element.next = add nuw i64 %element, 1
  %row.done = icmp eq i64 %element.next, %length
  br i1 %row.done, label %run_end, label %each_element
run_end:
  %run.next = add nuw i64 %run, 1
  %done = icmp eq i64 %run.next, %runs
  br i1 %done, label %exit, label %each_run
exit:
  %result = phi i64 [0, %entry], [%sum, %run_end]
  ret i64 %result
}}
"""


def sum_terms(bits: npt.NDArray[Any], starts: npt.NDArray[np.uint64], length: int, seed: int | np.uint64) -> int:
    """Sums the terms of runs of `length` elements that follow each other in `bits`; see `samerun.core.digest`.

    `bits` is a contiguous vector of unsigned integers with `length` elements per entry of `starts`. Other threads run
    meanwhile.

    Raises:
        ValueError: if `bits` has another number of elements, or they do not follow each other.
    """
    if bits.size != starts.size * length or not (bits.flags.c_contiguous and starts.flags.c_contiguous):
        raise ValueError(f"{bits.size} elements are not {starts.size} contiguous runs of {length}")
    width = 8 * bits.dtype.itemsize
    return _loop(width)(bits.ctypes.data, starts.ctypes.data, starts.size, length, int(seed))


@cache
def _loop(width: int) -> Callable[..., int]:
    """Returns the loop for one element width in bits."""
    return compile_loop(
        _LOOP.format(
            width=width,
            widen=f"zext i{width} %stored to i64" if width < 64 else "add i64 %stored, 0",
            stride=digest.STRIDE,
            multiplier_1=digest.MULTIPLIER_1,
            multiplier_2=digest.MULTIPLIER_2,
        ),
        5,
    )

"""The digest's inner loop, compiled at first use for this machine's processor, for one element width at a time.

A core computes with vectors and with single numbers at once, by units of their own. So a run of elements is worked on
at two places: most of it by vectors, the end number by number in between. For 16-bit elements that is a tenth faster
than vectors alone. What is left of a run after whole steps, and runs shorter than one, go through a plain loop.

Only AVX-512 multiplies vectors of 64-bit numbers. Elsewhere a product is put together from those of 32-bit halves,
which leaves the single numbers a larger part: a fifth instead of a ninth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samerun.core import digest
from samerun.stores.native import compile_loop, cpu_features

_LANES = 8  # 64-bit numbers in a vector; a processor with shorter ones takes several
_WIDE = f"<{_LANES} x i64>"
_HALF = (1 << 32) - 1


class Step(NamedTuple):
    """What one round of the loop does: how many vectors, how many single numbers, and how vectors are multiplied."""

    vectors: int
    singles: int
    by_halves: bool


NATIVE = Step(4, 4, by_halves=False)  # 1.7 times as fast as `BY_HALVES` where the processor can
BY_HALVES = Step(2, 4, by_halves=True)  # 1.2 times as fast as `NATIVE` where it cannot

_BEGIN = """
declare i64 @llvm.vector.reduce.add.v{lanes}i64({wide})
define i64 @loop(i64 %bits.at, i64 %starts.at, i64 %runs, i64 %length, i64 %seed) {{
entry:
  %bits = inttoptr i64 %bits.at to ptr
  %starts = inttoptr i64 %starts.at to ptr
  %no_run = icmp eq i64 %runs, 0
  %no_element = icmp eq i64 %length, 0
  %nothing = or i1 %no_run, %no_element
  %steps = udiv i64 %length, {step}
  %in_vectors = mul i64 %steps, {in_vectors}
  %in_steps = mul i64 %steps, {step}
  %no_step = icmp eq i64 %steps, 0
  %all_in_steps = icmp eq i64 %in_steps, %length
  br i1 %nothing, label %exit, label %each_run
each_run:
  %run = phi i64 [0, %entry], [%run.next, %run_end]
  %before = phi i64 [0, %entry], [%run.sum, %run_end]
  %start.at = getelementptr i64, ptr %starts, i64 %run
  %start = load i64, ptr %start.at
  %start.key = mul i64 %start, {stride}
  %first.key = add i64 %seed, %start.key
  %row.first = mul i64 %run, %length
  %row = getelementptr i{width}, ptr %bits, i64 %row.first
  %single.offset = mul i64 %in_vectors, {stride}
  %single.first = add i64 %first.key, %single.offset
  %single.row = getelementptr i{width}, ptr %row, i64 %in_vectors
  %first.lane = insertelement {wide} poison, i64 %first.key, i32 0
  %first.splat = shufflevector {wide} %first.lane, {wide} poison, <{lanes} x i32> zeroinitializer
  %first.keys = add {wide} %first.splat, {lane_keys}
  br i1 %no_step, label %left, label %each_step
each_step:
  %number = phi i64 [0, %each_run], [%number.next, %each_step]
  %at = phi ptr [%row, %each_run], [%at.next, %each_step]
  %keys = phi {wide} [%first.keys, %each_run], [%keys.next, %each_step]
  %sums = phi {wide} [zeroinitializer, %each_run], [%sums.{vectors}, %each_step]
  %single.at = phi ptr [%single.row, %each_run], [%single.at.next, %each_step]
  %single.key = phi i64 [%single.first, %each_run], [%single.key.next, %each_step]
  %single.sum = phi i64 [0, %each_run], [%single.sum.{singles}, %each_step]
"""
_END = """
  %number.next = add nuw i64 %number, 1
  %at.next = getelementptr i{width}, ptr %at, i64 {in_vectors}
  %keys.next = add {wide} %keys, {step_keys}
  %single.at.next = getelementptr i{width}, ptr %single.at, i64 {singles}
  %single.key.next = add i64 %single.key, {singles_key}
  %stepped = icmp eq i64 %number.next, %steps
  br i1 %stepped, label %sum_lanes, label %each_step
sum_lanes:
  %lanes = call i64 @llvm.vector.reduce.add.v{lanes}i64({wide} %sums.{vectors})
  %both = add i64 %lanes, %single.sum.{singles}
  br label %left
left:
  %stepped.sum = phi i64 [0, %each_run], [%both, %sum_lanes]
  %so_far = add i64 %before, %stepped.sum
  br i1 %all_in_steps, label %run_end, label %each_left
each_left:
  %element = phi i64 [%in_steps, %left], [%element.next, %each_left]
  %total = phi i64 [%so_far, %left], [%sum, %each_left]
  %left.at = getelementptr i{width}, ptr %row, i64 %element
  %left.key.offset = mul i64 %element, {stride}
  %left.key = add i64 %first.key, %left.key.offset
{left}
  %sum = add i64 %total, %left.term
  %element.next = add nuw i64 %element, 1
  %row.done = icmp eq i64 %element.next, %length
  br i1 %row.done, label %run_end, label %each_left
run_end:
  %run.sum = phi i64 [%so_far, %left], [%sum, %each_left]
  %run.next = add nuw i64 %run, 1
  %done = icmp eq i64 %run.next, %runs
  br i1 %done, label %exit, label %each_run
exit:
  %result = phi i64 [0, %entry], [%run.sum, %run_end]
  ret i64 %result
}}
"""
_VECTOR = """
  %v{i}.at = getelementptr i{width}, ptr %at, i64 {first}
  %v{i}.key = add {wide} %keys, {keys}
{term}
  %sums.{next} = add {wide} %sums{sum}, %v{i}.term
"""
_SINGLE = """
  %s{i}.at = getelementptr i{width}, ptr %single.at, i64 {i}
  %s{i}.key = add i64 %single.key, {key}
{term}
  %single.sum.{next} = add i64 %single.sum{sum}, %s{i}.term
"""
# The mixing of `samerun.core.digest`. Bits below the first shift do not reach what it shifts in, so for short elements
# that depends on the key alone, and the exclusive ors become one instruction.
_MIX_SHORT = """
  %{n}.s0 = lshr {kind} %{n}.key, {c30}
  %{n}.k0 = xor {kind} %{n}.key, %{n}.s0
  %{n}.x0 = xor {kind} %{n}.k0, %{n}.bits
"""
_MIX_LONG = """
  %{n}.z0 = xor {kind} %{n}.key, %{n}.bits
  %{n}.s0 = lshr {kind} %{n}.z0, {c30}
  %{n}.x0 = xor {kind} %{n}.z0, %{n}.s0
"""
_MIX = """
  %{n}.stored = load {stored}, ptr %{n}.at, align 1
  %{n}.bits = {widen}
{first}
{product1}
  %{n}.s1 = lshr {kind} %{n}.z1, {c27}
  %{n}.x1 = xor {kind} %{n}.z1, %{n}.s1
{product2}
  %{n}.s2 = lshr {kind} %{n}.z2, {c31}
  %{n}.term = xor {kind} %{n}.z2, %{n}.s2
"""
# Modulo 2**64: low * low, and 2**32 times the sum of both products of a low and a high half, themselves modulo 2**32.
_PRODUCT_OF_HALVES = """
  %{n}.halves{i} = bitcast {kind} %{n}.{x} to <{halves} x i32>
  %{n}.cross{i} = mul <{halves} x i32> %{n}.halves{i}, {exchanged}
  %{n}.high{i} = bitcast <{halves} x i32> %{n}.cross{i} to {kind}
  %{n}.moved{i} = lshr {kind} %{n}.high{i}, {c32}
  %{n}.both{i} = add {kind} %{n}.high{i}, %{n}.moved{i}
  %{n}.upper{i} = shl {kind} %{n}.both{i}, {c32}
  %{n}.low{i} = and {kind} %{n}.{x}, {mask}
  %{n}.lower{i} = mul {kind} %{n}.low{i}, {low}
  %{n}.z{i} = add {kind} %{n}.lower{i}, %{n}.upper{i}
"""


def sum_terms(
    bits: npt.NDArray[Any],
    starts: npt.NDArray[np.uint64],
    length: int,
    seed: int | np.uint64,
    *,
    step: Step | None = None,
) -> int:
    """Sums the terms of runs of `length` elements that follow each other in `bits`; see `samerun.core.digest`.

    `bits` is a contiguous vector of unsigned integers with `length` elements per entry of `starts`. Other threads run
    meanwhile. `step` is the way to compute it, by default the fastest here; the sum is the same.

    Raises:
        ValueError: if `bits` has another number of elements, or they do not follow each other.
    """
    if bits.size != starts.size * length or not (bits.flags.c_contiguous and starts.flags.c_contiguous):
        raise ValueError(f"{bits.size} elements are not {starts.size} contiguous runs of {length}")
    width = 8 * bits.dtype.itemsize
    return _loop(width, step or _best_step())(bits.ctypes.data, starts.ctypes.data, starts.size, length, int(seed))


@cache
def _best_step() -> Step:
    """Returns what suits this processor."""
    features = cpu_features()
    return BY_HALVES if features.get("avx2") and not features.get("avx512dq") else NATIVE


@cache
def _loop(width: int, step: Step) -> Callable[..., int]:
    """Returns the loop for one element width in bits."""
    in_vectors = _LANES * step.vectors
    facts = {
        "width": width,
        "wide": _WIDE,
        "lanes": _LANES,
        "vectors": step.vectors,
        "singles": step.singles,
        "in_vectors": in_vectors,
        "step": in_vectors + step.singles,
        "stride": digest.STRIDE,
        "lane_keys": _vector([lane * digest.STRIDE for lane in range(_LANES)]),
        "step_keys": _vector([in_vectors * digest.STRIDE] * _LANES),
        "singles_key": step.singles * digest.STRIDE & digest.MASK,
        "left": _mix("left", width),
    }
    vectors = [_vector_part(width, i, by_halves=step.by_halves) for i in range(step.vectors)]
    singles = [_single_part(width, i) for i in range(step.singles)]
    return compile_loop(_BEGIN.format(**facts) + "".join(vectors + singles) + _END.format(**facts), 5)


def _vector_part(width: int, i: int, *, by_halves: bool) -> str:
    """Returns the instructions for vector `i` of a step."""
    first = i * _LANES
    keys = _vector([first * digest.STRIDE] * _LANES)
    sum, next = f".{i}" if i else "", i + 1
    term = _mix(f"v{i}", width, _LANES, by_halves=by_halves)
    return _VECTOR.format(i=i, width=width, wide=_WIDE, first=first, keys=keys, sum=sum, next=next, term=term)


def _single_part(width: int, i: int) -> str:
    """Returns the instructions for single number `i` of a step."""
    key, sum, next = i * digest.STRIDE & digest.MASK, f".{i}" if i else "", i + 1
    return _SINGLE.format(i=i, width=width, key=key, sum=sum, next=next, term=_mix(f"s{i}", width))


def _mix(name: str, width: int, lanes: int = 1, *, by_halves: bool = False) -> str:
    """Returns the instructions that make `%name.term` of the elements at `%name.at` with `%name.key`."""
    kind, stored = (_WIDE, f"<{lanes} x i{width}>") if lanes > 1 else ("i64", f"i{width}")

    def constant(value: int) -> str:
        return _vector([value] * lanes) if lanes > 1 else str(value)

    def product(i: int, x: str, factor: int) -> str:
        if not by_halves:
            return f"  %{name}.z{i} = mul {kind} %{name}.{x}, {constant(factor)}"
        low, high = factor & _HALF, factor >> 32
        return _PRODUCT_OF_HALVES.format(
            n=name,
            i=i,
            x=x,
            kind=kind,
            halves=2 * lanes,
            exchanged=f"<{', '.join([f'i32 {high}, i32 {low}'] * lanes)}>",
            c32=constant(32),
            mask=constant(_HALF),
            low=constant(low),
        )

    zero = "zeroinitializer" if lanes > 1 else "0"
    widen = f"zext {stored} %{name}.stored to {kind}" if width < 64 else f"add {kind} %{name}.stored, {zero}"
    first = (_MIX_SHORT if width <= 16 else _MIX_LONG).format(n=name, kind=kind, c30=constant(30))
    return _MIX.format(
        n=name,
        kind=kind,
        stored=stored,
        widen=widen,
        first=first,
        product1=product(1, "x0", digest.MULTIPLIER_1),
        product2=product(2, "x1", digest.MULTIPLIER_2),
        c27=constant(27),
        c31=constant(31),
    )


def _vector(values: list[int]) -> str:
    """Returns a constant vector of 64-bit numbers."""
    return f"<{', '.join(f'i64 {value & digest.MASK}' for value in values)}>"

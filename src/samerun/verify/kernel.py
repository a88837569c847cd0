"""The digest's inner loop, compiled at first use for this machine's processor. Import it only where bytes are read.

The loop is written in LLVM's intermediate language and compiled by `llvmlite`, for one element width at a time: loading
that and compiling take a tenth of a second together. The same loop through numba takes ten times as long, most of it
to load numba's type inference. Nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt

from samerun.core import digest

_Function = Callable[[int, int, int, int, int], int]

# One row after another, as `samerun.core.digest` defines it. The index key is multiplied afresh, not carried along:
# on a plain induction variable every version of LLVM uses vector instructions, which are three times as fast.
_LOOP = """
define i64 @sum_terms(ptr noalias nocapture readonly %bits, ptr noalias nocapture readonly %starts, i64 %runs,
                      i64 %length, i64 %seed) {{
entry:
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
_compiling = Lock()


def sum_terms(bits: npt.NDArray[Any], starts: npt.NDArray[np.uint64], length: int, seed: int | np.uint64) -> int:
    """Sums the terms of runs of `length` elements that follow each other in `bits`; see `samerun.core.digest`.

    `bits` is a contiguous vector of unsigned integers with `length` elements per entry of `starts`. Other threads run
    meanwhile.

    Raises:
        ValueError: if `bits` has another number of elements, or they do not follow each other.
    """
    if bits.size != starts.size * length or not (bits.flags.c_contiguous and starts.flags.c_contiguous):
        raise ValueError(f"{bits.size} elements are not {starts.size} contiguous runs of {length}")
    function = _function(8 * bits.dtype.itemsize)
    return function(bits.ctypes.data, starts.ctypes.data, starts.size, length, int(seed))


def _function(width: int) -> _Function:
    with _compiling:  # two threads that need the same width wait for one compilation
        return _compiled(width)[1]


@cache
def _compiled(width: int) -> tuple[Any, _Function]:
    """Compiles for one element width in bits. Returns the engine, which owns the machine code, and the function."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(
        _LOOP.format(
            width=width,
            widen=f"zext i{width} %stored to i64" if width < 64 else "add i64 %stored, 0",
            stride=digest.STRIDE,
            multiplier_1=digest.MULTIPLIER_1,
            multiplier_2=digest.MULTIPLIER_2,
        )
    )
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(
        ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64
    )
    return engine, kind(engine.get_function_address("sum_terms"))

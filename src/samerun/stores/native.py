"""Machine code for the few loops that touch every byte: LLVM's intermediate language, compiled where it runs.

`llvmlite` is loaded and a loop compiled in a twentieth of a second, for the processor that is there: loops are written
with the vectors that they are to use, so that no optimiser has to find them. Nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from threading import Lock
from typing import Any

compiling = Lock()  # held by whoever compiles


def compile_loop(text: str, num_arguments: int) -> Callable[..., int]:
    """Compiles the function `loop` of a module, whose arguments are addresses and unsigned 64-bit integers.

    It returns an unsigned 64-bit integer, and other threads run while it does. Compiled once per text; threads that
    need the same one wait for it.
    """
    with compiling:
        return _compile(text, num_arguments)[1]


@cache
def _compile(text: str, num_arguments: int) -> tuple[Any, Callable[..., int]]:
    """Returns the engine, which owns the machine code, and the function."""
    import llvmlite.binding as llvm

    engine = make_engine(llvm.parse_assembly(text))
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_uint64] * num_arguments)
    return engine, kind(engine.get_function_address("loop"))


def make_engine(module: Any) -> Any:
    """Compiles a parsed module for this processor. The engine that is returned owns the machine code."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


@cache
def cpu_features() -> Mapping[str, bool]:
    """Returns what the processor can do, by LLVM's names."""
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())

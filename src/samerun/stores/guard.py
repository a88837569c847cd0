"""What happens when a mapped file is cut off while it is read: an error, where the system would end the process.

Touching a page of a map behind the end of its file raises SIGBUS. For maps that are registered here, a handler in
machine code puts zero pages in place of what is gone, from there to the end of the map, and notes which file it was;
`require_whole_maps` then raises. So whoever reads values through a map asks it before the result is used. A fault at
any other address is passed on to whoever handled it before. Linux only; elsewhere nothing is guarded.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import weakref
from functools import cache
from threading import Lock
from typing import Any

from samerun.errors import CorruptCheckpoint, Problem
from samerun.stores.native import compiling, make_engine

_MAX_MAPS = 1024
_SA_SIGINFO, _SA_NODEFER = 4, 0x40000000
_PROT_READ, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 1, 2, 0x10, 0x20

# int si_signo, si_errno, si_code, then si_addr at byte 16, on every 64-bit Linux: <bits/types/siginfo_t.h>
_HANDLER = """
define void @handler(i32 %signal, i8* %info, i8* %context) {{
entry:
  %place = getelementptr i8, i8* %info, i64 16
  %typed = bitcast i8* %place to i64*
  %address = load i64, i64* %typed
  br label %next
next:
  %i = phi i64 [0, %entry], [%after, %advance]
  %done = icmp eq i64 %i, {maps}
  br i1 %done, label %foreign, label %look
look:
  %row = mul i64 %i, 3
  %first = getelementptr i64, i64* inttoptr (i64 {table} to i64*), i64 %row
  %second = getelementptr i64, i64* %first, i64 1
  %start = load volatile i64, i64* %first
  %stop = load volatile i64, i64* %second
  %above = icmp uge i64 %address, %start
  %below = icmp ult i64 %address, %stop
  %inside = and i1 %above, %below
  br i1 %inside, label %found, label %advance
advance:
  %after = add i64 %i, 1
  br label %next
found:
  %third = getelementptr i64, i64* %first, i64 2
  store volatile i64 1, i64* %third
  store volatile i64 1, i64* inttoptr (i64 {any} to i64*)
  %page = and i64 %address, -{page}
  %length = sub i64 %stop, %page
  %got = call i64 inttoptr (i64 {mmap} to i64 (i64, i64, i32, i32, i32, i64)*)(
      i64 %page, i64 %length, i32 {protection}, i32 {flags}, i32 -1, i64 0)
  %failed = icmp eq i64 %got, -1
  br i1 %failed, label %foreign, label %end
foreign:
  %restored = call i32 inttoptr (i64 {sigaction} to i32 (i32, i8*, i8*)*)(
      i32 %signal, i8* inttoptr (i64 {before} to i8*), i8* null)
  br label %end
end:
  ret void
}}
"""


class _Action(ctypes.Structure):
    """`struct sigaction` as the C library has it."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


# Rows of first byte, byte behind the last, and whether it was cut off. Written here, read by the handler.
_table = (ctypes.c_uint64 * (3 * _MAX_MAPS))()
_any_cut = ctypes.c_uint64()
_files: dict[int, str] = {}
_free = list(range(_MAX_MAPS))
_lock = Lock()


def watch_map(mapped: mmap.mmap, path: str | os.PathLike[str]) -> None:
    """Registers a read-only map until it is gone. More than about a thousand at once are not guarded."""
    import numpy as np

    with _lock:
        if not _free:
            return
        row = _free.pop()
    start = np.frombuffer(mapped, np.uint8).ctypes.data
    _files[row] = os.fspath(path)
    _table[3 * row + 2] = 0
    _table[3 * row + 1] = start + len(mapped)
    _table[3 * row] = start
    weakref.finalize(mapped, _forget, row).atexit = False


def _forget(row: int) -> None:
    _table[3 * row + 1] = _table[3 * row] = _table[3 * row + 2] = 0
    _files.pop(row, None)
    _free.append(row)


def guard_maps() -> None:
    """Makes SIGBUS in a registered map an event. Called before values are read, also again: others may have their own
    handler put in place since (`faulthandler.enable()`), which is then called for faults elsewhere.
    """
    if sys.platform.startswith("linux") and sys.maxsize > 2**32:
        with compiling:  # one thread at a time
            _install(*_compile())


@cache
def _compile() -> tuple[Any, ctypes.CDLL, _Action, _Action]:
    """Returns what has to stay alive for the handler: the engine, the C library, the action, and what was before it."""
    import llvmlite.binding as llvm

    libc = ctypes.CDLL(None, use_errno=True)
    before = _Action()
    text = _HANDLER.format(
        maps=_MAX_MAPS,
        table=ctypes.addressof(_table),
        any=ctypes.addressof(_any_cut),
        page=mmap.PAGESIZE,
        mmap=ctypes.cast(libc.mmap, ctypes.c_void_p).value,
        sigaction=ctypes.cast(libc.sigaction, ctypes.c_void_p).value,
        before=ctypes.addressof(before),
        protection=_PROT_READ,
        flags=_MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS,
    )
    engine = make_engine(llvm.parse_assembly(text))
    action = _Action(handler=engine.get_function_address("handler"), flags=_SA_SIGINFO | _SA_NODEFER)
    return engine, libc, action, before


def _install(engine: Any, libc: ctypes.CDLL, action: _Action, before: _Action) -> None:
    """Puts the handler in place unless it is there. Where the system refuses it, faults stay what they were."""
    now = _Action()
    if libc.sigaction(int(signal.SIGBUS), None, ctypes.byref(now)) == 0 and now.handler != action.handler:
        ctypes.memmove(ctypes.byref(before), ctypes.byref(now), ctypes.sizeof(_Action))
        libc.sigaction(int(signal.SIGBUS), ctypes.byref(action), None)


def require_whole_maps() -> None:
    """Raises CorruptCheckpoint for every file that is mapped and was found cut off."""
    if not _any_cut.value:
        return
    if cut := sorted({name for row, name in list(_files.items()) if _table[3 * row + 2]}):
        raise CorruptCheckpoint([_cut_off(name) for name in cut])
    _any_cut.value = 0  # those maps are gone


def _cut_off(path: str) -> Problem:
    return Problem(
        "SR-FILE-TRUNCATED",
        "a file was cut off while its values were read",
        where={"file": path},
        found=f"{os.path.getsize(path)} bytes" if os.path.exists(path) else "no file",
        hint="something writes to the checkpoint, or its file system lost the rest; nothing that was read of it counts",
    )

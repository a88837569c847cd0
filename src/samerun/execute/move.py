"""Moves bytes between files: in the kernel where it can, through a small buffer where a checksum is wanted."""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock, local
from typing import Any

import numpy as np

from samerun.errors import CorruptCheckpoint, ExecutionError, Problem
from samerun.formats.base import Array
from samerun.stores.crc32 import crc32
from samerun.stores.local import open_regular
from samerun.stores.remote import REQUEST_BYTES, RemoteFile

STEP_BYTES = 8 << 20  # between two looks at whether the work was cancelled
BUFFER_BYTES = 512 << 10  # stays in a core's own cache
_PART_BYTES = 256 << 10  # see `_write_parts`
_MAX_OPEN_FILES = 64
_PAGE_BYTES = 4096
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_IN_KERNEL = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})


class OpenFiles:
    """Descriptors of files, opened on demand, a bounded number per thread. `close` closes those of every thread."""

    def __init__(self, open_file: Callable[[str], int]) -> None:
        self._open = open_file
        self._local = local()
        self._all: list[OrderedDict[str, int]] = []
        self._lock = Lock()

    def get(self, path: str) -> int:
        """Returns a descriptor that belongs to the calling thread."""
        held: OrderedDict[str, int] | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = OrderedDict[str, int]()
            with self._lock:
                self._all.append(held)
        if path in held:
            held.move_to_end(path)
            return held[path]
        descriptor = held[path] = self._open(path)
        if len(held) > _MAX_OPEN_FILES:
            os.close(held.popitem(last=False)[1])
        return descriptor

    def close(self) -> None:
        """Closes every descriptor."""
        for held in self._all:
            while held:
                os.close(held.popitem()[1])


def open_source(path: str) -> int:
    """Opens a source file read-only."""
    return open_regular(Path(path))


def open_destination(path: str) -> int:
    """Opens a destination file that exists already; never through a link."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


class Mover:
    """Copies ranges between descriptors. Remembers when the kernel refuses to copy between these file systems.

    The kernel moves page by page. Where a range lies at another place within its pages on the two sides, every page
    becomes two pieces, and a buffer takes two thirds of the time.
    """

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._in_kernel = hasattr(os, "copy_file_range")
        self._local = local()
        self._turns: dict[tuple[int, int], Lock] = {}

    def copy(self, source: int, offset: int, target: int, at: int, length: int, name: str) -> None:
        """Copies a range. `name` is the source's path, for messages.

        Raises:
            CorruptCheckpoint: if the source ends before the range does.
            ExecutionError: if the source cannot be read.
            InterruptedError: if the work was cancelled.
        """
        done = 0
        turn = self._turn(target)
        while done < length and self._in_kernel and offset % _PAGE_BYTES == at % _PAGE_BYTES:
            self._look()
            try:
                with turn:
                    step = os.copy_file_range(source, target, min(STEP_BYTES, length - done), offset + done, at + done)
            except OSError as error:
                if error.errno == errno.EIO:
                    break  # which side failed is told by reading and writing separately
                if error.errno not in _NOT_IN_KERNEL:
                    raise
                self._in_kernel = False
                break
            if step == 0:
                break  # the end of the file, or a file system that copies nothing without saying so
            done += step
        if done < length:
            self._through_buffer(source, offset + done, target, at + done, length - done, name)

    def copy_summed(self, source: int, offset: int, target: int, at: int, length: int, name: str) -> int:
        """Copies a range and returns the CRC32 of its bytes. Raises as `copy` does."""
        return self._through_buffer(source, offset, target, at, length, name, summed=True)

    def copy_fetched(self, source: RemoteFile, offset: int, target: int, at: int, length: int) -> int:
        """Copies a range of an object of a store, request by request, and returns the CRC32 of its bytes."""
        checksum, done = 0, 0
        while done < length:
            self._look()
            part = source.read(offset + done, offset + min(done + REQUEST_BYTES, length))
            if not part:
                raise CorruptCheckpoint(ends_early(source.url, offset + length, offset + done))
            checksum = crc32(part, checksum)
            write_all(target, part, at + done)
            done += len(part)
        return checksum

    def _through_buffer(
        self, source: int, offset: int, target: int, at: int, length: int, name: str, *, summed: bool = False
    ) -> int:
        buffer, turn = self._buffer(), self._turn(target)
        checksum, done = 0, 0
        while done < length:
            self._look()
            try:
                found = os.preadv(source, [buffer[: min(BUFFER_BYTES, length - done)]], offset + done)
            except OSError as error:
                raise ExecutionError(_unreadable(name, offset + done, error)) from error
            if found == 0:
                raise CorruptCheckpoint(ends_early(name, offset + length, offset + done))
            if summed:
                checksum = crc32(buffer[:found], checksum)
            with turn:
                _write_parts(target, buffer[:found], at + done)
            done += found
        return checksum

    def _buffer(self) -> memoryview:
        held: memoryview | None = getattr(self._local, "buffer", None)
        if held is None:
            held = self._local.buffer = memoryview(bytearray(BUFFER_BYTES))
        return held

    def _turn(self, target: int) -> Lock:
        """Returns the lock of a destination file. Its writers take turns in the kernel anyway, but there they spin."""
        found = os.fstat(target)
        return self._turns.setdefault((found.st_dev, found.st_ino), Lock())

    def _look(self) -> None:
        if self._cancelled():
            raise InterruptedError(errno.EINTR, "the conversion was interrupted")


def reserve(target: int, size: int) -> None:
    """Sets aside the space of a file of `size` bytes, where its file system can: a full disk shows before the copying.

    Writing into reserved space also takes a fifth less time, as nothing is booked page by page.

    Raises:
        OSError: if there is not so much space.
    """
    call = _fallocate()
    if size and call is not None and call(target, 0, 0, size) and (code := ctypes.get_errno()) in _FULL:
        raise OSError(code, os.strerror(code))


@cache
def _fallocate() -> Callable[..., int] | None:
    """Returns the system's own call: `os.posix_fallocate` writes all the blocks where that is not supported."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return found


def _write_parts(target: int, content: memoryview, at: int) -> None:
    """Writes all of `content`. What is page-aligned goes in small parts.

    For a long aligned write the kernel looks for as large a run of free memory to keep it in. Where memory is
    fragmented, finding one takes several times as long as the copying.
    """
    part = _PART_BYTES
    for first in range(0, len(content), part):
        write_all(target, content[first : first + part], at + first)


def write_all(target: int, content: memoryview | bytes, at: int) -> None:
    """Writes all of `content` at byte `at`."""
    left = memoryview(content)
    while left:
        count = os.pwrite(target, left, at)
        left, at = left[count:], at + count


def sum_segments(content: memoryview, at: int, cuts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Returns (first byte, length, CRC32) of the parts of `content` between cuts; it lies from byte `at` on."""
    stop = at + len(content)
    edges = [at, *cuts[bisect_right(cuts, at) : bisect_left(cuts, stop)], stop]
    return [(a, b - a, crc32(content[a - at : b - at])) for a, b in pairwise(edges) if b > a]


def read_strided(
    read: Callable[[int, int], bytes | bytearray],
    offset: int,
    strides: Sequence[int],
    out: Array,
    stored: np.dtype[Any],
    change: Callable[[Array], Array],
) -> None:
    """Fills `out` with values of a file that lie with these steps in bytes, changed by `change`, in small parts.

    `read` gives a number of bytes from an offset on; `stored` is their type in the file. Reads, and does not map: a
    file that is cut off meanwhile gives an error, where touching its map would end the process.

    Raises:
        CorruptCheckpoint: if they reach beyond the end of the file, as it is now.
        ExecutionError: if the file cannot be read.
    """
    spans = [(size - 1) * stride for size, stride in zip(out.shape, strides, strict=True)]
    need = sum(spans) + stored.itemsize
    if out.size == 0:
        return
    widest = max(range(len(spans)), key=spans.__getitem__, default=0)
    inner = need - spans[widest] if spans else need
    if not spans or spans[widest] == 0 or (need <= BUFFER_BYTES and not _sparse(strides[widest], inner)):
        content = read(offset, need)
        out[...] = change(np.ndarray(out.shape, stored, buffer=content, strides=tuple(strides)))
        return
    rows = 1 if _sparse(strides[widest], inner) else max(1, (BUFFER_BYTES - inner) // strides[widest] + 1)
    for first in range(0, out.shape[widest], rows):
        part = out[(slice(None),) * widest + (slice(first, first + rows),)]
        read_strided(read, offset + first * strides[widest], strides, part, stored, change)


def _sparse(stride: int, inner: int) -> bool:
    """Whether so much lies between two rows that reading them one by one is less work than reading over the gap."""
    return inner >= _PAGE_BYTES and stride > 4 * inner


def read_remote(source: RemoteFile, offset: int, length: int) -> bytes:
    """Returns bytes of an object. Raises CorruptCheckpoint if it ends before them."""
    if offset + length > len(source):
        raise CorruptCheckpoint(ends_early(source.url, offset + length, len(source)))
    return source.read(offset, offset + length)


def read_exactly(source: int, name: str, offset: int, length: int) -> bytearray:
    """Returns bytes of an open file called `name`. Raises CorruptCheckpoint if it ends before them."""
    content = bytearray(length)
    done = 0
    while done < length:
        try:
            found = os.preadv(source, [memoryview(content)[done:]], offset + done)
        except OSError as error:
            raise ExecutionError(_unreadable(name, offset + done, error)) from error
        if found == 0:
            raise CorruptCheckpoint(ends_early(name, offset + length, offset + done))
        done += found
    return content


def ends_early(path: str, needed: int, found: int) -> Problem:
    """Returns the finding for a source file that is shorter than it was when the plan was made."""
    return Problem(
        "SR-FILE-TRUNCATED",
        "a source file ends before the values that were to be copied",
        where={"file": path},
        expected=f"at least {needed} bytes",
        found=f"{found} bytes",
        hint="it was cut off, or something writes to the source; nothing became visible at the destination",
    )


def _unreadable(path: str, at: int, error: OSError) -> Problem:
    return Problem(
        "SR-CONVERT-READ",
        f"a source file cannot be read at byte {at}: {error.strerror}",
        where={"file": path},
        hint="the disk or the network failed; once the file can be read, the same command goes on where it was",
    )

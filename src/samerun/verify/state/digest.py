"""Digests of tensors in checkpoint files: piece by piece from the mapped file, at several GB/s per core."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samerun.core.box import check_tiling
from samerun.core.digest import MASK, bits_of, box_runs, complex_as_two, digest_seed, whole_digest
from samerun.core.dtype import DType
from samerun.errors import CorruptCheckpoint, FormatError, Problem
from samerun.formats.base import coverage_problems
from samerun.stores.guard import guard_maps, require_whole_maps

if TYPE_CHECKING:
    from samerun.core.state import TensorEntry
    from samerun.formats.base import Checkpoint

Array = npt.NDArray[Any]

_BLOCK_BYTES = 32 << 20  # the most that is copied at once, where values must be copied: casts and strided pieces


def digest_array(key: str, array: Array, dtype: DType, shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Returns the digest of the box of a tensor that `array` holds; `samerun.core.digest.digest_box`, compiled."""
    from samerun.verify.state.kernel import sum_terms

    seed = np.uint64(digest_seed(key, dtype, shape))
    total = 0
    for start, block in [(0, array)] if array.flags.c_contiguous else blocks(array):
        position = (offsets[0] + start, *offsets[1:]) if array.ndim else ()
        runs = box_runs(*complex_as_two(dtype, shape, position, block.shape))
        total += int(sum_terms(bits_of(block), runs.starts, runs.length, seed))
    return total & MASK


def blocks(array: Array) -> Iterator[tuple[int, Array]]:
    """Yields (first row, rows) in blocks of a few tens of MiB, for work that has to copy the values."""
    if array.ndim == 0 or array.nbytes <= _BLOCK_BYTES:
        yield 0, array
        return
    rows = max(1, _BLOCK_BYTES * array.shape[0] // array.nbytes)
    for start in range(0, array.shape[0], rows):
        yield start, array[start : start + rows]


def digest_tensor(checkpoint: Checkpoint, key: str, *, as_key: str | None = None) -> str:
    """Returns the digest of one tensor of a checkpoint, by default under its own key. Reads every byte of it once.

    Raises:
        CorruptCheckpoint: if the pieces do not cover the tensor exactly, or one cannot be read.
    """
    entry = checkpoint.state.tensors[key]
    total = sum(
        digest_array(as_key or key, array, entry.dtype, entry.shape, offsets)
        for offsets, array in read_pieces(checkpoint, key)
    )
    return whole_digest(total, as_key or key, entry.dtype, entry.shape)


def digest_cast(checkpoint: Checkpoint, key: str, as_key: str, dtype: DType) -> str:
    """Returns the digest that a tensor of a checkpoint has after a cast to `dtype`, under the key `as_key`.

    Casts round to the nearest value, ties to even, as torch's do. This is how a differing element type is explained:
    a job that holds the cast of what is saved has this digest.
    """
    from samerun.formats.base import numpy_dtype

    entry = checkpoint.state.tensors[key]
    target = numpy_dtype(dtype)
    total = 0
    for offsets, array in read_pieces(checkpoint, key):
        for start, block in blocks(array):
            position = (offsets[0] + start, *offsets[1:]) if array.ndim else ()
            with np.errstate(all="ignore"):
                cast = block.astype(target)
            total += digest_array(as_key, cast, dtype, entry.shape, position)
    return whole_digest(total, as_key, dtype, entry.shape)


def read_pieces(checkpoint: Checkpoint, key: str) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yields (offsets, values) for each piece of a tensor, replicas once: together every element exactly once.

    Raises:
        CorruptCheckpoint: if they do not add up to the tensor.
    """
    entry = checkpoint.state.tensors[key]
    problems = coverage_problems(str(entry.key), check_tiling(entry.shape, entry.tiling))
    if problems:
        raise CorruptCheckpoint(problems)
    for piece in unique_pieces(entry):
        yield from read_piece_blocks(checkpoint, key, piece)


def read_piece_blocks(checkpoint: Checkpoint, key: str, piece: int) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yields (offsets in the tensor, values) of a piece: whole where it is a view of its file.

    Where the reader has to cast or rescale what is stored, it is read in blocks of some tens of MiB along the first
    dimension, so that it never lies in memory whole (a later replica of the same box does: `read` gives the first).

    Raises:
        CorruptCheckpoint: when going on, if a file was cut off: what was made of the values before does not count.
    """
    guard_maps()
    for found in _piece_blocks(checkpoint, key, piece):
        yield found
        require_whole_maps()


def _piece_blocks(checkpoint: Checkpoint, key: str, piece: int) -> Iterator[tuple[tuple[int, ...], Array]]:
    entry = checkpoint.state.tensors[key]
    first, sizes = tuple(entry.tiling.offsets[piece].tolist()), tuple(entry.tiling.sizes[piece].tolist())
    num_bytes = math.prod(sizes) * entry.dtype.num_bytes
    in_blocks = num_bytes > _BLOCK_BYTES and bool(sizes) and _is_made(checkpoint, key, piece)
    if not in_blocks or piece not in unique_pieces(entry):
        yield first, checkpoint.read_piece(key, piece)
        return
    rows = max(1, _BLOCK_BYTES * sizes[0] // num_bytes)
    for start in range(0, sizes[0], rows):
        at = (first[0] + start, *first[1:])
        yield at, checkpoint.read(key, at, (min(rows, sizes[0] - start), *sizes[1:]))


def _is_made(checkpoint: Checkpoint, key: str, piece: int) -> bool:
    """Whether a piece's values are not the stored ones."""
    try:
        extent = checkpoint.locate(key, piece)
    except FormatError:
        return False  # a number kept inside an object, or nothing that can be read: `read_piece` says so
    return extent.dtype != checkpoint.state.tensors[key].dtype or extent.divisor != 1.0


def unique_pieces(entry: TensorEntry) -> list[int]:
    """Returns the numbers of the pieces that differ in place; of exact replicas the first."""
    seen: dict[bytes, int] = {}
    for piece, (offsets, sizes) in enumerate(zip(entry.tiling.offsets, entry.tiling.sizes, strict=True)):
        if sizes.all():
            seen.setdefault(offsets.tobytes() + sizes.tobytes(), piece)
    return list(seen.values())


def digest_checkpoint(
    checkpoint: Checkpoint,
    *,
    rekey: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: Callable[[str, int], None] | None = None,
    threads: int = 2,
) -> dict[str, str]:
    """Returns the digest of every tensor of a checkpoint by key, in the checkpoint's order.

    Args:
        checkpoint: the opened checkpoint.
        rekey: other keys to digest (and list) tensors under, by the checkpoint's key.
        include: glob patterns of keys to digest; all by default.
        exclude: glob patterns of keys to leave out.
        progress: called with (key, bytes) as each tensor is done.
        threads: tensors digested at once; more than there are cores gains nothing.

    Raises:
        CorruptCheckpoint: if a tensor is not whole or cannot be read; every such tensor is listed.
    """
    keys = select_keys(checkpoint.state.tensors, include, exclude)
    names = rekey or {}
    digests: dict[str, str] = {}
    problems: list[Problem] = []

    def work(key: str) -> str | CorruptCheckpoint:
        try:
            return digest_tensor(checkpoint, key, as_key=names.get(key, key))
        except CorruptCheckpoint as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        for key, result in zip(keys, pool.map(work, keys), strict=True):
            if isinstance(result, CorruptCheckpoint):
                problems.extend(result.problems)
            else:
                digests[names.get(key, key)] = result
            if progress is not None:
                progress(key, checkpoint.state.tensors[key].num_bytes)
    if problems:
        raise CorruptCheckpoint(problems)
    return digests


def select_keys(keys: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Returns the keys that match one of `include` (all, if there are none) and none of `exclude`; glob patterns."""
    return [
        key
        for key in keys
        if (not include or any(fnmatch.fnmatchcase(key, pattern) for pattern in include))
        and not any(fnmatch.fnmatchcase(key, pattern) for pattern in exclude)
    ]


def cast_error(checkpoint: Checkpoint, key: str, dtype: DType) -> float:
    """Returns the largest change that a cast to `dtype` makes to a value, relative to the largest magnitude."""
    from samerun.formats.base import numpy_dtype

    target = numpy_dtype(dtype)
    largest, worst = 0.0, 0.0
    for _, array in read_pieces(checkpoint, key):
        for _, block in blocks(array):
            with np.errstate(all="ignore"):
                exact = block.astype(np.float64)
                error = np.abs(block.astype(target).astype(np.float64) - exact)
            largest = max(largest, float(np.max(np.abs(exact), initial=0.0)))
            worst = max(worst, float(np.max(error, initial=0.0)))
    return worst / largest if largest else worst

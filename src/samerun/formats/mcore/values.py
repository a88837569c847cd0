"""Checks that read values: copies that must be equal, masters against weights, and masters that were rounded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from samerun.core.state import Role, TensorEntry
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import Array, numpy_dtype
from samerun.formats.deepspeed.values import Odd
from samerun.formats.mcore.held import HeldCheckpoint

_FEWEST_ELEMENTS = 32
_BLOCK_BYTES = 8 << 20


def check_replicas(checkpoint: HeldCheckpoint) -> list[Problem]:
    """Compares every further copy of a tensor with it, bit by bit."""
    odd = Odd()
    for copy in checkpoint.replicas:
        entry = checkpoint.state.tensors.get(copy.key)
        if entry is None:
            continue
        for piece in range(len(copy.held.tiling)):
            odd.compared += 1
            try:
                other = checkpoint.storage.view(copy.held, piece)
                offsets, sizes = copy.held.tiling.offsets[piece].tolist(), copy.held.tiling.sizes[piece].tolist()
                mine = checkpoint.read(copy.key, tuple(offsets), tuple(sizes))
            except FormatError:
                continue  # a gap or a broken file, reported as that
            if not all(_same(*block) for block in _blocks(mine, other)):
                odd.tensors.setdefault(copy.key)
                odd.files[str(checkpoint.storage.extent(copy.held, piece).file)] += 1
    return [_replicas(odd)] if odd.tensors else []


def check_masters(checkpoint: HeldCheckpoint) -> list[Problem]:
    """Compares masters with weights: they must round to them, and hold more than a weight can."""
    differ, rounded = Odd(), Odd()
    for key, entry, param in _pairs(checkpoint):
        exact = entry.dtype.mantissa_bits > param.dtype.mantissa_bits and _moved(checkpoint, entry.key.fqn)
        coarse = exact and entry.num_elements >= _FEWEST_ELEMENTS
        for piece in range(len(entry.tiling)):
            try:
                masters = checkpoint.read_piece(key, piece)
                offsets, sizes = entry.tiling.offsets[piece].tolist(), entry.tiling.sizes[piece].tolist()
                weights = checkpoint.read(str(param.key), tuple(offsets), tuple(sizes))
                file = str(checkpoint.locate(key, piece).file)
            except FormatError:
                coarse = False
                continue
            differ.compared += 1
            equal = True
            for values, others in _blocks(masters, weights):
                with np.errstate(all="ignore"):
                    cast = values.astype(numpy_dtype(param.dtype))
                equal = equal and _same(cast, others)
                coarse = coarse and _same(cast.astype(masters.dtype), values)
            if not equal:
                differ.tensors.setdefault(str(param.key))
                differ.files[file] += 1
        if coarse:
            rounded.tensors.setdefault(key)
    return ([_masters(differ)] if differ.tensors else []) + ([_rounded(rounded)] if rounded.tensors else [])


def _pairs(checkpoint: HeldCheckpoint) -> Iterator[tuple[str, TensorEntry, TensorEntry]]:
    tensors = checkpoint.state.tensors
    for key, entry in tensors.items():
        param = tensors.get(f"param:{entry.key.fqn}")
        if entry.key.role is Role.MASTER and param is not None and param.shape == entry.shape:
            yield key, entry, param


def _moved(checkpoint: HeldCheckpoint, fqn: str) -> bool:
    """Whether a parameter was ever updated: a moment of it holds something else than zeros."""
    for slot in ("exp_avg", "momentum_buffer"):
        entry = checkpoint.state.tensors.get(f"optim.{slot}:{fqn}")
        if entry is None:
            continue
        try:
            return any(bool(np.any(checkpoint.read_piece(str(entry.key), i))) for i in range(len(entry.tiling)))
        except FormatError:
            return False
    return False


def _blocks(first: Array, second: Array) -> Iterator[tuple[Array, Array]]:
    """Yields equal parts of two arrays of one shape, some megabytes each: what is cast is never a whole tensor."""
    axis = next((axis for axis, size in enumerate(first.shape) if size > 1), None)
    if axis is None or first.nbytes <= _BLOCK_BYTES:
        yield first, second
        return
    rows = max(1, _BLOCK_BYTES * first.shape[axis] // first.nbytes)
    for start in range(0, first.shape[axis], rows):
        part = (*(slice(None),) * axis, slice(start, start + rows))
        yield first[part], second[part]


def _same(first: Array, second: Array) -> bool:
    return np.array_equal(_bits(first), _bits(second))


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _replicas(odd: Odd) -> Problem:
    return Problem(
        "SR-MEG-REPLICA",
        f"copies of the same tensor on different ranks differ in {len(odd.tensors)} cases: {odd.text()}",
        where={"file": odd.worst(), "tensor": next(iter(odd.tensors))},
        found=f"{sum(odd.files.values())} of {odd.compared} pieces",
        hint="norms, biases and shared embeddings must be equal on all ranks that hold them: a file is of another "
        "save, or the ranks had drifted apart before",
    )


def _masters(odd: Odd) -> Problem:
    return Problem(
        "SR-MEG-MASTER",
        f"weights are not what the optimizer's masters round to in {len(odd.tensors)} tensors: {odd.text()}",
        where={"file": odd.worst(), "tensor": next(iter(odd.tensors))},
        found=f"{sum(odd.files.values())} of {odd.compared} pieces",
        hint="model and optimizer are of different saves, or values were changed after the save; Megatron goes on from "
        "the masters. Use another checkpoint",
    )


def _rounded(odd: Odd) -> Problem:
    return Problem(
        "SR-MEG-ROUNDED",
        f"{len(odd.tensors)} masters hold no more than the weights' own type can: {odd.text()}",
        severity=Severity.WARNING,
        where={"tensor": next(iter(odd.tensors))},
        hint="they were rebuilt from rounded weights (a load of weights only does that), not kept; small updates that "
        "had not yet shown in the weights are lost",
    )

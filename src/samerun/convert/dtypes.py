"""Element types changed on request: a checkpoint seen as if it had been saved in other types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from samerun.core.dtype import DType
from samerun.core.state import LogicalState, Role, TensorKey
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.formats.base import Array, Checkpoint, Extent, assemble_box, numpy_dtype, require_key
from samerun.verify.state.match import is_counter


def plan_dtypes(state: LogicalState, wanted: Mapping[str, DType]) -> dict[str, DType]:
    """Returns the new element type of every tensor that gets one, by key.

    `wanted` is by role (`param`, `optim`) or role and slot (`optim.exp_avg`, which wins over `optim`). Only floating
    types change; step counters and integers never do.

    Raises:
        UsageError: for a role that does not exist, a type that is not floating, or a role that no tensor has.
    """
    problems: list[Problem] = []
    used: set[str] = set()
    changed: dict[str, DType] = {}
    for name, dtype in wanted.items():
        role, dot, slot = name.partition(".")
        if role not in set(Role) or (dot and (role != Role.OPTIM or not slot)):
            problems.append(_refused(f"{name!r} is no role: {', '.join(Role)}, or optim.<slot>"))
        if dtype.kind != "float":
            problems.append(_refused(f"{dtype.name} is no floating type, and only those are changed"))
    for key, entry in state.tensors.items():
        name = next((name for name in _names(entry.key) if name in wanted), None)
        if name is None or entry.dtype.kind != "float" or is_counter(entry.key):
            continue
        used.add(name)
        if entry.dtype != wanted[name]:
            changed[key] = wanted[name]
    problems += [_refused(f"no floating tensor has the role {name}") for name in wanted if name not in used]
    if problems:
        raise UsageError(problems)
    return changed


def _names(key: TensorKey) -> tuple[str, ...]:
    return (f"{key.role}.{key.slot}", key.role.value) if key.slot else (key.role.value,)


def _refused(message: str) -> Problem:
    return Problem("SR-USAGE-DTYPE", message, hint="--dtype looks like param=bfloat16 or optim.exp_avg=float32")


class RecastCheckpoint:
    """A checkpoint in which some tensors have another element type, rounded to nearest, ties to even.

    See `samerun.formats.base.Checkpoint`.
    """

    def __init__(self, inner: Checkpoint, dtypes: Mapping[str, DType]) -> None:
        self.path: Path = inner.path
        self._inner = inner
        self._dtypes = dtypes
        tensors = {
            key: replace(entry, dtype=dtypes[key]) if key in dtypes else entry
            for key, entry in inner.state.tensors.items()
        }
        self.state: LogicalState = replace(inner.state, tensors=tensors)

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the stored values lie, in their own type.

        Raises:
            CorruptCheckpoint: if they lie nowhere, or the reader casts them already: one cast is not two.
        """
        extent = self._inner.locate(key, piece)
        if key in self._dtypes and extent.dtype != self._inner.state.tensors[key].dtype:
            raise CorruptCheckpoint(Problem("SR-USAGE-PIECE", f"{key} is stored in another type than it is read in"))
        return extent

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece, cast. See `Checkpoint.read_piece`."""
        return self._cast(key, self._inner.read_piece(key, piece))

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor, cast. See `Checkpoint.read`."""
        if key not in self._dtypes:
            return self._inner.read(key, offsets, sizes)
        entry = require_key(self.state, key)
        return assemble_box(entry, lambda piece: self.read_piece(key, piece), offsets, sizes)

    def _cast(self, key: str, values: Array) -> Array:
        if key not in self._dtypes:
            return values
        with np.errstate(all="ignore"):
            return values.astype(numpy_dtype(self._dtypes[key]))

    def close(self) -> None:
        """Releases the files of the checkpoint below."""
        self._inner.close()

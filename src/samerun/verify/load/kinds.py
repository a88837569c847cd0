"""Load proof, what became of a tensor whose values are others: hypotheses, each tested by an exact number.

None of this decides anything: the digest has said already that the tensor is another one. In this order: the values of
another tensor, the saved values rounded to a shorter type and back, the saved values in other places, one flipped bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samerun.core.digest import (
    MASK,
    MULTIPLIER_1,
    MULTIPLIER_2,
    STRIDE,
    bits_of,
    box_runs,
    digest_seed,
    sum_unordered,
    to_hex,
    whole_digest,
)
from samerun.core.dtype import DTYPES
from samerun.core.state import Role, TensorEntry
from samerun.errors import Problem

if TYPE_CHECKING:
    from samerun.verify.load.loaded import Loaded

SEARCH_BYTES = 1 << 30
"""Read at most, over all tensors, to find out what became of their values."""

_FLIPPED_ELEMENTS = 1 << 20
"""Largest tensor that is searched for one flipped bit: every bit of every element is tried."""

_SHORTER = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")

LAYOUT, DTYPE, FILES, NAMES, TIED, AVERAGE = (
    "fused and strided layouts",
    "dtype and masters",
    "files",
    "names",
    "tied, frozen, never stepped",
    "averages of the model",
)


@dataclass(slots=True)
class Budget:
    """Bytes that may still be read."""

    num_bytes: int

    def spend(self, num_bytes: int) -> bool:
        """Returns whether so many bytes may be read, and counts them."""
        self.num_bytes -= num_bytes
        return self.num_bytes >= 0


def explain_values(loaded: Loaded, problem: Problem, budget: Budget) -> Problem:
    """Returns a finding about wrong values with what became of them, where that can be told, and its kind."""
    if problem.code not in ("SR-LOAD-PARAM", "SR-LOAD-OPT"):
        return problem
    key = str(problem.where.get("tensor", ""))
    saved = next((pair.saved for pair in loaded.match.pairs if pair.key == key), None)
    if saved is None:
        return problem
    fact = loaded.found["tensors"][key]
    entry = loaded.state.tensors[saved]
    optimizer = problem.code == "SR-LOAD-OPT"
    if fact["nonfinite"] or fact["dtype"] != entry.dtype.name:
        return replace(problem, kind=DTYPE)
    if fact["nonzero"]:
        told, kind = _explanation(loaded, problem, key, saved, budget)
        if told:
            kind = None if optimizer and kind == LAYOUT else kind  # moments that changed places are the optimizer's
            kind = AVERAGE if entry.key.role is Role.EMA and kind == LAYOUT else kind
            return replace(problem, message=f"{problem.message}: {told}", kind=kind)
    if optimizer:
        return problem
    if entry.key.role is Role.EMA:
        return replace(problem, kind=AVERAGE)
    return replace(problem, kind=TIED if fact.get("trainable") is False else NAMES)


def _explanation(
    loaded: Loaded, problem: Problem, key: str, saved: str, budget: Budget
) -> tuple[str | None, str | None]:
    """Returns what became of the values, in words, and the kind of failure that does this."""
    entry = loaded.state.tensors[saved]
    if rival := _rival(loaded, problem, key, saved, budget):
        return f"they are those of {rival}", LAYOUT
    if not budget.spend(entry.num_bytes * (2 + len(_SHORTER))):
        return None, None
    if shorter := _shorter(loaded, key, saved, problem.found):
        return f"they are the saved ones, rounded to {shorter} and back", DTYPE
    unordered = loaded.found["tensors"][key].get("unordered")
    if unordered is not None and unordered == _unordered(loaded, saved):
        return "they are the saved ones, in other places", LAYOUT
    if place := _flipped(loaded, key, saved, problem.found):
        return f"they are the saved ones but for {place}", FILES
    return None, None


def _rival(loaded: Loaded, problem: Problem, key: str, saved: str, budget: Budget) -> str | None:
    entry = loaded.state.tensors[saved]
    for rival, other in loaded.state.tensors.items():
        alike = (other.shape, other.dtype, other.key.role, other.key.slot)
        averaged = entry.key.role is Role.EMA and str(other.key) == f"param:{entry.key.fqn}"
        if rival == saved or (alike != (entry.shape, entry.dtype, entry.key.role, entry.key.slot) and not averaged):
            continue
        if not budget.spend(other.num_bytes):
            return None
        if loaded.digest(rival, key) == problem.found:
            return rival
    return None


def _shorter(loaded: Loaded, key: str, saved: str, found: str) -> str | None:
    """Returns the type through which the saved values have gone, if one explains what the job holds."""
    from samerun.formats.base import numpy_dtype
    from samerun.verify.state.digest import digest_array

    entry = loaded.state.tensors[saved]
    if entry.dtype.kind != "float":
        return None
    for name in _SHORTER:
        shorter = DTYPES[name]
        if shorter.mantissa_bits >= entry.dtype.mantissa_bits:
            continue
        total = 0
        for offsets, array in _pieces(loaded, saved):
            with np.errstate(all="ignore"):
                rounded = array.astype(numpy_dtype(shorter)).astype(array.dtype)
            total += digest_array(key, rounded, entry.dtype, entry.shape, offsets)
        if whole_digest(total, key, entry.dtype, entry.shape) == found:
            return name
    return None


def _unordered(loaded: Loaded, saved: str) -> str:
    return to_hex(sum(sum_unordered(bits_of(array)) for _, array in _pieces(loaded, saved)))


def _pieces(loaded: Loaded, saved: str) -> Iterator[tuple[tuple[int, ...], npt.NDArray[Any]]]:
    from samerun.verify.state.digest import read_pieces

    return read_pieces(loaded.checkpoint, saved)


def _flipped(loaded: Loaded, key: str, saved: str, found: str) -> str | None:
    """Returns the one bit whose flip turns the saved digest into the found one, in words, if there is one.

    A tensor's digest is a sum of one term per element: one changed element changes it by the difference of two terms.
    """
    entry = loaded.state.tensors[saved]
    if entry.num_elements > _FLIPPED_ELEMENTS or entry.dtype.kind == "complex":
        return None
    wanted = np.uint64((int(found, 16) - int(loaded.digest(saved, key), 16)) & MASK)
    seed = np.uint64(digest_seed(key, entry.dtype, entry.shape))
    for offsets, array in _pieces(loaded, saved):
        runs = box_runs(entry.shape, offsets, array.shape)
        index = (runs.starts[:, None] + np.arange(runs.length, dtype=np.uint64)).reshape(-1)
        place = _flip_in(bits_of(array), index, seed, wanted)
        if place is not None:
            return _describe(entry, *place)
    return None


def _flip_in(
    bits: npt.NDArray[Any], index: npt.NDArray[np.uint64], seed: np.uint64, wanted: np.uint64
) -> tuple[int, int] | None:
    """Returns (global index, bit) of the flip that changes the digest by `wanted`."""
    width = bits.dtype.itemsize
    with np.errstate(over="ignore"):
        keys = index * np.uint64(STRIDE) + seed
        as_saved = keys ^ bits.astype(np.uint64)
        target = _mix(as_saved) + wanted
        for bit in range(8 * width):
            hits = np.flatnonzero(_mix(as_saved ^ np.uint64(1 << bit)) == target)
            if len(hits):
                return int(index[hits[0]]), bit
    return None


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return z ^ (z >> np.uint64(31))


def _describe(entry: TensorEntry, index: int, bit: int) -> str:
    at = ", ".join(str(int(place)) for place in np.unravel_index(index, entry.shape)) if entry.shape else ""
    return f"bit {bit} of element [{at}]"

"""Two checkpoints compared as logical state, whatever wrote them, however they are cut up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samerun.core.plain import MISSING, differing_paths, is_opaque, plain
from samerun.core.state import LogicalState
from samerun.errors import CorruptCheckpoint, Problem
from samerun.verify.state.digest import blocks, read_pieces
from samerun.verify.state.match import group_settings, is_counter, match_tensors

if TYPE_CHECKING:
    from samerun.formats.base import Checkpoint

Array = npt.NDArray[Any]

_MOST_PER_OBJECT = 8
_CHUNK_ELEMENTS = 1 << 15  # what is made of them stays in a core's own cache
_PROGRESS = ("update", "samples", "tokens", "epoch")


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How far the values of one tensor lie apart. `rel_l2` is relative to the norm of A's; `changed` counts elements.

    Both distances are infinite if a value is finite on one side only.
    """

    key: str
    max_abs: float
    rel_l2: float
    changed: int


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Anything else that is not the same: what it is, and its value on either side."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything in which two checkpoints differ.

    `settings` holds parameter groups, progress and the scheduler, as far as both sides record them. `objects` is for
    information only: random state, loader positions and the like often belong to a rank or a machine, so that two
    checkpoints of the same training state may differ in them.
    """

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shape: tuple[Disagreement, ...]
    dtype: tuple[Disagreement, ...]
    values: tuple[ValueDifference, ...]
    settings: tuple[Disagreement, ...] = ()
    objects: tuple[Disagreement, ...] = ()
    compared: int = field(default=0)

    @property
    def equal(self) -> bool:
        """Whether both are the same training state."""
        different = (self.only_in_a, self.only_in_b, self.shape, self.dtype, self.values, self.settings)
        return not any(different)

    def to_json(self) -> dict[str, Any]:
        """Returns the body of `samerun diff --json`."""
        return {
            "equal": self.equal,
            "compared": self.compared,
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "shape": [_sides(item) for item in self.shape],
            "dtype": [_sides(item) for item in self.dtype],
            "values": [
                {"key": item.key, "max_abs": item.max_abs, "rel_l2": item.rel_l2, "changed": item.changed}
                for item in self.values
            ],
            "settings": [_sides(item) for item in self.settings],
            "objects": [_sides(item) for item in self.objects],
        }


def _sides(item: Disagreement) -> dict[str, Any]:
    return {"key": item.key, "a": item.a, "b": item.b}


def compare_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: Callable[[str, int], None] | None = None,
) -> Comparison:
    """Compares two checkpoints, tensor by tensor, in blocks of a few tens of MiB.

    Args:
        a: the reference; under a name map, the mapped view of it, and keys in the result are the mapped ones.
        b: the other one.
        rtol: elements may differ by `atol + rtol * |a|` and still count as equal.
        atol: see `rtol`.
        progress: called with (key, bytes of A) as each tensor is done.

    Raises:
        CorruptCheckpoint: if a tensor on either side is not whole or cannot be read; every such tensor is listed.
    """
    described = {key: {"aliases": list(entry.aliases)} for key, entry in a.state.tensors.items()}
    match = match_tensors(b.state, described, counters=True)
    found = _Found()
    for pair in match.pairs:
        _compare_pair(a, pair.key, b, pair.saved, rtol, atol, found)
        if progress is not None:
            progress(pair.saved, a.state.tensors[pair.key].num_bytes)
    if found.unreadable:
        raise CorruptCheckpoint(found.unreadable)
    return Comparison(
        only_in_a=tuple(match.unexpected),
        only_in_b=tuple(match.missing),
        shape=tuple(found.shape),
        dtype=tuple(found.dtype),
        values=tuple(found.values),
        settings=tuple(compare_settings(a.state, b.state)),
        objects=tuple(_compare_objects(a.state, b.state)),
        compared=len(match.pairs),
    )


@dataclass(slots=True)
class _Found:
    shape: list[Disagreement] = field(default_factory=list[Disagreement])
    dtype: list[Disagreement] = field(default_factory=list[Disagreement])
    values: list[ValueDifference] = field(default_factory=list[ValueDifference])
    unreadable: list[Problem] = field(default_factory=list[Problem])


def _compare_pair(
    a: Checkpoint, key_a: str, b: Checkpoint, key_b: str, rtol: float, atol: float, found: _Found
) -> None:
    mine, other = a.state.tensors[key_a], b.state.tensors[key_b]
    one_number = is_counter(mine.key) and mine.num_elements == other.num_elements == 1
    if mine.shape != other.shape and not one_number:
        found.shape.append(Disagreement(key_b, list(mine.shape), list(other.shape)))
        return
    if mine.dtype != other.dtype and not is_counter(mine.key):
        found.dtype.append(Disagreement(key_b, mine.dtype.name, other.dtype.name))
    try:
        difference = compare_tensor(a, key_a, b, key_b, rtol=rtol, atol=atol)
    except CorruptCheckpoint as error:
        found.unreadable.extend(error.problems)
        return
    found.values += [difference] if difference else []


def compare_tensor(
    a: Checkpoint, key_a: str, b: Checkpoint, key_b: str, *, rtol: float = 0.0, atol: float = 0.0
) -> ValueDifference | None:
    """Returns how two tensors of equal shape differ, or None if no element does by more than the tolerance.

    Equal bits are seen at the speed of reading them; only a tensor with others is read again, and measured.
    """
    if all(_same_bits(x, y) for x, y in _aligned_blocks(a, key_a, b, key_b)):
        return None
    gap = _Gap(rtol, atol)
    for x, y in _aligned_blocks(a, key_a, b, key_b):
        flat_x, flat_y = x.reshape(-1), y.reshape(-1)
        for first in range(0, flat_x.size, _CHUNK_ELEMENTS):
            gap.add(flat_x[first : first + _CHUNK_ELEMENTS], flat_y[first : first + _CHUNK_ELEMENTS])
    return ValueDifference(key_b, gap.worst, gap.relative, gap.changed) if gap.changed else None


@dataclass(slots=True)
class _Gap:
    """Adds up how far values lie apart, in float64 or complex128, a vector after the other."""

    rtol: float
    atol: float
    worst: float = 0.0
    squares: float = 0.0
    reference: float = 0.0
    changed: int = 0

    def add(self, stored_x: Array, stored_y: Array) -> None:
        x, y = _wide(stored_x), _wide(stored_y)
        with np.errstate(all="ignore"):
            whole = stored_x.dtype == stored_y.dtype and stored_x.dtype.kind in "iu"
            gap = _whole_gap(stored_x, stored_y) if whole else np.abs(x - y)
            if not math.isfinite(float(gap.sum())):
                gap[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
                gap[np.isnan(gap)] = np.inf
            allowed = self.atol
            if self.rtol:
                allowed = allowed + self.rtol * np.nan_to_num(np.abs(x), nan=0.0, posinf=0.0)
            self.changed += int(np.count_nonzero(~(gap <= allowed)))
        self.worst = max(self.worst, float(np.max(gap, initial=0.0)))
        self.squares += _sum_of_squares(gap)
        self.reference += _sum_of_squares(x)

    @property
    def relative(self) -> float:
        """The norm of all gaps, relative to that of A."""
        if math.isinf(self.squares):
            return math.inf
        return math.sqrt(self.squares / self.reference) if self.reference else math.inf


def _aligned_blocks(a: Checkpoint, key_a: str, b: Checkpoint, key_b: str) -> Iterator[tuple[Array, Array]]:
    """Yields the same box of both tensors, box by box, along the pieces of A."""
    same_rank = len(a.state.tensors[key_a].shape) == len(b.state.tensors[key_b].shape)
    for offsets, piece in read_pieces(a, key_a):
        for start, block in blocks(piece):
            if not same_rank:  # a counter kept as () on one side and as (1,) on the other
                yield block.reshape(-1), b.read(key_b).reshape(-1)
                continue
            position = (offsets[0] + start, *offsets[1:]) if block.ndim else ()
            yield block, b.read(key_b, position, tuple(block.shape))


def _whole_gap(x: Array, y: Array) -> Array:
    """Returns the distances of integers of one type. Two that differ have one that is not 0, however large they are."""
    kind = f"u{x.dtype.itemsize}"
    return (np.maximum(x, y).view(kind) - np.minimum(x, y).view(kind)).astype(np.float64)


def _same_bits(x: Array, y: Array) -> bool:
    if x.dtype != y.dtype:
        return False
    mine, other = (_words(np.ascontiguousarray(array).reshape(-1)) for array in (x, y))
    return all(
        np.array_equal(mine[first : first + _CHUNK_ELEMENTS], other[first : first + _CHUNK_ELEMENTS])
        for first in range(0, mine.size, _CHUNK_ELEMENTS)
    )


def _words(flat: Array) -> Array:
    """Returns the bits of a contiguous vector as the longest integers that they can be cut into."""
    return flat.view(np.uint64 if flat.nbytes % 8 == 0 else np.uint8)


def _wide(values: Array) -> Array:
    """Returns the values in a type in which differences can be taken: float64 or complex128."""
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _sum_of_squares(values: Array) -> float:
    """Returns the sum of the squared magnitudes; what is not a number counts nothing."""
    with np.errstate(all="ignore"):
        total = float(np.vdot(values, values).real)
        if math.isnan(total):
            kept = values[~np.isnan(values)]
            total = float(np.vdot(kept, kept).real)
    return math.inf if math.isnan(total) else total


# --- everything that is not a tensor ------------------------------------------------------------------------------


def compare_settings(a: LogicalState, b: LogicalState) -> list[Disagreement]:
    """Returns differences in parameter groups (by name), progress and scheduler, where both sides record them."""
    differences: list[Disagreement] = []
    if a.groups and b.groups:
        differences += _compare_groups(a, b)
    for name in _PROGRESS:
        mine, other = getattr(a.progress, name), getattr(b.progress, name)
        if mine is not None and other is not None and mine != other:
            differences.append(Disagreement(f"progress.{name}", mine, other))
    if a.scheduler is not None and b.scheduler is not None:
        differences += _compare_plain("scheduler", dict(a.scheduler), dict(b.scheduler))
    return differences


def _compare_groups(a: LogicalState, b: LogicalState) -> list[Disagreement]:
    mine = {f"param:{fqn}": values for fqn, values in group_settings(a).items()}
    other = {f"param:{fqn}": values for fqn, values in group_settings(b).items()}
    differences: list[Disagreement] = []
    for key in dict.fromkeys([*mine, *other]):
        if key not in mine or key not in other:
            differences.append(Disagreement(f"{key} in a group", key in mine, key in other))
            continue
        for path, x, y in differing_paths(mine[key], other[key]):
            if MISSING not in (x, y):  # versions of one framework add and drop settings
                differences.append(Disagreement(f"{key} {path}", x, y))
    return differences


def _compare_plain(name: str, a: Any, b: Any) -> list[Disagreement]:
    return [
        Disagreement(f"{name}.{path}" if path else name, x, y)
        for path, x, y in differing_paths(plain(a, name), plain(b, name))
        if not (is_opaque(x) or is_opaque(y))
    ]


def _compare_objects(a: LogicalState, b: LogicalState) -> list[Disagreement]:
    mine, other = {**a.objects, **a.data, **a.rng}, {**b.objects, **b.data, **b.rng}
    differences: list[Disagreement] = []
    for name in mine:
        found = _compare_plain(name, mine[name], other[name]) if name in other else []
        if len(found) > _MOST_PER_OBJECT:  # the words of a random generator, say
            found = [Disagreement(f"{name}: {len(found)} values, the first at {found[0].key}", found[0].a, found[0].b)]
        differences += found
    return differences

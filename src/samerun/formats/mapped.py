"""A checkpoint seen through a name map: the same bytes under other names, cut, joined and turned as the map says.

Nothing is copied. Every piece of a mapped tensor is a part of a piece of the checkpoint, with its axes in another order
where the map turns them; only padding that the map adds lies nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.links import Link, Pairs
from samerun.core.namemap import MappedTensor, MapResult, NameMap
from samerun.core.state import LogicalState, ParamGroup, TensorEntry, TensorKey, Tiling
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.formats.base import Array, Checkpoint, Extent, assemble_box, numpy_dtype, require_key

Columns = npt.NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 18  # links that are met with pieces in one array


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Row i: piece i of a mapped tensor. `link` -1 is padding; `low` is the corner in the source's own tensor."""

    link: Columns
    source_piece: Columns
    low: Columns


@dataclass(eq=False)
class MappedCheckpoint:
    """A checkpoint under the names of a map. A `Checkpoint` like any other, for reading only.

    Args:
        source: the checkpoint.
        names: the map from its names to others.

    Raises:
        UsageError: if a rule does not fit the checkpoint's tensors (SR-MAP-RULE), fits none of them (SR-MAP-UNUSED), or
            would put parameters of different groups into one (SR-MAP-GROUPS); all of it at once.
    """

    source: Checkpoint
    names: NameMap
    path: Path = field(init=False)
    state: LogicalState = field(init=False)
    dropped: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        before = self.source.state
        result = self.names.apply(before)
        problems = [*result.problems, *_unused(self.names, before)]
        groups, disagreeing = _map_groups(before.groups, result, self.names)
        if problems := [*problems, *disagreeing]:
            raise UsageError(problems)
        self.path = self.source.path
        self.dropped = result.dropped
        self._mapped = {str(tensor.key): tensor for tensor in result.tensors}
        self._pieces: dict[str, _Pieces] = {}
        self._last: tuple[tuple[str, int], Extent] | None = None
        entries = dict(self._entries(result))
        topology = replace(before.topology, pipeline=None)  # its layers are under the names that they had
        self.state = replace(before, tensors=entries, groups=groups, topology=topology)

    def _entries(self, result: MapResult) -> Iterable[tuple[str, TensorEntry]]:
        for tensor in result.tensors:
            text = str(tensor.key)
            old = self.source.state.tensors[tensor.sources[0]]
            tiling, self._pieces[text] = self._tile(tensor)
            aliases = tuple(new for alias in old.aliases for new in self.names.rename(alias) if new != tensor.key.fqn)
            inferred = old.role_inferred and old.key.role is tensor.key.role  # a rule that changes it says what it is
            yield (
                text,
                replace(
                    old,
                    key=tensor.key,
                    shape=tensor.shape,
                    tiling=tiling,
                    aliases=aliases,
                    role_inferred=inferred,
                ),
            )

    def _tile(self, tensor: MappedTensor) -> tuple[Tiling, _Pieces]:
        """Meets the links, all of one kind at once, with the pieces of their source."""
        kinds: dict[tuple[int, Pairs], list[int]] = {}
        for number, link in enumerate(tensor.links):
            kinds.setdefault((link.source, link.axes), []).append(number)
        width = max((len(link.source_offsets) for link in tensor.links), default=0)
        offsets: list[Columns] = []
        sizes: list[Columns] = []
        links: list[Columns] = []
        pieces: list[Columns] = []
        lows: list[Columns] = []
        for (source, _), numbers in kinds.items():
            tiling = self.source.state.tensors[tensor.sources[source]].tiling
            at_once = max(1, _PAIRS_AT_ONCE // max(1, len(tiling)))
            for some in (numbers[i : i + at_once] for i in range(0, len(numbers), at_once)):
                met = _meet(tiling, [tensor.links[number] for number in some])
                offsets.append(met.offsets)
                sizes.append(met.sizes)
                links.append(np.array(some, np.int64)[met.link])
                pieces.append(met.piece)
                lows.append(np.pad(met.low, ((0, 0), (0, width - met.low.shape[1]))))
        padding = _padding(tensor)
        offsets.append(padding.offsets)
        sizes.append(padding.sizes)
        links.append(np.full(len(padding), -1, np.int64))
        pieces.append(np.zeros(len(padding), np.int64))
        lows.append(np.zeros((len(padding), width), np.int64))
        found = _Pieces(np.concatenate(links), np.concatenate(pieces), np.concatenate(lows))
        return Tiling(np.concatenate(offsets), np.concatenate(sizes)), found

    def _piece(self, key: str, piece: int) -> tuple[Link, str, int, list[int], list[int]] | None:
        """Returns (link, source key, its piece, corner inside that piece, size there); None for padding."""
        require_key(self.state, key)
        found, tensor = self._pieces[key], self._mapped[key]
        number = int(found.link[piece])
        if number < 0:
            return None
        link = tensor.links[number]
        source = tensor.sources[link.source]
        index = int(found.source_piece[piece])
        ndim = len(link.source_offsets)
        low, corner = found.low[piece].tolist(), self.source.state.tensors[source].tiling.offsets[index].tolist()
        inner = [a - b for a, b in zip(low[:ndim], corner, strict=True)]
        sizes, extent = [1] * ndim, self.state.tensors[key].tiling.sizes[piece].tolist()
        for mine, theirs in link.axes:
            sizes[mine] = extent[theirs]
        return link, source, index, inner, sizes

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the bytes of one piece lie, its axes in the order of the mapped tensor.

        Raises:
            CorruptCheckpoint: if they do not lie where the checkpoint says they do, or the piece is added padding.
        """
        found = self._piece(key, piece)
        if found is None:
            raise CorruptCheckpoint(
                Problem("SR-MAP-PADDING", "this padding is added by the map and lies in no file", where={"tensor": key})
            )
        link, source, index, inner, sizes = found
        extent = self._extent(source, index)
        start = extent.offset_bytes
        start += sum(a * n for a, n in zip(inner, extent.strides, strict=True)) * extent.dtype.num_bytes
        shape, strides = [1] * len(link.target_offsets), [1] * len(link.target_offsets)
        steps = link.steps or ((1, 1),) * len(link.axes)
        for (mine, theirs), (step, _) in zip(link.axes, steps, strict=True):
            shape[theirs] = sizes[mine]
            strides[theirs] = extent.strides[mine] * step
        return Extent(
            extent.file,
            start,
            extent.dtype,
            tuple(shape),
            tuple(strides),
            extent.big_endian,
            extent.storage_offset_bytes,
            extent.storage_bytes,
            extent.crc32,
            extent.divisor,
        )

    def _extent(self, source: str, piece: int) -> Extent:
        """Returns where a piece of the source lies; of many parts of one in a row, it is asked for once."""
        if self._last is None or self._last[0] != (source, piece):
            self._last = (source, piece), self.source.locate(source, piece)
        return self._last[1]

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece, a read-only view of the mapped file wherever possible; padding is zeros."""
        found = self._piece(key, piece)
        shape = tuple(self.state.tensors[key].tiling.sizes[piece].tolist())
        if found is None:
            return np.zeros(shape, numpy_dtype(self.state.tensors[key].dtype))
        link, source, index, inner, sizes = found
        values: Array = self.source.read_piece(source, index)
        taken = zip(inner, sizes, link.source_steps(), strict=True)
        values = values[tuple(slice(a, a + step * (n - 1) + 1, step) for a, n, step in taken)]
        order = [mine for mine, _ in sorted(link.axes, key=lambda pair: pair[1])]
        left = [axis for axis in range(values.ndim) if axis not in order]
        turned = values.transpose(*order, *left) if values.ndim else values
        return turned.reshape(turned.shape[: len(order)]).reshape(shape)

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor, assembled from its pieces; the whole tensor when no box is given."""
        entry = require_key(self.state, key)
        return assemble_box(entry, lambda piece: self.read_piece(key, piece), offsets, sizes)

    def close(self) -> None:
        """Releases the checkpoint's files."""
        self.source.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("num_files", "check_items", "check_payloads"):
            return getattr(self.source, name)
        raise AttributeError(name)


@dataclass(frozen=True, slots=True, eq=False)
class _Met:
    """Boxes of a mapped tensor: `link` and `piece` number what they come from, `low` is the corner in the source."""

    link: Columns
    piece: Columns
    low: Columns
    offsets: Columns
    sizes: Columns


def _meet(tiling: Tiling, links: Sequence[Link]) -> _Met:
    """Returns where links of one source with the same axes meet its pieces, as boxes of the target.

    A box whose elements lie apart in the target is cut into such that do not.
    """
    axes, count = links[0].axes, len(links)
    wide, narrow = len(links[0].source_offsets), len(links[0].target_offsets)
    first = np.array([link.source_offsets for link in links], np.int64).reshape(count, 1, wide)
    step = np.array([link.source_steps() for link in links], np.int64).reshape(count, 1, wide)
    size = np.array([link.source_sizes() for link in links], np.int64).reshape(count, 1, wide)
    start = np.maximum(0, -((first - tiling.offsets) // step))  # the first of a link's rows that lies in the piece
    stop = np.minimum(size, -((first - tiling.offsets - tiling.sizes) // step))
    link, piece = (rows.astype(np.int64) for rows in np.nonzero((stop > start).all(axis=2)))
    start, extent = start[link, piece], (stop - start)[link, piece]
    low = first[link, 0] + start * step[link, 0]
    offsets = np.array([link.target_offsets for link in links], np.int64).reshape(count, narrow)[link]
    spread = np.array([link.target_steps() for link in links], np.int64).reshape(count, narrow)
    sizes = np.ones((len(link), narrow), np.int64)
    for mine, theirs in axes:
        offsets[:, theirs] += start[:, mine] * spread[link, theirs]
        sizes[:, theirs] = extent[:, mine]
    met = _Met(link, piece, low, offsets, sizes)
    for mine, theirs in axes:
        met = _cut_apart(met, mine, theirs, step[:, 0, mine], spread[:, theirs])
    return met


def _cut_apart(met: _Met, mine: int, theirs: int, step: Columns, spread: Columns) -> _Met:
    """Cuts the boxes whose elements lie apart along an axis of the target into boxes of one element along it."""
    spread = spread[met.link]
    if not (apart := (spread > 1) & (met.sizes[:, theirs] > 1)).any():
        return met
    times = np.where(apart, met.sizes[:, theirs], 1)
    row = np.repeat(np.arange(len(times)), times)
    within = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)
    low, offsets, sizes = met.low[row], met.offsets[row], met.sizes[row]
    low[:, mine] += within * step[met.link[row]]
    offsets[:, theirs] += within * spread[row]
    sizes[:, theirs] = np.where(apart[row], 1, sizes[:, theirs])
    return _Met(met.link[row], met.piece[row], low, offsets, sizes)


def _padding(tensor: MappedTensor) -> Tiling:
    """Returns the box at an axis' end that no link reaches, if the map lengthens the tensor."""
    none = Tiling(np.zeros((0, len(tensor.shape)), np.int64), np.zeros((0, len(tensor.shape)), np.int64))
    table = (len(tensor.links), len(tensor.shape))
    offsets = np.array([link.target_offsets for link in tensor.links], np.int64).reshape(table)
    sizes = np.array([link.target_sizes() for link in tensor.links], np.int64).reshape(table)
    steps = np.array([link.target_steps() for link in tensor.links], np.int64).reshape(table)
    reached = (offsets + steps * (sizes - 1) + 1).max(axis=0, initial=0)
    short = [axis for axis, (end, size) in enumerate(zip(reached.tolist(), tensor.shape, strict=True)) if end < size]
    if not short:
        return none
    boxes: list[tuple[list[int], list[int]]] = []
    for number, axis in enumerate(short):
        start, size = [0] * len(tensor.shape), list(tensor.shape)
        start[axis], size[axis] = int(reached[axis]), tensor.shape[axis] - int(reached[axis])
        for earlier in short[:number]:
            size[earlier] = int(reached[earlier])
        boxes.append((start, size))
    return Tiling(np.array([start for start, _ in boxes], np.int64), np.array([size for _, size in boxes], np.int64))


def _unused(names: NameMap, state: LogicalState) -> list[Problem]:
    hint = "the left sides are names in A; `samerun inspect A --json` lists them"
    unused = names.unused(state.tensors)
    return [Problem("SR-MAP-UNUSED", f"no tensor of A fits {', '.join(unused)}", hint=hint)] if unused else []


def _map_groups(
    groups: tuple[ParamGroup, ...], result: MapResult, names: NameMap
) -> tuple[tuple[ParamGroup, ...], list[Problem]]:
    """Returns the groups under the new names. A parameter that several become must be of one group with them."""
    problems: list[Problem] = []
    owner: dict[str, int] = {}
    made: list[ParamGroup] = []
    for number, group in enumerate(groups):
        params: dict[str, None] = {}
        for fqn in group.params:
            for new in result.names[fqn] if fqn in result.names else names.rename(fqn):
                if owner.setdefault(new, number) != number:
                    problems.append(_two_groups(new, owner[new], number))
                params[new] = None
        made.append(replace(group, params=tuple(params)))
    return tuple(made), problems


def _two_groups(fqn: str, first: int, second: int) -> Problem:
    return Problem(
        "SR-MAP-GROUPS",
        "a tensor would be made of parameters of different groups",
        where={"tensor": str(TensorKey.parse(f"param:{fqn}"))},
        expected=f"group {first}",
        found=f"group {second}",
        hint="tensors with other settings cannot become one; leave them apart in the map",
    )

"""A checkpoint seen through a name map: the same bytes under other names, cut, joined and turned as the map says.

Nothing is copied. Every piece of a mapped tensor is a part of a piece of the checkpoint, with its axes in another order
where the map turns them; only padding that the map adds lies nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.links import Link
from samerun.core.namemap import MappedTensor, MapResult, NameMap
from samerun.core.state import LogicalState, ParamGroup, TensorEntry, TensorKey, Tiling
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.formats.base import Array, Checkpoint, Extent, assemble_box, numpy_dtype, require_key

Columns = npt.NDArray[np.int64]


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
        entries = dict(self._entries(result))
        self.state = replace(before, tensors=entries, groups=groups)

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
        offsets: list[Columns] = []
        sizes: list[Columns] = []
        links: list[Columns] = []
        pieces: list[Columns] = []
        lows: list[Columns] = []
        width = max((len(link.source_offsets) for link in tensor.links), default=0)
        for number, link in enumerate(tensor.links):
            tiling = self.source.state.tensors[tensor.sources[link.source]].tiling
            low, high, touching = _inside(tiling, link)
            target, extent = _to_target(link, low, high - low)
            offsets.append(target)
            sizes.append(extent)
            links.append(np.full(len(touching), number, np.int64))
            pieces.append(touching)
            lows.append(np.pad(low, ((0, 0), (0, width - low.shape[1]))))
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
        inner = found.low[piece, :ndim] - self.source.state.tensors[source].tiling.offsets[index]
        sizes = [1] * ndim
        extent = self.state.tensors[key].tiling.sizes[piece]
        for mine, theirs in link.axes:
            sizes[mine] = int(extent[theirs])
        return link, source, index, inner.tolist(), sizes

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
        link, source, index, inner, _ = found
        extent = self.source.locate(source, index)
        start = extent.offset_bytes
        start += sum(a * n for a, n in zip(inner, extent.strides, strict=True)) * extent.dtype.num_bytes
        shape = tuple(self.state.tensors[key].tiling.sizes[piece].tolist())
        strides = [1] * len(shape)
        for mine, theirs in link.axes:
            strides[theirs] = extent.strides[mine]
        return replace(extent, offset_bytes=start, shape=shape, strides=tuple(strides))

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece, a read-only view of the mapped file wherever possible; padding is zeros."""
        found = self._piece(key, piece)
        shape = tuple(self.state.tensors[key].tiling.sizes[piece].tolist())
        if found is None:
            return np.zeros(shape, numpy_dtype(self.state.tensors[key].dtype))
        link, source, index, inner, sizes = found
        values: Array = self.source.read_piece(source, index)
        values = values[tuple(slice(a, a + n) for a, n in zip(inner, sizes, strict=True))]
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


def _inside(tiling: Tiling, link: Link) -> tuple[Columns, Columns, Columns]:
    """Returns (low, high, pieces): the parts of a tensor's pieces that lie in a link's box, and which they are."""
    first = np.array(link.source_offsets, np.int64)
    low = np.maximum(tiling.offsets, first)
    high = np.minimum(tiling.offsets + tiling.sizes, first + np.array(link.source_sizes(), np.int64))
    touching = np.flatnonzero((high > low).all(axis=1)).astype(np.int64)
    return low[touching], high[touching], touching


def _to_target(link: Link, low: Columns, extent: Columns) -> tuple[Columns, Columns]:
    """Returns boxes of the source as boxes of the target."""
    ndim = len(link.target_offsets)
    offsets = np.tile(np.array(link.target_offsets, np.int64), (len(low), 1))
    sizes = np.ones((len(low), ndim), np.int64)
    for mine, theirs in link.axes:
        offsets[:, theirs] += low[:, mine] - link.source_offsets[mine]
        sizes[:, theirs] = extent[:, mine]
    return offsets, sizes


def _padding(tensor: MappedTensor) -> Tiling:
    """Returns the box at an axis' end that no link reaches, if the map lengthens the tensor."""
    none = Tiling(np.zeros((0, len(tensor.shape)), np.int64), np.zeros((0, len(tensor.shape)), np.int64))
    table = (len(tensor.links), len(tensor.shape))
    offsets = np.array([link.target_offsets for link in tensor.links], np.int64).reshape(table)
    sizes = np.array([link.target_sizes() for link in tensor.links], np.int64).reshape(table)
    reached = (offsets + sizes).max(axis=0, initial=0)
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

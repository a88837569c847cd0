"""How DeepSpeed's tensor parallelism cuts a tensor: from what a rank holds to boxes of the whole tensor.

`universal_checkpoint_info` describes it, by patterns of names: replicated, cut along a dimension, fused from several
parts each cut on its own, a vocabulary padded to the degree. Since version 0.4 an affine map (AutoTP) gives the same as
strided views, one list per rank; where it covers a tensor it is preferred.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.flat import Block, meet, strided_blocks
from samerun.formats.deepspeed.states import as_count, as_dict, as_list, as_shape
from samerun.formats.torchfile import Inert

AFFINE_VERSION = 1

# Patterns come from the checkpoint. Those that could take long to match are not tried; DeepSpeed writes none.
_LONGEST_PATTERN = 1_000
_LONGEST_NAME = 256
_MOST_REPEATS = 3
_ESCAPED = re.compile(r"\\.")
_REPEAT = re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")

# The shard holds the parameter times the scale; its gradient then carries the inverse, and so do the moments.
_SCALE_POWERS = {"exp_avg": -1, "exp_avg_sq": -2}


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's part of a tensor. `blocks` lead from the rank's tensor (`source`) to the whole one (`target`).

    `replicated` is set when every rank holds everything. `scales` are, by block, what stored values were multiplied by.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    replicated: bool = False
    scales: tuple[float, ...] = ()

    def divisor(self, block: int, slot: str | None) -> float:
        """Returns what stored values of a block must be divided by; `slot` is None for the parameter itself."""
        scale = self.scales[block] if self.scales else 1.0
        return 1.0 if scale == 1.0 else scale ** (_SCALE_POWERS.get(slot, 0) if slot else 1)


def whole(shape: tuple[int, ...]) -> Slice:
    """Returns the slice of a tensor that is not cut."""
    return Slice(shape, (Block.whole(shape),), replicated=True)


class Slicer:
    """Answers, for one checkpoint, which part of which tensor a tensor-parallel rank holds."""

    def __init__(self, info: Mapping[Any, Any], degree: int) -> None:
        self.degree = degree
        self.known = bool(info)
        self._info = info
        affine = as_dict(info.get("affine_map"))
        self.newer_map = (as_count(affine.get("version")) or AFFINE_VERSION) > AFFINE_VERSION
        self._affine = {} if self.newer_map else as_dict(affine.get("params"))
        self._exact = {_literal(pattern): entry for pattern, entry in self._affine.items()}

    def cut(self, name: str, rank: int, shapes: Sequence[tuple[int, ...]]) -> Slice | None:
        """Returns the part of `name` that `rank` holds; `shapes` are the shapes of all ranks' parts, in order.

        None if the checkpoint does not say how the tensor was cut.
        """
        if self.degree == 1:
            return whole(shapes[0])
        entry = self._affine_entry(name)
        if entry is not None:
            return _from_affine(entry, rank, self.degree, shapes[rank])
        if not self.known:
            return None
        if self._matches("tp_replicated_parameter_patterns", name) or self._matches(
            "parameter_to_average_patterns", name
        ):
            return whole(shapes[rank])
        fused = self._fused(name, shapes)
        if fused is not None:
            return _cut_fused(*fused, rank, shapes)
        axis = 1 if self._matches("parameter_with_row_parallelism_patterns", name) else 0
        if len(shapes[rank]) <= axis:
            return whole(shapes[rank])
        return self._clip_vocabulary(name, _cut_along(axis, rank, shapes))

    def _affine_entry(self, name: str) -> dict[Any, Any] | None:
        found = self._exact.get(name)
        if found is None:
            found = next((entry for pattern, entry in self._affine.items() if _match(pattern, name)), None)
        return as_dict(found) or None

    def _matches(self, key: str, name: str) -> bool:
        return any(_match(pattern, name) for pattern in as_list(self._info.get(key)))

    def _fused(self, name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
        """Returns the cut dimension of a fused tensor, and for each of its parts the widths that the ranks hold."""
        if self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            return 0, tuple(tuple(shape[0] // 2 for shape in shapes) for _ in range(2))
        for record in as_list(self._info.get("parameter_with_sub_params")):
            spec = _sub_params(record)
            for pattern in as_list(spec.get("patterns")):
                if _match(pattern, name):
                    return self._widths(spec, str(pattern), shapes)
        return None

    def _widths(
        self, spec: Mapping[Any, Any], pattern: str, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
        axis = as_count(spec.get("partition_dim")) or 0
        recorded = as_dict(self._info.get("sub_param_shard_widths")).get(pattern)
        if recorded is not None:
            return axis, tuple(tuple(as_shape(widths) or ()) for widths in as_list(recorded))
        layout = as_list(spec.get("shape"))
        parts = layout[axis] if axis < len(layout) else None
        if isinstance(parts, int) and parts > 0 and axis < len(shapes[0]):
            return axis, tuple(tuple(shape[axis] // parts for shape in shapes) for _ in range(parts))
        sizes = as_shape(parts)
        return None if sizes is None else (axis, tuple((size // self.degree,) * self.degree for size in sizes))

    def _clip_vocabulary(self, name: str, cut: Slice) -> Slice:
        """Takes the rows away that only pad a vocabulary to the degree: they are no values."""
        original = as_count(self._info.get("original_vocab_size"))
        if original is None or not self._matches("vocabulary_parameter_patterns", name) or original >= cut.shape[0]:
            return cut
        shape = (original, *cut.shape[1:])
        kept: list[Block] = []
        for block in cut.blocks:
            inside = meet((0,) * len(shape), shape, Block(block.target, block.source, block.sizes))
            kept += [Block(inside.target, inside.source, inside.sizes)] if inside else []
        return Slice(shape, tuple(kept))


def _from_affine(entry: Mapping[Any, Any], rank: int, degree: int, found_shape: tuple[int, ...]) -> Slice | None:
    shape = as_shape(entry.get("logical_shape"))
    ranks = as_dict(entry.get("ranks"))
    mine = as_dict(ranks.get(rank, ranks.get(str(rank))))
    held = as_shape(mine.get("shard_shape"))
    if shape is None or held != found_shape or held is None:
        return None
    blocks: list[Block] = []
    scales: list[float] = []
    everywhere = True
    for piece in map(as_dict, as_list(mine.get("pieces"))):
        found, scale = _blocks_of(piece, held, shape), piece.get("scale", 1.0)
        if found is None or not isinstance(scale, int | float) or scale == 0:
            return None
        blocks += found
        scales += [float(scale)] * len(found)
        everywhere = everywhere and len(as_list(piece.get("locations"))) == degree
    scaled = any(scale != 1.0 for scale in scales)
    return Slice(shape, tuple(blocks), everywhere and bool(blocks), tuple(scales) if scaled else ())


def _blocks_of(piece: Mapping[Any, Any], held: tuple[int, ...], shape: tuple[int, ...]) -> list[Block] | None:
    """Returns a piece of an affine map as blocks; None if it is malformed or reaches outside a tensor."""
    sizes = as_shape(piece.get("shape"))
    source, target = _view(piece.get("source")), _view(piece.get("dest"))
    if sizes is None or source is None or target is None or not len(sizes) == len(source[1]) == len(target[1]):
        return None
    try:
        return strided_blocks(sizes, (target[0], target[1], held), (source[0], source[1], shape))
    except ValueError:
        return None


def _view(value: Any) -> tuple[int, tuple[int, ...]] | None:
    """Returns where a strided view begins, and its strides."""
    parts = as_list(value)
    start, strides = (as_count(parts[0]), as_shape(parts[1])) if len(parts) == 2 else (None, None)
    return None if start is None or strides is None else (start, strides)


def _cut_along(axis: int, rank: int, shapes: Sequence[tuple[int, ...]]) -> Slice:
    sizes = [shape[axis] for shape in shapes]
    held = shapes[rank]
    shape = (*held[:axis], sum(sizes), *held[axis + 1 :])
    target = (*((0,) * axis), sum(sizes[:rank]), *((0,) * (len(held) - axis - 1)))
    return Slice(shape, (Block((0,) * len(held), target, held),))


def _cut_fused(
    axis: int, widths: Sequence[Sequence[int]], rank: int, shapes: Sequence[tuple[int, ...]]
) -> Slice | None:
    held = shapes[rank]
    if axis >= len(held) or any(len(part) != len(shapes) for part in widths):
        return None
    blocks: list[Block] = []
    here = there = 0
    for part in widths:
        sizes = (*held[:axis], part[rank], *held[axis + 1 :])
        blocks.append(Block(_at(axis, here, held), _at(axis, there + sum(part[:rank]), held), sizes))
        here += part[rank]
        there += sum(part)
    if here != held[axis]:
        return None
    return Slice((*held[:axis], there, *held[axis + 1 :]), tuple(block for block in blocks if block.num_elements))


def _at(axis: int, position: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(position if number == axis else 0 for number in range(len(shape)))


def _sub_params(record: Any) -> dict[Any, Any]:
    """Returns a description of fused parts: a mapping, or the record of DeepSpeed's dataclass."""
    return as_dict(record.state if isinstance(record, Inert) else record)


def _literal(pattern: Any) -> str:
    """Returns the one name that an anchored pattern without wildcards matches, else an impossible name.

    >>> _literal(r"^layers\\.0\\.w$")
    'layers.0.w'
    """
    text = str(pattern)
    inner = re.sub(r"\\(\W)", r"\1", text[1:-1])
    return inner if text == f"^{re.escape(inner)}$" else "\0"


def _match(pattern: Any, name: str) -> bool:
    """Matches as DeepSpeed does, from the start. A pattern that is broken or could take long matches nothing."""
    if not isinstance(pattern, str) or len(pattern) > _LONGEST_PATTERN:
        return False
    literal = _literal(pattern)
    if literal != "\0":
        return literal == name
    plain = _ESCAPED.sub("", pattern)
    if len(_REPEAT.findall(plain)) > _MOST_REPEATS or _REPEATED_GROUP.search(plain) or len(name) > _LONGEST_NAME:
        return False
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False

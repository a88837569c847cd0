"""The model's tensors in a torch_dist directory, and what each rank held of them, from how they are cut.

Homogeneous layers are stacked along a leading axis, experts along the next. Per layer and expert, chunks are in order
of the tensor-parallel rank; a rank that contributes k chunks (two halves of a gated MLP) has every TP-th of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from samerun.core.flat import Block
from samerun.formats.dcpfile.index import StoredTensor
from samerun.formats.mcore.flat import Local, Target
from samerun.formats.mcore.order import local_name
from samerun.formats.mcore.run import Run

_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
_LAYER = re.compile(r"((?:^|\.)layers\.)(\d+)\.")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")
_EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.")
_HALVES = (".weight_w", ".weight_v", ".bias_w", ".bias_v")
_BUFFERS = re.compile(r"(?:^|\.)(?:expert_bias|(?:local|global)_tokens_per_expert|inv_freq|running_\w+)$")
_EMBEDDING = "embedding.word_embeddings.weight"
_STACK = "decoder.layers."


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """One stored tensor of the model. `by_layer` and `by_expert` tell which leading axes are stacks."""

    stored: StoredTensor
    by_layer: bool
    by_expert: bool

    @property
    def name(self) -> str:
        """The stored name."""
        return self.stored.name

    @property
    def num_stacked(self) -> int:
        """Number of leading axes that are stacks."""
        return self.by_layer + self.by_expert

    @property
    def is_expert(self) -> bool:
        """Whether the tensor holds weights of experts (not of shared ones)."""
        return self.by_expert or _EXPERT.search(self.name) is not None

    @property
    def is_buffer(self) -> bool:
        """Whether the name is one of Megatron's buffers."""
        return _BUFFERS.search(self.name) is not None

    @property
    def ndim(self) -> int:
        """Number of dimensions of the parameter itself, without stacks."""
        return len(self.stored.shape) - self.num_stacked

    @cached_property
    def cut(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the chunks of one layer and expert, without the stacked axes, in order of place."""
        tiling, stacked = self.stored.tiling, self.num_stacked
        if not len(tiling):
            return []
        first = tiling.offsets[:, :stacked].min(axis=0)
        rows = np.flatnonzero((tiling.offsets[:, :stacked] == first).all(axis=1))
        boxes = {
            (tuple(tiling.offsets[row, stacked:].tolist()), tuple(tiling.sizes[row, stacked:].tolist()))
            for row in rows.tolist()
        }
        return sorted(boxes)

    def part(self, rank: int, degree: int) -> list[Block] | None:
        """Returns the blocks of one layer and expert that a tensor-parallel rank holds, joined along the cut axis.

        None if the chunks cannot be dealt to that many ranks.
        """
        boxes = self.cut
        if len(boxes) == 1:
            offsets, sizes = boxes[0]
            return [Block(offsets, offsets, sizes)]
        axes = {axis for axis in range(self.ndim) if len({offsets[axis] for offsets, _ in boxes}) > 1}
        if len(axes) != 1 or len(boxes) % degree:
            return None
        axis = axes.pop()
        blocks: list[Block] = []
        at = 0
        for offsets, sizes in boxes[rank::degree]:
            source = tuple(at if i == axis else 0 for i in range(len(sizes)))
            blocks.append(Block(source, offsets, sizes))
            at += sizes[axis]
        return blocks


def split_model(tensors: Sequence[StoredTensor]) -> list[ModelTensor]:
    """Returns the tensors of the model among all stored ones, in the order of the metadata."""
    return [
        ModelTensor(tensor, *_stacks(tensor))
        for tensor in tensors
        if not tensor.name.startswith(("optimizer.", "chained_")) and "." in tensor.name
    ]


def _stacks(tensor: StoredTensor) -> tuple[bool, bool]:
    by_layer = _STACKED_LAYERS.search(tensor.name) is not None and len(tensor.shape) > 1
    by_expert = _EXPERTS.search(tensor.name) is not None and len(tensor.shape) > 1 + by_layer
    return by_layer, by_expert


def num_layers(tensors: Sequence[ModelTensor]) -> int:
    """Returns how many decoder layers there are, by stacks and by numbers in names."""
    count = 0
    for tensor in tensors:
        if not tensor.name.startswith(_STACK):
            continue
        match = _LAYER.search(tensor.name)
        count = max(count, tensor.stored.shape[0] if tensor.by_layer else int(match[2]) + 1 if match else 0)
    return count


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among those that hold different weights: pipeline, model chunk, tensor, and expert rank."""

    pp: int
    chunk: int
    tp: int
    ep: int = 0


def locals_of(
    tensors: Sequence[ModelTensor], run: Run, stages: Mapping[tuple[int, int], range], place: Place, *, expert: bool
) -> list[Local] | None:
    """Returns the parameters that one rank holds in one model chunk: those of experts, or the others. Unordered.

    With `expert` unset and no expert parallelism, experts are among the others. None if a tensor cannot be dealt out.
    """
    layers = stages[place.pp, place.chunk]
    found: dict[str, Local] = {}
    for tensor in tensors:
        apart = tensor.is_expert and run.ep > 1
        if tensor.is_buffer or apart != expert:
            continue
        degree = run.etp if tensor.is_expert else run.tp
        blocks = tensor.part(place.tp, degree)
        if blocks is None:
            return None
        copy = (place.tp,) if len(tensor.cut) == 1 and degree > 1 else (0,)
        shape = _Shape(tensor, blocks, copy, tensor.num_stacked)
        for name, stack in _cells(tensor, run, layers, place):
            shape.add(found, name, stack)
    if not expert:
        _add_shared_embedding(found, tensors, run, place)
    return list(found.values())


def _cells(tensor: ModelTensor, run: Run, layers: range, place: Place) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the registered name and the place in the stack of every parameter that a rank has of a tensor."""
    is_expert = tensor.is_expert
    for layer, name in _layer_cells(tensor, run, layers, place):
        prefix = (layer,) if tensor.by_layer else ()
        if not is_expert:
            yield name, prefix
        elif tensor.by_expert:
            total = tensor.stored.shape[len(prefix)]
            share = total // run.ep
            for expert in range(place.ep * share, (place.ep + 1) * share):
                yield name.replace(".experts.experts.", f".experts.local_experts.{expert}."), (*prefix, expert)
        else:
            match = _EXPERT.search(name)
            share = (run.count("num_experts") or run.ep) // run.ep
            if match and int(match[1]) // max(1, share) == place.ep:
                yield name.replace(match[0], f".experts.local_experts.{match[1]}."), prefix


def _layer_cells(tensor: ModelTensor, run: Run, layers: range, place: Place) -> Iterator[tuple[int, str]]:
    name = tensor.name
    last = place.pp == run.pp - 1 and place.chunk == run.vpp - 1
    if tensor.by_layer and name.startswith(_STACK):
        rest = name.removeprefix(_STACK)
        for layer in layers:
            if layer < tensor.stored.shape[0]:
                yield layer, f"{_STACK}{layer}.{rest}"
        return
    match = _LAYER.search(name)
    if match and name.startswith(_STACK):
        if int(match[2]) in layers:
            yield int(match[2]), name
    elif name.startswith("embedding."):
        if place.pp == 0 and place.chunk == 0:
            yield 0, name
    elif last:
        yield 0, name


class _Shape:
    """What all parameters of a stored tensor have in common on a rank: their blocks, their shape, and whose half."""

    def __init__(self, tensor: ModelTensor, blocks: Sequence[Block], copy: tuple[int, ...], num_stacked: int) -> None:
        ones, zeros = (1,) * num_stacked, (0,) * num_stacked
        self.tensor, self.copy = tensor, copy
        self.blocks = [((*zeros, *b.source), b.target, (*ones, *b.sizes)) for b in blocks]
        self.shape = (*ones, *_joined(blocks))

    def add(self, found: dict[str, Local], name: str, stack: tuple[int, ...]) -> None:
        """Adds the parameter of this name, that of one place in the stack, to those of a rank."""
        stored = self.tensor.stored
        moved = tuple(Block(source, (*stack, *target), sizes) for source, target, sizes in self.blocks)
        target = Target(stored.name, stored.shape, moved)
        half = name.endswith(_HALVES)
        joined = name[: -len("_w")] if half else name
        known = found.get(joined)
        local = Local(joined, self.shape, (target,), stored.dtype.name, self.copy)
        found[joined] = _merge(known, local, second=half and name.endswith("_v")) if known else local


def _joined(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Returns the shape of the tensor that blocks make up on a rank."""
    origin = blocks[0].source
    return tuple(max(block.source[i] + block.sizes[i] for block in blocks) for i in range(len(origin)))


def _merge(first: Local, other: Local, *, second: bool) -> Local:
    """Joins gate and projection, which a checkpoint of single layers files apart and a rank holds as one."""
    top, bottom = (first, other) if second else (other, first)
    axis = len(top.shape) - (2 if len(top.shape) > 1 else 1)
    shift = top.shape[axis]
    lower = bottom.targets[0]
    moved = tuple(
        Block(tuple(at + shift * (i == axis) for i, at in enumerate(block.source)), block.target, block.sizes)
        for block in lower.blocks
    )
    shape = tuple(size + bottom.shape[axis] * (i == axis) for i, size in enumerate(top.shape))
    targets = (top.targets[0], Target(lower.fqn, lower.shape, moved))
    return Local(first.name, shape, targets, first.dtype, first.copy)


def _add_shared_embedding(found: dict[str, Local], tensors: Sequence[ModelTensor], run: Run, place: Place) -> None:
    """Marks the embedding that the first and the last pipeline stage share, and adds the last stage's copy of it."""
    if not run.tied or run.pp == 1 or any(tensor.name == "output_layer.weight" for tensor in tensors):
        return
    if place.pp == 0 and place.chunk == 0 and _EMBEDDING in found:
        held = found[_EMBEDDING]
        found[_EMBEDDING] = Local(held.name, held.shape, held.targets, held.dtype, held.copy, own_bucket=True)
    elif place.pp == run.pp - 1 and place.chunk == run.vpp - 1:
        embedding = next((tensor for tensor in tensors if tensor.name == _EMBEDDING), None)
        blocks = embedding.part(place.tp, run.tp) if embedding else None
        if embedding and blocks:
            _Shape(embedding, blocks, (1,), 0).add(found, "output_layer.weight", ())
            held = found["output_layer.weight"]
            found["output_layer.weight"] = Local(
                held.name, held.shape, held.targets, held.dtype, held.copy, own_bucket=True
            )


def rename_local(params: Sequence[Local]) -> list[Local]:
    """Returns the same parameters under the names of the local layer specification."""
    named = ((p, local_name(p.name)) for p in params)
    return [
        p if name == p.name else Local(name, p.shape, p.targets, p.dtype, p.copy, own_bucket=p.own_bucket)
        for p, name in named
    ]

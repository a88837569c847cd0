"""Memory per destination rank and on the host, estimated from shapes alone.

Without a stage, the model is FSDP2 (`torch.distributed.fsdp.fully_shard`) under HSDP, tensor, context, pipeline and
expert parallelism:

* A parameter is cut on dimension 0 into `dp_shard x cp` rows-per-rank of `ceil(rows / ranks)`; parameters and gradients
  are allocated at that padded size on every rank, optimizer state at the rank's own rows (so the last ranks hold less).
* `dp_replicate` copies everything. `tp` first cuts a tensor of two or more dimensions on the first of its two leading
  dimensions that it divides; vectors, and matrices that it does not divide, are copied. `ep` cuts stacked experts on
  dimension 0 and deals numbered ones out. `pp` gives each stage an equal run of blocks, the embedding to the first
  stage and everything else outside the blocks to the last; a tied tensor is on both.
* A block is what `fully_shard` is usually applied to: everything up to the first number in the name (`layers.3`); all
  that is outside of blocks is one more unit. The largest unit is gathered whole, in the compute type, when it is used.

With a stage, it is DeepSpeed's ZeRO, or a distributed optimizer that works alike (Megatron's is stage 1):

* Stage 0 copies everything. From stage 1 on every rank keeps `1/n` of the optimizer and of the fp32 masters, which a
  run in fp32 has too; from stage 2 on also of the gradients, at stage 3 also of the parameters, gathered unit by unit.
  Tensors are cut as vectors of all their values, each padded to a multiple of the ranks.

Activations, the gradient of the gathered unit, communication buffers and the framework's own memory come on top: the
total is a lower bound. All amounts are in bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DType
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.plan.stacked import unstack_layers

ROOT_UNIT = "(outside blocks)"

_PARTS = ("parameters", "gradients", "optimizer", "masters", "ema", "buffers", "gather")
_MASTER_BYTES = 4
_EMBEDDING_WORDS = ("emb", "wte", "wpe", "tok")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank holds, in bytes. `gather_unit` names the unit whose gathering needs `gather_bytes`."""

    rank: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    masters_bytes: int
    ema_bytes: int
    buffers_bytes: int
    gather_bytes: int
    gather_unit: str

    @property
    def total_bytes(self) -> int:
        """The sum of the parts: what the rank needs before any activation."""
        return sum(getattr(self, f"{part}_bytes") for part in _PARTS)

    def to_json(self) -> dict[str, Any]:
        """Returns the parts and their total."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"total_bytes": self.total_bytes}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `to_json` back."""
        return cls(**{field.name: body[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory at its peak, in bytes, for the two ways to get the state onto the destination.

    `consolidate_bytes`: one process merges everything into one file, every tensor in memory once. `direct_bytes`: every
    destination rank (all on one host) loads its own shards, holding the largest stored piece while it copies from it.
    """

    consolidate_bytes: int
    direct_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory at a layout. `optimizer_known` is false where the checkpoint holds no optimizer state to count.

    `stage` is that of ZeRO, None for FSDP2. `num_blocks` are the blocks that pipeline stages share.
    """

    layout: Layout
    per_rank: tuple[RankMemory, ...]
    host: HostMemory
    optimizer_known: bool
    device_memory_bytes: int | None = None
    stage: int | None = None
    num_blocks: int | None = None

    @property
    def largest(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.per_rank, key=lambda item: item.total_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the lower bound fits the device; None if no device was named."""
        return None if self.device_memory_bytes is None else self.largest.total_bytes <= self.device_memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form that `samerun memory --json` prints and a plan holds."""
        return {
            "layout": self.layout.to_dict(),
            "stage": self.stage,
            "num_blocks": self.num_blocks,
            "per_rank": [item.to_json() for item in self.per_rank],
            "host": {"consolidate_bytes": self.host.consolidate_bytes, "direct_bytes": self.host.direct_bytes},
            "optimizer_known": self.optimizer_known,
            "device_memory_bytes": self.device_memory_bytes,
            "fits": self.fits,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `to_json` back."""
        return cls(
            layout=Layout.from_dict(body["layout"]),
            per_rank=tuple(RankMemory.from_json(item) for item in body["per_rank"]),
            host=HostMemory(**body["host"]),
            optimizer_known=body["optimizer_known"],
            device_memory_bytes=body["device_memory_bytes"],
            stage=body.get("stage"),
            num_blocks=body.get("num_blocks"),
        )


def unit_of(fqn: str) -> str:
    """Returns the unit that is gathered together with the parameter `fqn`.

    >>> unit_of("model.layers.3.mlp.experts.5.w1"), unit_of("norm.weight")
    ('model.layers.3', '(outside blocks)')
    """
    parts = fqn.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ROOT_UNIT


def trainable_fqns(state: LogicalState) -> frozenset[str]:
    """Returns the parameters that have gradients, as far as the checkpoint tells.

    Those with optimizer state; where nothing has any (plain SGD, or nothing saved) those in a parameter group; where
    there are no groups either, all. A parameter that is in a group but has no state was frozen or never used.
    """
    entries = state.tensors.values()
    if stepped := {entry.key.fqn for entry in entries if entry.key.role is Role.OPTIM}:
        return frozenset(stepped)
    if grouped := {fqn for group in state.groups for fqn in group.params}:
        return frozenset(grouped)
    return frozenset(entry.key.fqn for entry in entries if entry.key.role is Role.PARAM)


def estimate_memory(
    state: LogicalState,
    layout: Layout,
    *,
    stage: int | None = None,
    compute_dtype: DType | None = None,
    device_memory_bytes: int | None = None,
) -> MemoryEstimate:
    """Returns the memory of every rank of `layout`, and of the host while the state gets there.

    Args:
        state: the checkpoint's logical state; only names, shapes and types are used.
        layout: the destination.
        stage: of ZeRO, 0 to 3; None means FSDP2.
        compute_dtype: type in which gathered parameters are held; None means the type that they are stored in.
        device_memory_bytes: one device's memory, to compare with.
    """
    unstacked = unstack_layers(state)
    cells = _Cells(unstacked, layout, compute_dtype, stage)
    for entry in unstacked.tensors.values():
        cells.add(entry)
    return MemoryEstimate(
        layout=layout,
        per_rank=tuple(cells.ranks()),
        host=_estimate_host(state, layout),
        optimizer_known=any(entry.key.role is Role.OPTIM for entry in state.tensors.values()),
        device_memory_bytes=device_memory_bytes,
        stage=stage,
        num_blocks=len(cells.block_stage),
    )


def _estimate_host(state: LogicalState, layout: Layout) -> HostMemory:
    entries = state.tensors.values()
    return HostMemory(
        consolidate_bytes=sum(entry.num_bytes for entry in entries),
        direct_bytes=layout.world_size * max((_largest_piece_bytes(entry) for entry in entries), default=0),
    )


def _largest_piece_bytes(entry: TensorEntry) -> int:
    return int(entry.tiling.sizes.prod(axis=1).max(initial=0)) * entry.dtype.num_bytes


class _Cells:
    """Bytes by (pipeline stage, position in dp_shard x cp x tp): ranks that differ only in dp_replicate are alike."""

    def __init__(
        self, state: LogicalState, layout: Layout, compute_dtype: DType | None, zero_stage: int | None
    ) -> None:
        self.state = state
        self.layout = layout
        self.zero_stage = zero_stage
        self.compute_dtype = compute_dtype
        self.width = layout.dp_shard * layout.cp * layout.tp
        self.bytes = {part: np.zeros((layout.pp, self.width), np.int64) for part in _PARTS}
        self.units: dict[tuple[int, str], int] = {}
        self.trainable = trainable_fqns(state)
        self.mastered = {entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.MASTER}

    @cached_property
    def params(self) -> dict[str, TensorEntry]:
        """Parameters by name, which are what optimizer state follows."""
        return {entry.key.fqn: entry for entry in self.state.tensors.values() if entry.key.role is Role.PARAM}

    @cached_property
    def block_stage(self) -> dict[str, int]:
        """The pipeline stage of each block, equal runs of them in numerical order."""
        blocks = {unit for fqn in self.params if (unit := unit_of(fqn)) != ROOT_UNIT}
        ordered = sorted(blocks, key=lambda unit: (unit.rpartition(".")[0], int(unit.rpartition(".")[2])))
        return {unit: index * self.layout.pp // len(ordered) for index, unit in enumerate(ordered)}

    def add(self, entry: TensorEntry) -> None:
        """Counts one tensor of the state wherever it belongs."""
        stages = self._stages(entry)
        match entry.key.role:
            case Role.PARAM:
                self._add_parameter(entry, stages)
            case Role.BUFFER:
                self._put("buffers", stages, np.full(self.width, entry.num_bytes, np.int64))
            case Role.OPTIM:
                self._put("optimizer", stages, self._held(entry) * entry.dtype.num_bytes)
            case Role.MASTER:
                self._put("masters", stages, self._held(entry) * entry.dtype.num_bytes)
            case Role.EMA:
                self._put("ema", stages, self._held(entry) * entry.dtype.num_bytes)

    def _add_parameter(self, entry: TensorEntry, stages: frozenset[int]) -> None:
        cut = self._cut(entry.key.fqn, entry.shape, from_stage=3)
        self._put("parameters", stages, cut.allocated() * entry.dtype.num_bytes)
        if trained := entry.key.fqn in self.trainable:
            gradients = self._cut(entry.key.fqn, entry.shape, from_stage=2).allocated()
            self._put("gradients", stages, gradients * entry.dtype.num_bytes)
        if trained and self.zero_stage and entry.key.fqn not in self.mastered:
            masters = self._cut(entry.key.fqn, entry.shape, from_stage=1).allocated()
            self._put("masters", stages, masters * _MASTER_BYTES)
        if cut.shards > 1:
            computed = self.compute_dtype if self.compute_dtype and entry.dtype.kind == "float" else entry.dtype
            for stage in stages:
                key = (stage, unit_of(entry.key.fqn))
                self.units[key] = self.units.get(key, 0) + cut.gathered() * computed.num_bytes

    def _put(self, part: str, stages: frozenset[int], size_bytes: npt.NDArray[np.int64]) -> None:
        for stage in stages:
            self.bytes[part][stage] += size_bytes

    def _stages(self, entry: TensorEntry) -> frozenset[int]:
        owner = self.params.get(entry.key.fqn, entry)
        stages = {self._stage(name) for name in (entry.key.fqn, *owner.aliases)}
        return frozenset(stages)

    def _stage(self, fqn: str) -> int:
        last = self.layout.pp - 1
        embeds = any(word in fqn.lower() for word in _EMBEDDING_WORDS)
        return self.block_stage.get(unit_of(fqn), 0 if embeds else last)

    def _held(self, entry: TensorEntry) -> npt.NDArray[np.int64]:
        """Returns the elements of a slot, master or average that each position holds: cut as its parameter is."""
        owner = self.params.get(entry.key.fqn)
        if not entry.shape or (owner is not None and owner.shape[:1] != entry.shape[:1]):
            return np.full(self.width, entry.num_elements, np.int64)
        return self._cut(entry.key.fqn, entry.shape, from_stage=1).held()

    def _cut(self, fqn: str, shape: tuple[int, ...], from_stage: int) -> _Cut:
        """Returns how a tensor is cut that ZeRO shards from some stage on, and FSDP2 always."""
        layout, ranks = self.layout, self.layout.dp_shard * self.layout.cp
        if layout.ep > 1 and (experts := _experts_in(fqn)):
            flat = self.zero_stage is not None
            shared = self.zero_stage is None or self.zero_stage >= from_stage
            return _cut_expert(experts, shape, layout, flat=flat, shared=shared)
        rows, rest = _cut_tp(shape, layout.tp)
        if self.zero_stage is None:
            return _Cut(rows, rest, ranks, np.arange(self.width) // layout.tp)
        if self.zero_stage < from_stage:
            return _Cut(rows, rest, 1, np.zeros(self.width, np.int64))
        return _Cut(rows * rest, 1, ranks, np.arange(self.width) // layout.tp)

    def ranks(self) -> Iterator[RankMemory]:
        """Yields the ranks in order."""
        largest = [self._largest_unit(stage) for stage in range(self.layout.pp)]
        for stage, (_, size_bytes) in enumerate(largest):
            self.bytes["gather"][stage] = size_bytes
        for rank in range(self.layout.world_size):
            at = self.layout.coordinate(rank)
            position = (at["dp_shard"] * self.layout.cp + at["cp"]) * self.layout.tp + at["tp"]
            parts = {f"{part}_bytes": int(self.bytes[part][at["pp"], position]) for part in _PARTS}
            yield RankMemory(rank=rank, gather_unit=largest[at["pp"]][0], **parts)

    def _largest_unit(self, stage: int) -> tuple[str, int]:
        mine = {unit: size for (at, unit), size in self.units.items() if at == stage}
        return max(mine.items(), key=lambda item: item[1], default=("", 0))


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """`rows` of `rest` elements each, in chunks over `shards` ranks; `index` is each position's chunk, -1 for none."""

    rows: int
    rest: int
    shards: int
    index: npt.NDArray[np.int64]

    @property
    def _chunk(self) -> int:
        return math.ceil(self.rows / self.shards)

    def held(self) -> npt.NDArray[np.int64]:
        """Elements that each position owns."""
        rows = np.clip(self.rows - self.index * self._chunk, 0, self._chunk)
        return np.where(self.index < 0, 0, rows * self.rest)

    def allocated(self) -> npt.NDArray[np.int64]:
        """Elements that each position allocates: a whole chunk, even where fewer rows are left."""
        return np.where(self.index < 0, 0, self._chunk * self.rest)

    def gathered(self) -> int:
        """Elements of the gathered tensor, padding included."""
        return self._chunk * self.shards * self.rest


def _cut_tp(shape: tuple[int, ...], tp: int) -> tuple[int, int]:
    """Returns rows and elements per row of one tensor-parallel rank's part."""
    rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if tp == 1 or len(shape) < 2:
        return rows, rest
    if rows % tp == 0:
        return rows // tp, rest
    return (rows, rest // tp) if shape[1] % tp == 0 else (rows, rest)


_EXPERTS = re.compile(r"(?:^|\.)(?:\w+_)?experts(?:\.(?P<number>\d+))?(?=\.|$)")


def _experts_in(fqn: str) -> re.Match[str] | None:
    """Returns where a name says experts, the innermost word of several."""
    return next(reversed(list(_EXPERTS.finditer(fqn))), None)


def _cut_expert(experts: re.Match[str], shape: tuple[int, ...], layout: Layout, *, flat: bool, shared: bool) -> _Cut:
    """Experts are dealt over `ep`, innermost in dp_shard x cp x tp; what is left of those ranks shards each of them.

    With `flat` they are cut as vectors; without `shared` each of those ranks holds its experts whole.
    """
    width = layout.dp_shard * layout.cp * layout.tp
    positions = np.arange(width)
    shards = width // layout.ep if shared else 1
    index = positions // layout.ep if shared else np.zeros(width, np.int64)
    rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    number = experts["number"]
    if number is None:
        rows = math.ceil(rows / layout.ep)
    else:
        index = np.where(positions % layout.ep == int(number) % layout.ep, index, -1)
    return _Cut(rows * rest, 1, shards, index) if flat else _Cut(rows, rest, shards, index)

"""The model's tensors in every rank's file, and where each lies in the model of the whole run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samerun.core.flat import Part
from samerun.core.state import Role, TensorKey
from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.base import Extent
from samerun.formats.deepspeed.states import as_dict
from samerun.formats.mcore.flat import Local, Target
from samerun.formats.mcore.held import Collector
from samerun.formats.mcore.stages import Stage, plan_stages, spread_layers
from samerun.formats.megatron_legacy.rules import Cut, cut_of, expert_of, global_name, is_expert, join, layer_of
from samerun.formats.megatron_legacy.source import Place, RankFiles, Source
from samerun.formats.torchfile import TensorRef

_BUFFERS = re.compile(r"(?:^|\.)(?:expert_bias|(?:local|global)_tokens_per_expert|inv_freq|running_\w+)$")
_CHUNK = re.compile(r"model(\d*)")
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor as one rank's file has it: its part of the model's, and where its values lie."""

    local: Local
    extent: Extent
    ndim: int
    expert: bool
    buffer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Tensors by rank and model chunk, in the order in which the model registers them."""

    by_rank: Mapping[Place, tuple[tuple[HeldTensor, ...], ...]]
    problems: tuple[Problem, ...]

    def members(self) -> dict[str, HeldTensor]:
        """Returns one rank's tensor for every name of the whole model."""
        return {
            held.local.targets[0].fqn: held
            for chunks in reversed(list(self.by_rank.values()))
            for chunk in chunks
            for held in chunk
        }


def read_models(source: Source) -> Models:
    """Finds every tensor of the model, in every rank's file."""
    problems: dict[str, Problem] = {}
    stages = _stages(source)
    found: dict[Place, tuple[tuple[HeldTensor, ...], ...]] = {}
    for place, rank in source.ranks.items():
        chunks: list[tuple[HeldTensor, ...]] = []
        for chunk, named in enumerate(_chunks(rank)):
            first = stages.get((place.pp, chunk), range(0)).start
            chunks.append(tuple(_held(source, place, rank, named, first, problems)))
        found[place] = tuple(chunks)
    return Models(found, tuple(problems.values()))


def _chunks(rank: RankFiles) -> list[dict[str, TensorRef]]:
    numbered = sorted(
        (int(match[1] or 0), name)
        for name in rank.value
        if type(name) is str and (match := _CHUNK.fullmatch(name)) is not None
    )
    return [
        {str(key): item for key, item in _flatten(as_dict(rank.value[name])).items() if isinstance(item, TensorRef)}
        for _, name in numbered
    ]


def _flatten(value: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Joins the nested tables that releases before megatron.core used for models."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict) and depth < 6:
            found |= _flatten(item, f"{name}.", depth + 1)
        else:
            found[name] = item
    return found


def _stages(source: Source) -> dict[Stage, range]:
    """Returns the layers of every stage, as many as its files hold; those that are missing as the arguments say."""
    counts: dict[Stage, int] = {}
    for place, rank in source.ranks.items():
        for chunk, named in enumerate(_chunks(rank)):
            numbers = [number for name in named if (number := layer_of(name)) is not None]
            stage = (place.pp, chunk)
            counts[stage] = max(counts.get(stage, 0), max(numbers, default=-1) + 1)
    total = source.run.count("num_layers")
    planned = plan_stages(source.run, total) if total else None
    for pp in range(source.run.pp):
        for chunk in range(source.run.vpp):
            if (pp, chunk) not in counts:
                counts[pp, chunk] = len(planned[pp, chunk]) if planned else 0
    return spread_layers(counts)


def _held(
    source: Source,
    place: Place,
    rank: RankFiles,
    named: Mapping[str, TensorRef],
    first_layer: int,
    problems: dict[str, Problem],
) -> list[HeldTensor]:
    run = source.run
    per_rank = max((number for name in named if (number := expert_of(name)) is not None), default=-1) + 1
    found: list[HeldTensor] = []
    for name, tensor in named.items():
        expert = is_expert(name)
        cut = cut_of(name, gated=run.gated)
        degree = run.etp if expert else run.tp
        numbered = expert_of(name) is not None
        if cut is None or (expert and not numbered and run.ep > 1):
            if degree > 1 or (expert and run.ep > 1):
                problems.setdefault(name, _unknown_cut(rank, name))
                continue
            cut = Cut(None)
        try:
            extent = rank.state.extent(tensor)
        except CorruptCheckpoint as error:
            problems.setdefault(name, error.problems[0])
            continue
        joined = join(tensor.shape, cut, place.tp if degree > 1 else 0, degree)
        if joined is None:
            problems.setdefault(name, _unknown_cut(rank, name))
            continue
        fqn = global_name(name, first_layer, place.ep * per_rank)
        shared = run.tied and run.pp > 1 and fqn == _OUTPUT and place.pp == run.pp - 1
        target = Target(_EMBEDDING if shared else fqn, *joined)
        copy = (0 if expert else place.ep, int(shared), place.tp if cut.axis is None and degree > 1 else 0)
        own = shared or (run.tied and run.pp > 1 and fqn == _EMBEDDING)
        local = Local(fqn, tensor.shape, (target,), tensor.dtype.name, copy, own_bucket=own)
        buffer = _BUFFERS.search(fqn) is not None
        found.append(HeldTensor(local, extent, len(tensor.shape), expert, buffer))
    return found


def add_models(models: Models, collector: Collector, trained: set[str]) -> None:
    """Files every rank's tensors under their keys. `trained` are the names that the optimizer has state of."""
    for chunks in models.by_rank.values():
        for chunk in chunks:
            for held in chunk:
                fqn = held.local.targets[0].fqn
                buffer = held.buffer or (bool(trained) and fqn not in trained)
                add_tensor(collector, TensorKey(Role.BUFFER if buffer else Role.PARAM, fqn), held.local, held.extent)


def add_tensor(collector: Collector, key: TensorKey, local: Local, extent: Extent) -> None:
    """Files one tensor of a rank, which lies as such in its file."""
    target = local.targets[0]
    parts = [
        Part(block.target, block.sizes, sum(map(int.__mul__, block.source, extent.strides)), number)
        for number, block in enumerate(target.blocks)
        if block.num_elements
    ]
    collector.add_parts(key, local.name, target.shape, extent.dtype, local.copy, extent, 0, 0, extent.strides, parts)


def _unknown_cut(rank: RankFiles, name: str) -> Problem:
    return Problem(
        "SR-MEG-SPLIT",
        "how ranks' parts of this tensor are put together is not known",
        where={"file": str(rank.state.path), "tensor": name},
        hint="its name is none of megatron.core's. Its values are not read; save it through distributed checkpointing, "
        "which records how tensors are cut",
    )

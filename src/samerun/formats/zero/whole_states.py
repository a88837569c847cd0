"""Where stage 0 keeps optimizer state, and which parameters each piece of it can be about.

Model files keep it for the ranks that share them; with experts, every expert-parallel rank has a file of its own; with
pipelines, every stage keeps its own, and the layers that belong to the stage have to be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from samerun.formats.base import Extent
from samerun.formats.deepspeed.experts import expert_of, is_buffer_of_expert
from samerun.formats.deepspeed.model import ModelStates, tensors_in
from samerun.formats.deepspeed.model_tensors import Names
from samerun.formats.deepspeed.states import StateFile, as_dict, as_list
from samerun.formats.zero.source import Source

Candidates = tuple[tuple[str, Extent], ...]


@dataclass(frozen=True, slots=True, eq=False)
class WholeState:
    """One optimizer state dict. `candidates` are the parameters it can be about, in the model's order.

    `stage` and `rank` are the pipeline stage and tensor-parallel rank; `copy` numbers the file among those that hold
    the same parameters; `mark` tells numbers of this file from another's.
    """

    file: StateFile
    value: Mapping[Any, Any]
    candidates: Candidates
    stage: int
    rank: int
    copy: int = 0
    mark: str = ""


def whole_states(source: Source, names: Names) -> list[WholeState]:
    """Returns every optimizer state dict of a directory."""
    if source.expert_optims:
        return list(_by_expert_rank(source, names))
    found: list[WholeState] = []
    used: dict[int, int] = {}
    for model in source.models.values():
        value = as_dict(model.value.get("optimizer"))
        if not value:
            continue
        stage, rank = source.degrees.position(model.name.mp)
        if model.module is None:
            candidates = _stage_candidates(source, names, value, rank, used)
        else:
            candidates = _model_candidates(model, names)
        mark = f"{model.name.mp}." if source.degrees.mp > 1 else ""
        found.append(WholeState(model.file, value, candidates, stage, rank, 0, mark))
    return found


def _model_candidates(model: ModelStates, names: Names) -> Candidates:
    return tuple(
        (name, model.file.extent(tensor))
        for name, tensor in (model.module or {}).items()
        if name not in names.buffers and name not in names.shared and tensor.dtype.kind == "float"
    )


def _by_expert_rank(source: Source, names: Names) -> Iterator[WholeState]:
    """Yields the optimizer files of expert-parallel ranks: about everything but experts, and about the rank's own."""
    ranks = max(name.expert or 0 for name in source.expert_optims) + 1
    for name, file in source.expert_optims.items():
        value = as_dict(as_dict(file.value).get("optimizer"))
        model = source.model_of(name.mp)
        if not value or model is None:
            continue
        number = name.expert or 0
        counts = [count for count in as_list(model.value.get("num_experts")) if isinstance(count, int)]
        own = tuple(_experts_of(source, names, name.mp, number, counts, ranks))
        stage, rank = source.degrees.position(name.mp)
        yield WholeState(
            file, value, (*_model_candidates(model, names), *own), stage, rank, number, f"{number}." if number else ""
        )


def _experts_of(
    source: Source, names: Names, mp: int, number: int, counts: list[int], ranks: int
) -> Iterator[tuple[str, Extent]]:
    """Yields the parameters of the experts that an expert-parallel rank holds, layer by layer."""
    for name, file in source.experts.items():
        layer = name.layer or 0
        held = counts[layer] // ranks if layer < len(counts) else 0
        if name.mp == mp and held and (name.expert or 0) // held == number:
            for key, tensor in tensors_in(file.value).items():
                place = expert_of(key)
                if place is not None and not is_buffer_of_expert(place, names.buffers):
                    yield key, file.extent(tensor)


def _stage_candidates(
    source: Source, names: Names, value: Mapping[Any, Any], rank: int, used: dict[int, int]
) -> Candidates:
    """Returns the parameters of the next pipeline layers that are as many as a stage's optimizer has.

    `used` counts, by tensor-parallel rank, the layers that earlier stages took. Tied layers come from outside that
    order: where numbers do not fit, all layers are candidates.
    """
    groups = as_list((as_dict(value.get("optimizer_state_dict")) or value).get("param_groups"))
    wanted = sum(len(as_list(as_dict(group).get("params"))) for group in groups)
    layers = [
        [(f"{name.layer}.{inner}", file.extent(tensor)) for inner, tensor in tensors_in(file.value).items()]
        for name, file in source.layers.items()
        if name.tp == rank
    ]
    trained = [
        [(name, extent) for name, extent in layer if name not in names.buffers and extent.dtype.kind == "float"]
        for layer in layers
    ]
    start = used.get(rank, 0)
    for stop in range(start, len(trained) + 1):
        taken = [item for layer in trained[start:stop] for item in layer]
        if len(taken) == wanted:
            used[rank] = stop
            return tuple(taken)
    return tuple(item for layer in trained for item in layer)

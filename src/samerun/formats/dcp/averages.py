"""Averages of a model that were saved as a list: `shadow_params` of the `EMAModel` of diffusers and of torch_ema.

DCP keeps the list's tensors under their positions, which mean the order of `model.parameters()`. An optimizer of one
group over the same parameters lists their names in that order. Without one, shapes and the usual order of registration
decide: the order of `.metadata` is not the model's once ranks have shared out what they replicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from samerun.core.state import ParamGroup
from samerun.errors import Problem
from samerun.formats.dcp.roles import ModelTensor
from samerun.formats.dcpfile.index import StoredTensor

if TYPE_CHECKING:
    from samerun.formats.statedict.stored import Stored

LIST = "shadow_params"


def find_lists(tensors: Sequence[StoredTensor]) -> dict[str, list[StoredTensor]]:
    """Returns the complete lists of averages among tensors of no model, by the dotted name of what holds each."""
    found: dict[str, dict[int, StoredTensor]] = {}
    for tensor in tensors:
        path = tensor.path
        if len(path) > 1 and path[-2] == LIST and isinstance(path[-1], int):
            found.setdefault(".".join(map(str, path[:-2])), {})[path[-1]] = tensor
    return {
        name: [items[number] for number in range(len(items))]
        for name, items in found.items()
        if items.keys() == set(range(len(items)))
    }


def name_list(
    name: str, tensors: Sequence[StoredTensor], models: Sequence[ModelTensor], groups: Sequence[ParamGroup]
) -> tuple[list[str], list[Problem]]:
    """Returns the model's names of a list of averages, `#<position>` for what fits none, and what is uncertain."""
    shapes = {model.fqn: model.item.shape for model in models if not model.average}
    params = groups[0].params if len(groups) == 1 else ()
    if len(params) == len(tensors) and all(
        shapes.get(fqn) == tensor.shape for fqn, tensor in zip(params, tensors, strict=True)
    ):
        return list(params), []
    from samerun.formats.statedict.averages import name_averages
    from samerun.formats.statedict.saved import SavedModel

    held = {model.fqn: _as_saved(model.item) for model in models if not model.average}
    saved = [SavedModel("", held, ordered=False)] if held else []
    named, problems = name_averages([(name, [_as_saved(tensor) for tensor in tensors])], saved, ())
    return list(named[0].tensors), problems


def _as_saved(tensor: StoredTensor) -> Stored:
    from samerun.formats.statedict.stored import Stored

    return Stored(tensor.shape, tensor.dtype, tensor.tiling, ())

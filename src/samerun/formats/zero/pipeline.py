"""What a pipeline's files say of its stages: which tensors each layer's file holds, and what each stage trained."""

from __future__ import annotations

from samerun.core.state import Pipeline, normalize_fqn
from samerun.formats.deepspeed.model import extras_in
from samerun.formats.deepspeed.model_tensors import Names, layer_tensors
from samerun.formats.zero.groups import stage_orders
from samerun.formats.zero.source import Source


def read_pipeline(source: Source, names: Names) -> Pipeline | None:
    """Returns the stages of a pipeline.

    None for anything else, where tensor parallelism cuts the layers, where they hold more than tensors, and at stage 0,
    whose optimizers have no names.
    """
    if not source.layers or source.degrees.tp > 1 or source.stage == 0:
        return None
    if any(extras_in(file.value) for file in source.layers.values()):
        return None
    layers: dict[int, dict[str, str]] = {name.layer or 0: {} for name in source.layers}
    for held in layer_tensors(source, names):
        layers[held.layer][held.inner] = normalize_fqn(held.name)
    stages = [tuple(name for group in order for name in group) for order in stage_orders(source)]
    return Pipeline(layers, tuple(stages)) if len(stages) == source.degrees.pp else None

"""Megatron-FSDP's encoding (fsdp_dtensor): plain DCP with DTensors, read from its description (megatron.core 0.16).

The state dict is saved as it is nested: `model.<name>`, `optimizer.state.<name>.<slot>`, and hyperparameters per
parameter instead of per group, `optimizer.param_to_group_meta.<name>.<setting>`. No checkpoint of a real run was at
hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samerun.core.state import ParamGroup, Role, TensorKey, normalize_fqn
from samerun.formats.dcpfile.index import StoredTensor
from samerun.formats.mcore.held import Collector
from samerun.formats.megatron.optimizer import OptimizerState, slot_key
from samerun.formats.megatron.source import Source

_META = "param_to_group_meta"


def is_fsdp(source: Source) -> bool:
    """Whether a directory without Megatron's own files holds a nested state dict of a model and its optimizer."""
    return not source.backend and not source.common and any(t.path[0] == "model" for t in source.index.tensors)


def read_fsdp(source: Source, collector: Collector) -> tuple[OptimizerState, tuple[ParamGroup, ...]]:
    """Files every tensor under its key and returns the groups that per-parameter settings make up."""
    state = OptimizerState(encodings={"fsdp_dtensor"})
    models: list[StoredTensor] = []
    trained: set[str] = set()
    for tensor in source.index.tensors:
        path = tuple(map(str, tensor.path))
        if path[0] == "model" and len(path) > 1:
            models.append(tensor)
        elif path[:2] == ("optimizer", "state") and len(path) == 4:
            fqn = normalize_fqn(path[2])
            trained.add(fqn)
            collector.add_stored(slot_key(path[3], fqn), tensor)
    for tensor in models:
        fqn = normalize_fqn(".".join(map(str, tensor.path[1:])))
        role = Role.BUFFER if trained and fqn not in trained else Role.PARAM
        collector.add_stored(TensorKey(role, fqn), tensor, inferred=not trained)
    return state, _groups(source)


def _groups(source: Source) -> tuple[ParamGroup, ...]:
    settings: dict[str, dict[str, Any]] = {}
    for shards in source.shards.values():
        for shard in shards:
            path = tuple(map(str, shard.item.path))
            if path[:2] == ("optimizer", _META) and len(path) > 3:
                settings.setdefault(normalize_fqn(path[2]), {})[".".join(path[3:])] = source.value(shard)
    return tuple(ParamGroup(tuple(names), group) for names, group in _alike(settings))


def _alike(settings: Mapping[str, dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    found: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, group in settings.items():
        found.setdefault(repr(sorted(group.items())), ([], group))[0].append(name)
    return list(found.values())

"""Which ranks wrote a DCP directory, as far as the files show. DCP records no world size: it is inferred, and said so.

The world size comes from the ranks in file names. The layout comes from how tensors are cut: FSDP cuts every parameter
along its first dimension; tensor parallelism cuts some along a later one and leaves norms whole; pipeline stages hold
layers that other ranks lack; what is left over are replicas. Where that is not conclusive, no layout is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from samerun.core.mesh import AXES, Layout
from samerun.core.state import Role, TensorEntry, Topology
from samerun.formats.dcpfile.files import ranks_of
from samerun.formats.dcpfile.index import NOWHERE, Index, StoredTensor

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)\.")
_FEWEST_PER_LAYER = 3
_TENSORS_LOOKED_AT = 1_024


def find_topology(
    index: Index, tensors: Mapping[str, TensorEntry], stored: Mapping[str, StoredTensor], tree: Mapping[str, Any]
) -> Topology:
    """Returns the world size and, where it is recorded in an object or can be concluded, the layout."""
    ranks = ranks_of(index.files)
    if not ranks:
        return Topology()
    world_size = ranks[-1] + 1
    recorded = _recorded(tree)
    if recorded is not None and recorded[1].world_size >= world_size:
        name, layout = recorded
        return Topology(world_size=layout.world_size, layout=layout, inferred=f"from the saved object {name}")
    layout = _infer_layout(world_size, _trained(tensors, stored), index)
    how = "from the ranks in the names of data files"
    return Topology(
        world_size=world_size,
        layout=layout,
        inferred=how if layout is None else f"{how} and from how tensors are cut",
    )


def _trained(tensors: Mapping[str, TensorEntry], stored: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    """Returns parameters that the optimizer knows, and its moments; all parameters where there is no optimizer.

    Of very many, some thousand spread over all.
    """
    kept = [
        stored[key]
        for key, entry in tensors.items()
        if key in stored
        and (entry.key.role is Role.OPTIM or (entry.key.role is Role.PARAM and not entry.role_inferred))
    ]
    found = kept or [stored[key] for key, entry in tensors.items() if entry.key.role is Role.PARAM and key in stored]
    return found[:: max(1, -(-len(found) // _TENSORS_LOOKED_AT))]


def _recorded(tree: Mapping[str, Any]) -> tuple[str, Layout] | None:
    """Finds a layout that the run itself saved: `layout` in its configuration or progress, as text or as axes."""
    for section in ("config", "layout", "mesh", "topology", "parallel", "progress", "train_state"):
        node = tree.get(section)
        name = section
        if isinstance(node, dict) and "layout" in node:
            node, name = node["layout"], f"{section}.layout"
        elif isinstance(node, dict) and not set(node) <= {*AXES, "ep"}:
            continue
        try:
            if isinstance(node, str):
                return name, Layout.parse(node)
            if isinstance(node, dict) and node:
                return name, Layout.from_dict(node)
        except ValueError:
            continue
    return None


def _infer_layout(world_size: int, model: list[StoredTensor], index: Index) -> Layout | None:
    cuts = [cut for tensor in model if (cut := _cuts(tensor)) is not None]
    if not cuts:
        return None
    tp = max((int(np.prod(cut[1:])) for cut in cuts), default=1)
    if tp > 1:
        dp_shard = max(cut[0] for cut in cuts if int(np.prod(cut[1:])) > 1)
    else:
        dp_shard = max(cut[0] for cut in cuts)
        if dp_shard > 1 and not _all_cut(model, dp_shard):
            return None
    pp = _num_stages(world_size, model, index)
    left, rest = divmod(world_size, tp * dp_shard * pp)
    if rest or left < 1:
        return None
    return Layout(pp=pp, dp_replicate=left, dp_shard=dp_shard, tp=tp)


def _cuts(tensor: StoredTensor) -> list[int] | None:
    """Returns into how many parts each dimension is cut; None for scalars and tensors without values."""
    filled = (tensor.tiling.sizes > 0).all(axis=1)
    if not tensor.shape or not bool(filled.any()):
        return None
    return [len(np.unique(tensor.tiling.offsets[filled, d])) for d in range(len(tensor.shape))]


def _all_cut(model: list[StoredTensor], parts: int) -> bool:
    """Whether every parameter that is long enough is cut along its first dimension, as FSDP does."""
    long = [cut for tensor in model if tensor.shape and tensor.shape[0] >= parts and (cut := _cuts(tensor))]
    return all(cut[0] > 1 for cut in long)


def _num_stages(world_size: int, model: Iterable[StoredTensor], index: Index) -> int:
    """Returns the number of pipeline stages: groups of ranks that hold disjoint, contiguous ranges of layers."""
    file_rank = [next(iter(ranks_of([name])), -1) for name in index.files]
    ranks_by_layer: dict[int, set[int]] = {}
    tensors_by_layer: dict[int, int] = {}
    for tensor in model:
        match = _LAYER.search(tensor.name)
        if match:
            layer = int(match.group(1))
            rows = tensor.rows[tensor.rows != NOWHERE]
            held = {file_rank[number] for number in index.places.file[rows].tolist()}
            ranks_by_layer.setdefault(layer, set()).update(held)
            tensors_by_layer[layer] = tensors_by_layer.get(layer, 0) + 1
    if len(ranks_by_layer) < 2 or min(tensors_by_layer.values()) < _FEWEST_PER_LAYER:
        return 1
    stages: list[set[int]] = []
    for layer in sorted(ranks_by_layer):
        held = ranks_by_layer[layer]
        if stages and stages[-1] & held:
            stages[-1] |= held
        elif any(stage & held for stage in stages):
            return 1
        else:
            stages.append(set(held))
    return len(stages) if world_size % len(stages) == 0 else 1

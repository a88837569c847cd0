"""Logical states made by hand: names, shapes and types, without bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from samerun.core.dtype import DTYPES
from samerun.core.mesh import Layout
from samerun.core.state import (
    LogicalState,
    ParamGroup,
    RecordedProgress,
    Role,
    TensorEntry,
    TensorKey,
    Tiling,
    Topology,
)

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (101, 30),
    "layers.0.attn.weight": (90, 30),
    "layers.0.mlp.up.weight": (78, 30),
    "layers.0.mlp.up.bias": (78,),
    "layers.0.norm.weight": (30,),
    "layers.1.attn.weight": (90, 30),
    "layers.1.mlp.up.weight": (78, 30),
    "layers.1.mlp.up.bias": (78,),
    "layers.1.norm.weight": (30,),
    "gate.weight": (3, 30),
    "norm.weight": (30,),
}


def rows(shape: tuple[int, ...], shards: int) -> Tiling:
    """Returns the tiling into row chunks that FSDP2 makes."""
    if not shape:
        return Tiling.whole(shape)
    chunk = -(-shape[0] // shards)
    starts = np.minimum(np.arange(shards) * chunk, shape[0])
    sizes = np.minimum(starts + chunk, shape[0]) - starts
    offsets = np.zeros((shards, len(shape)), np.int64)
    extents = np.tile(np.array(shape, np.int64), (shards, 1))
    offsets[:, 0], extents[:, 0] = starts, sizes
    return Tiling(offsets, extents)


def tensor(key: str, shape: tuple[int, ...], dtype: str = "float32", *, shards: int = 1, aliases: Any = ()) -> Any:
    """Returns one entry."""
    parsed = TensorKey.parse(key)
    return TensorEntry(parsed, shape, DTYPES[dtype], rows(shape, shards), parsed.fqn, tuple(aliases))


def adam_state(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    *,
    frozen: tuple[str, ...] = (),
    dtype: str = "float32",
    shards: int = 4,
    **changes: Any,
) -> LogicalState:
    """Returns the state of a run at update 12 under AdamW, saved by `shards` FSDP2 ranks."""
    entries = [tensor(f"param:{fqn}", shape, dtype, shards=shards) for fqn, shape in shapes.items()]
    for fqn, shape in shapes.items():
        if fqn not in frozen:
            entries += [
                tensor(f"optim.{slot}:{fqn}", shape, dtype, shards=shards) for slot in ("exp_avg", "exp_avg_sq")
            ]
            entries.append(tensor(f"optim.step:{fqn}", ()))
    entries.append(tensor("buffer:scale", (7,)))
    state = LogicalState(
        format="dcp",
        tensors={str(entry.key): entry for entry in entries},
        groups=(ParamGroup(tuple(shapes), {"lr": 1e-3, "decoupled_weight_decay": True}),),
        progress=RecordedProgress(update=12, samples=384, tokens=24000, epoch=0),
        scheduler={"last_epoch": 12, "base_lrs": [1e-3]},
        rng={f"rng.{rank}": b"" for rank in range(shards)},
        topology=Topology(world_size=shards, layout=Layout(dp_shard=shards), inferred="file names"),
        written_by={"torch": "2.13.0"},
    )
    return replace(state, **changes)


def without(state: LogicalState, *roles: Role) -> LogicalState:
    """Returns the state without the tensors of these roles."""
    kept = {key: entry for key, entry in state.tensors.items() if entry.key.role not in roles}
    return replace(state, tensors=kept)

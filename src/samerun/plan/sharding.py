"""How the destination's job shards its state: what a plan's memory is estimated by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from samerun.core.state import LogicalState
from samerun.manifest.models import Manifest

_DEEPSPEED_FORMATS = ("zero", "universal")
_MEGATRON_FORMATS = ("megatron", "megatron-legacy")
_MAY_WRAP_DEEPSPEED = ("huggingface", "accelerate", "lightning")
_DISTRIBUTED_OPTIMIZER = 1
_WHOLE_PARAMETERS = 2
_SHARDED_PARAMETERS = 3


def recorded_stage(state: LogicalState) -> int | None:
    """Returns the stage of ZeRO in the DeepSpeed configuration that a checkpoint holds, None if it holds none."""
    config = state.objects.get("ds_config")
    zero: Any = cast("Mapping[Any, Any]", config).get("zero_optimization") if isinstance(config, Mapping) else None
    stage: Any = cast("Mapping[Any, Any]", zero).get("stage") if isinstance(zero, Mapping) else zero
    return int(stage) if isinstance(stage, int) and 0 <= stage <= _SHARDED_PARAMETERS else None


def destination_stage(
    state: LogicalState, *, framework: str | None, written: str | None, declared: int | None = None
) -> int | None:
    """Returns the stage of ZeRO that the destination's ranks hold their state like, None for FSDP2 and DDP.

    Args:
        state: the checkpoint's logical state.
        framework: what trains the run (`run.framework`).
        written: the format that the destination loads: `convert.to`, else the checkpoint's own.
        declared: what the manifest says itself (`destination.stage`).
    """
    if declared is not None:
        return declared
    if framework == "megatron" or written in _MEGATRON_FORMATS:
        return _DISTRIBUTED_OPTIMIZER
    recorded = recorded_stage(state)
    if framework == "deepspeed" or written in _DEEPSPEED_FORMATS:
        held = state.topology.layout
        sharded = held is not None and held.dp_shard > 1 and state.format not in _DEEPSPEED_FORMATS
        return recorded if recorded is not None else _SHARDED_PARAMETERS if sharded else _WHOLE_PARAMETERS
    return recorded if framework in _MAY_WRAP_DEEPSPEED and written in _MAY_WRAP_DEEPSPEED else None


def manifest_stage(manifest: Manifest, state: LogicalState) -> int | None:
    """Returns `destination_stage` of a whole manifest."""
    written = manifest.convert.to if manifest.convert is not None else manifest.run.format
    return destination_stage(
        state, framework=manifest.run.framework, written=written, declared=manifest.destination.stage
    )

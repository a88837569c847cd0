"""A model state file as typed data: what belongs to DeepSpeed, and what the training script added (client state)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samerun.formats.deepspeed.names import FileName
from samerun.formats.deepspeed.states import StateFile, as_count, as_dict, as_list, as_shape
from samerun.formats.torchfile import TensorRef

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

# Keys that DeepSpeed itself writes (0.19.8, DeepSpeedEngine._common_checkpoint_state and around it). All others were
# given to `save_checkpoint(client_state=...)`.
OWN_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers", "autoep_layers",
    "universal_checkpoint_info", "folding", "csr_tensor_module_names", "samerun_param_groups",
})  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ModelStates:
    """One model state file.

    `groups` are the flattened parameters with their shapes, in flattened order, one entry per group (stages 1 and 2) or
    sub-group (stage 3); None where the file lists none. `module` is None where a pipeline keeps it in layer files.
    """

    name: FileName
    file: StateFile
    value: Mapping[str, Any]
    module: Mapping[str, TensorRef] | None
    groups: tuple[Shapes, ...] | None
    buffers: frozenset[str]
    frozen: Mapping[str, tuple[int, ...]]
    fragments: Mapping[str, TensorRef]
    shared: Mapping[str, str]
    client: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def count(self, key: str) -> int | None:
        """Returns a counter, None if the file does not hold it."""
        return as_count(self.value.get(key))

    @property
    def config(self) -> dict[Any, Any]:
        """The DeepSpeed configuration that the run was started with."""
        return as_dict(self.value.get("ds_config"))

    @property
    def parallel_info(self) -> dict[Any, Any]:
        """How tensors were cut over tensor-parallel ranks, where recorded (`universal_checkpoint_info`)."""
        return as_dict(self.value.get("universal_checkpoint_info"))


def read_model(name: FileName, file: StateFile) -> ModelStates:
    """Sorts the content of a model state file. Anything malformed is treated as absent."""
    value = as_dict(file.value)
    module = value.get("module")
    shapes = value.get("param_shapes")
    return ModelStates(
        name,
        file,
        value,
        tensors_in(module) if isinstance(module, dict) else None,
        tuple(_shapes(group) for group in as_list(shapes)) if isinstance(shapes, list) else None,
        frozenset(str(item) for item in as_list(value.get("buffer_names"))),
        dict(_shapes(value.get("frozen_param_shapes"))),
        tensors_in(value.get("frozen_param_fragments")),
        {str(alias): str(owner) for alias, owner in as_dict(value.get("shared_params")).items()},
        {str(key): item for key, item in value.items() if key not in OWN_KEYS},
    )


def tensors_in(value: Any) -> dict[str, TensorRef]:
    """Returns the tensors of a flat state dict by name, in order."""
    return {str(name): item for name, item in as_dict(value).items() if isinstance(item, TensorRef)}


def extras_in(value: Any) -> dict[str, Any]:
    """Returns what a state dict holds beside tensors (`get_extra_state` of a module, usually)."""
    return {str(name): item for name, item in as_dict(value).items() if not isinstance(item, TensorRef)}


def _shapes(group: Any) -> Shapes:
    found = [(str(name), as_shape(shape)) for name, shape in as_dict(group).items()]
    return tuple((name, shape) for name, shape in found if shape is not None)


def shared_storage(module: Mapping[str, TensorRef]) -> dict[str, str]:
    """Returns tied names by alias, from tensors that are the same view of one storage of the file; the first owns."""
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in module.items():
        if 0 in tensor.shape:
            continue
        identity = (tensor.storage, tensor.offset_elements, tensor.shape, tensor.strides)
        owner = first.setdefault(identity, name)
        if owner != name:
            ties[name] = owner
    return ties


def stage_of(config: Mapping[Any, Any]) -> int | None:
    """Returns the ZeRO stage that a configuration asks for, None if it does not say."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        return int(zero)
    return as_count(as_dict(zero).get("stage"))


def enabled(config: Mapping[Any, Any], *names: str) -> bool:
    """Returns whether a section such as `bf16` or `fp16` is switched on, under any of its names."""
    return any(as_dict(config.get(name)).get("enabled") is True for name in names)

"""What a rank says about itself in its trace's header: versions, numerics, and the mesh as its tensors show it."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samerun import __version__
from samerun.core.mesh import AXES, Layout
from samerun.train.agree import world
from samerun.train.named import as_list, named_parameters

if TYPE_CHECKING:
    from torch import nn

# Settings that change numbers or their order, and that people set outside the script.
_VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "MKL_NUM_THREADS", "MKL_CBWR"),
)


def versions() -> dict[str, str]:
    """Returns the versions that a result may depend on."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "samerun": __version__}
    for name, version in (("cuda", torch.version.cuda), ("hip", getattr(torch.version, "hip", None))):
        if version:
            found[name] = str(version)
    return found


def environment(model: nn.Module | Sequence[nn.Module]) -> dict[str, Any]:
    """Returns what decides which kernels run, in which precision and in which order."""
    import torch
    import torch.distributed as dist

    parameters = list(named_parameters(model).values())
    first = parameters[0] if parameters else torch.empty(0)
    device = first.device
    facts: dict[str, Any] = {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "host": platform.node(),
        "dtype": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "autocast": torch.is_autocast_enabled(device.type),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "compiled": any(
            type(module).__name__ == "OptimizedModule" for part in as_list(model) for module in part.modules()
        ),
        "backend": str(dist.get_backend()) if world()[1] > 1 else None,
        "attention": {  # the switches are called cuda's and hold for the CPU's kernels too
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
        },
        "mkldnn": torch.backends.mkldnn.enabled,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if device.type == "cuda":
        facts["tf32"] = {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32}
        facts["cudnn"] = {
            "benchmark": torch.backends.cudnn.benchmark,
            "deterministic": torch.backends.cudnn.deterministic,
        }
    return facts


def dealt_batch(sampler: Any) -> dict[str, Any] | None:
    """Returns how a sampler deals the global batch, or None for one that does not say."""
    dealing = getattr(sampler, "dealing", None)
    if dealing is None:
        return None
    return {
        "global_batch": sampler.global_batch,
        "max_microbatch": sampler.max_microbatch,
        "passes": dealing.passes,
        "replicas": dealing.replicas,
        "replica": sampler.replica,
        "microbatches": [list(row) for row in dealing.microbatches],
    }


def observed_layout(model: nn.Module | Sequence[nn.Module], declared: Layout | None) -> dict[str, int]:
    """Returns the ranks along each axis as the model's tensors show them.

    Mesh axes that have samerun's names count as they are. What tensors do not show is taken from `declared`, and what
    then is left of the world is data parallelism: sharded if tensors are cut along a mesh without names, replicated
    otherwise.
    """
    seen = {name: size for mesh in _meshes(model) for name, size, _ in _named_axes(mesh)}
    if replicas := _ddp_replicas(model):
        seen["dp_replicate"] = replicas
    world_size = world()[1]
    axes = seen if declared is None or _ranks(seen) == world_size else {**declared.to_dict(), **seen}
    if declared is None and (rest := world_size // max(1, _ranks(axes))) > 1:
        unnamed = any(mesh.mesh_dim_names is None for mesh in _meshes(model))
        axis = "dp_shard" if unnamed else "dp_replicate"
        axes[axis] = axes.get(axis, 1) * rest
    return {name: size for name, size in axes.items() if size != 1} or {"dp_shard": 1}


def _ranks(axes: Mapping[str, int]) -> int:
    return math.prod(size for name, size in axes.items() if name in AXES)


def observed_coordinate(model: nn.Module | Sequence[nn.Module], layout: Mapping[str, int]) -> dict[str, int]:
    """Returns this rank's place along every axis: from its meshes where they name the axis, else by rank number."""
    rank, world_size = world()
    whole = Layout.from_dict(layout)
    coordinate = whole.coordinate(rank) if whole.world_size == world_size else dict.fromkeys(AXES, 0)
    return coordinate | {name: place for mesh in _meshes(model) for name, _, place in _named_axes(mesh)}


def _meshes(model: nn.Module | Sequence[nn.Module]) -> list[Any]:
    found: dict[int, Any] = {}
    for parameter in named_parameters(model).values():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.get_coordinate() is not None:
            found.setdefault(hash(mesh), mesh)
    return list(found.values())


def _named_axes(mesh: Any) -> Iterator[tuple[str, int, int]]:
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        if name in AXES:
            yield name, mesh.size(dim), mesh.get_coordinate()[dim]


def _ddp_replicas(model: nn.Module | Sequence[nn.Module]) -> int | None:
    for part in as_list(model):
        for module in part.modules():
            if type(module).__name__ == "DistributedDataParallel":
                return int(module.process_group.size())
    return None

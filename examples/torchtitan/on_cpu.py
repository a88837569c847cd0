"""What torchtitan lacks on a machine without GPUs: imported there only, and before torchtitan is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def use_cpu() -> None:
    """Makes torchtitan run on CPUs over gloo: it takes the device from torch when it is imported."""
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(cpu, name, lambda: None)
    cpu.memory_stats = lambda device=None: {}

    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import fsdp
    from torchtitan.distributed import utils as distributed

    distributed.set_pg_timeouts = lambda timeout, parallel_dims: None
    divides = fsdp.disable_fsdp_gradient_division

    def only_add(model: Any) -> None:
        """Gloo can add gradients, and no more."""
        divides(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = only_add


use_cpu()

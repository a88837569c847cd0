"""What megatron.core lacks on a machine without GPUs; imported there only, and before anything of megatron is.

megatron.core asks for CUDA devices, streams and random numbers by name. `use_cpu` answers with those of the CPU, and
puts an element-wise twin of Apex's FusedAdam, whose kernel runs on GPUs only, in its place.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Puts on the CPU whatever asks for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # Megatron compares names of types
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, as Apex's kernel computes it: the step is kept per group."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, adam_w_mode: bool = True
    ) -> None:
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay")
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                spread = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                parameter.sub_(group["lr"] * (mean / spread + group["weight_decay"] * parameter))


def norm_over_parts(make: Any, kind: Any, config: Any, *rest: Any, **named: Any) -> Any:
    """Makes torch's norm as those of Apex and Transformer Engine are: fit for sequence parallelism.

    Each rank sees a part of the positions, and megatron.core adds up the gradients of weights that are marked so.
    """
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = make(kind, plain, *rest, **named)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def use_cpu() -> OnCpu:
    """Makes megatron.core run on CPUs from now on, in this process, until the mode that it returns is left."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *arguments, **named: None)
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *device, **named: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *device: torch.set_rng_state(state)
    mode = OnCpu()
    mode.__enter__()

    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    make_norm = torch_norm.WrappedTorchNorm.__new__
    torch_norm.WrappedTorchNorm.__new__ = partial(norm_over_parts, make_norm)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks for it where there is no Transformer Engine
        moe_utils.te_general_gemm = None
    random._set_cuda_rng_state = lambda state, *device, **named: torch.set_rng_state(state)
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    return mode

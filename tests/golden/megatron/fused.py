"""The optimizer that megatron.core uses on GPUs, where it keeps one step per group, element for element on the CPU."""

from __future__ import annotations

import torch


class ElementwiseAdam(torch.optim.Optimizer):
    """Apex's FusedAdam, element for element, on the CPU: its kernel runs on GPUs only. The step is kept per group."""

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode=True, **_):
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["exp_avg"].mul_(first).add_(param.grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                spread = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                param.sub_(group["lr"] * (mean / spread + group["weight_decay"] * param))


def use_fused_adam() -> None:
    """Makes megatron.core take the path that it takes on GPUs, where the step is no tensor of each parameter."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = ElementwiseAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True

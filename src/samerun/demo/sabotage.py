"""Runs a training script with one fault in it: `python -m samerun.demo.sabotage FAULT train.py ARGUMENT...`

The script itself is not changed. The fault sits in the libraries that it calls, where a wrong version, a wrong flag or
an innocent edit would put it. Runs on every rank of the job.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any


def _after_load(then: Callable[[Any, Any], None]) -> None:
    """Lets `then(model, optimizer)` happen right after torch has put a state dict into both."""
    import torch.distributed.checkpoint.state_dict as state_dict

    original = state_dict.set_state_dict

    def set_state_dict(model: Any, optimizers: Any, **rest: Any) -> Any:
        result = original(model, optimizers, **rest)
        then(model, optimizers[0] if isinstance(optimizers, list | tuple) else optimizers)
        return result

    state_dict.set_state_dict = set_state_dict


def _local(tensor: Any) -> Any:
    """Returns the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def reset_optimizer() -> None:
    """The optimizer forgets everything it was given."""
    _after_load(lambda model, optimizer: optimizer.state.clear())


def restart_sampler() -> None:
    """The sampler ignores the position that it is given."""
    from samerun.train.sampler import ElasticSampler

    ElasticSampler.load_state_dict = lambda self, state: None  # type: ignore[method-assign, assignment]


def step_scheduler_once_more() -> None:
    """The schedule is stepped once right after it was restored."""
    from torch.optim.lr_scheduler import LambdaLR

    original = LambdaLR.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        self.optimizer._opt_called = True
        self.step()

    LambdaLR.load_state_dict = load_state_dict


def double_learning_rate() -> None:
    """The restored schedule has twice the base rate."""
    from torch.optim.lr_scheduler import LambdaLR

    original = LambdaLR.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        self.base_lrs = [2 * rate for rate in self.base_lrs]
        for group in self.optimizer.param_groups:
            group["lr"] *= 2

    LambdaLR.load_state_dict = load_state_dict


def _nudge(model: Any, amount: float) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and _local(parameter).numel():
                _local(parameter).view(-1)[0] += amount
                return


def diverge_replica() -> None:
    """The upper half of the ranks, which is the second replica, gets one weight wrong in its sixth digit."""

    def nudge(model: Any, optimizer: Any) -> None:
        if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]) // 2:
            _nudge(model, 1e-6)

    _after_load(nudge)


def make_weight_nan() -> None:
    """The first weight of rank 0 is not a number."""

    def nudge(model: Any, optimizer: Any) -> None:
        if int(os.environ["RANK"]) == 0:
            _nudge(model, float("nan"))

    _after_load(nudge)


def make_gradient_nan() -> None:
    """In the third update one gradient is not a number."""
    import torch

    original = torch.optim.AdamW.step
    calls = 0

    def step(self: Any, *args: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            first = next(p for g in self.param_groups for p in g["params"] if p.grad is not None and p.requires_grad)
            _local(first.grad).fill_(float("nan"))
        return original(self, *args, **rest)

    torch.optim.AdamW.step = step


SABOTAGE: dict[str, Callable[[], None]] = {
    "optimizer-reset": reset_optimizer,
    "sampler-restart": restart_sampler,
    "scheduler-ahead": step_scheduler_once_more,
    "learning-rate-doubled": double_learning_rate,
    "replica-diverged": diverge_replica,
    "weight-nan": make_weight_nan,
    "gradient-nan": make_gradient_nan,
}


def main() -> None:
    """Puts the fault in, then runs the script as if it had been started directly."""
    fault, script = sys.argv[1:3]
    SABOTAGE[fault]()
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

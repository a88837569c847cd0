"""Runs the example training script with one fault in it, named in `fault.txt` beside this file: `faulty.py ARGUMENT...`

Copied into a test's workspace, where the launch command of its manifest starts it. The faults are those that loading
cannot show; they are put into the libraries that the script calls, never into what is recorded.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLE = Path((HERE / "example.txt").read_text().strip())


def stretch_gradient() -> None:
    """Every gradient is a ten-thousandth too long."""
    import torch

    original = torch.nn.utils.clip_grad_norm_

    def clip(parameters: Any, *rest: Any, **named: Any) -> Any:
        every = list(parameters)
        for parameter in every:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0001)
        return original(every, *rest, **named)

    torch.nn.utils.clip_grad_norm_ = clip


def step_schedule_twice() -> None:
    """The scheduler is stepped twice per update."""
    from torch.optim.lr_scheduler import LambdaLR

    original = LambdaLR.step

    def step(self: Any, *rest: Any) -> None:
        original(self, *rest)
        if self.optimizer.state and self.last_epoch > 12:
            original(self, *rest)

    LambdaLR.step = step


def decay_a_little_more() -> None:
    """After the first update weight decay is a millionth more than was saved, which no norm shows."""
    from torch.optim.lr_scheduler import LambdaLR

    original = LambdaLR.step

    def step(self: Any, *rest: Any) -> None:
        original(self, *rest)
        if self.last_epoch == 13:
            for group in self.optimizer.param_groups:
                group["weight_decay"] *= 1 + 1e-6

    LambdaLR.step = step


def skip_an_update() -> None:
    """The first batch that the loader hands out is thrown away."""
    from samerun.train.sampler import ElasticSampler

    order = ElasticSampler.__iter__

    def iterate(self: Any) -> Any:
        batches = order(self)
        for _ in range(self.dealing.passes):
            next(batches)
        return batches

    ElasticSampler.__iter__ = iterate


def _after_step(then: Callable[[Any, Any], None]) -> None:
    import torch

    original = torch.optim.AdamW.step

    def step(self: Any, *rest: Any, **named: Any) -> Any:
        before = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        result = original(self, *rest, **named)
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            with torch.no_grad():
                then(self, before)
        return result

    torch.optim.AdamW.step = step


def hold_a_parameter() -> None:
    """One parameter is put back after every update."""
    _after_step(lambda optimizer, before: optimizer.param_groups[1]["params"][0].copy_(before[1][0]))


def thaw_the_frozen() -> None:
    """The frozen parameter moves with every update."""
    import gc

    from torch import nn

    def move(optimizer: Any, before: Any) -> None:
        for module in gc.get_objects():
            if isinstance(module, nn.Module):
                for parameter in module.parameters(recurse=False):
                    if not parameter.requires_grad:
                        parameter.mul_(1.001)

    _after_step(move)


def draw_while_evaluating() -> None:
    """The model draws a random number in every forward pass without gradients."""
    import torch
    from torch import nn

    original = nn.Module.__call__

    def call(self: Any, *rest: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            torch.rand(1)
        return original(self, *rest, **named)

    nn.Module.__call__ = call


def write_into_the_checkpoint() -> None:
    """Something is saved beside the checkpoint's files."""
    if os.environ.get("RANK") == "0":
        Path(sys.argv[sys.argv.index("--resume") + 1], "latest").write_text("step-13")


def say_nothing() -> None:
    """A script without the recorder's lines."""
    sys.exit(0)


def fall_over() -> None:
    """The script crashes on one rank."""
    if os.environ.get("RANK") == "1":
        raise KeyError("model.head.weight")


def one_stream_for_all() -> None:
    """Every rank loads the random number state of rank 0."""
    import torch

    original = torch.set_rng_state

    def set_rng_state(state: Any) -> None:
        import torch.distributed as dist

        shared = state.clone()
        dist.broadcast(shared, 0)
        original(shared)

    torch.set_rng_state = set_rng_state


def die_at_exit() -> None:
    """Every rank aborts when the script has closed its trace and leaves."""
    import torch.distributed as dist

    dist.destroy_process_group = os.abort


def die_before_closing() -> None:
    """One rank aborts after its last update, before the script has closed its trace."""
    from samerun.train import Recorder

    close = Recorder.close

    def closing(self: Recorder) -> None:
        if os.environ["RANK"] == "1":
            os.abort()
        close(self)

    Recorder.close = closing


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "stretch-gradient": stretch_gradient,
    "step-schedule-twice": step_schedule_twice,
    "decay-a-little-more": decay_a_little_more,
    "skip-an-update": skip_an_update,
    "hold-a-parameter": hold_a_parameter,
    "thaw-the-frozen": thaw_the_frozen,
    "draw-while-evaluating": draw_while_evaluating,
    "write-into-the-checkpoint": write_into_the_checkpoint,
    "say-nothing": say_nothing,
    "fall-over": fall_over,
    "one-stream-for-all": one_stream_for_all,
    "die-at-exit": die_at_exit,
    "die-before-closing": die_before_closing,
}

if __name__ == "__main__":
    FAULTS[(HERE / "fault.txt").read_text().strip()]()
    sys.path.insert(0, str(EXAMPLE))
    sys.argv[0] = str(EXAMPLE / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")

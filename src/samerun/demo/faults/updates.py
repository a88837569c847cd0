"""Faults of the update: gradients, normalisation, clipping and the optimizer's step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samerun.demo.faults.catalog import LOW, Kind, in_job
from samerun.demo.faults.wrap import after_load, around_step, flip_last_bit, local, second_half, wrap

NUMBERS = ("SR-UPD-LOSS", "SR-UPD-GRADNORM", "SR-UPD-UPDATENORM", "SR-UPD-DELTA")


def _scale_gradients(factor: float) -> None:
    """Multiplies every gradient before it is clipped."""
    import torch

    def around(original: Any, parameters: Any, *args: Any, **rest: Any) -> Any:
        every = list(parameters)
        for parameter in every:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return original(every, *args, **rest)

    wrap(torch.nn.utils, "clip_grad_norm_", around)


@in_job("mean-of-means", Kind.NORMALISATION, "SR-UPD-LOSS", "SR-UPD-GRADNORM", "SR-UPD-TOKENS")
def average_the_averages() -> None:
    """Each rank averages over its own tokens, and the averages are averaged."""
    from samerun.train.contribution import ContributionMean

    def around(original: Any, mean: Any, num_contributions: int, **rest: Any) -> int:
        original(mean, num_contributions, **rest)
        mean._total = num_contributions * mean.replicas
        return mean._total

    wrap(ContributionMean, "start", around)


@in_job("gradient-rescaled", Kind.NORMALISATION, "SR-UPD-GRADNORM")
def divide_by_the_old_world_size() -> None:
    """Gradients are divided by the old number of ranks."""
    _scale_gradients(3 / 4)


@in_job("gradient-stretched", Kind.NORMALISATION, "SR-UPD-GRADNORM")
def stretch_gradient() -> None:
    """Every gradient is two hundredths too long."""
    _scale_gradients(1.02)


@in_job("gradient-a-thousandth", Kind.NORMALISATION, "SR-UPD-GRADNORM", precisions=LOW)
def stretch_gradient_slightly() -> None:
    """Every gradient is a thousandth too long, which bfloat16 would round away."""
    _scale_gradients(1.001)


@in_job("gradient-of-one", Kind.NORMALISATION, "SR-UPD-GRADIENT")
def stretch_one_gradient() -> None:
    """The gradient of one bias is a tenth too long, which hardly shows in the norm of the whole."""
    import torch

    chosen: list[Any] = []
    after_load(lambda model, optimizer: chosen.append(model.blocks[0].mlp.gate.bias))

    def around(original: Any, parameters: Any, *args: Any, **rest: Any) -> Any:
        for parameter in chosen:
            parameter.grad.mul_(1.1)
        return original(parameters, *args, **rest)

    wrap(torch.nn.utils, "clip_grad_norm_", around)


@in_job("clipping-lost", Kind.NORMALISATION, "SR-UPD-CLIP")
def measure_and_not_clip() -> None:
    """The gradient norm is measured and nothing is clipped."""
    import torch

    def around(original: Any, parameters: Any, limit: float, *args: Any, **rest: Any) -> Any:
        return original(parameters, float("inf"), *args, **rest)

    wrap(torch.nn.utils, "clip_grad_norm_", around)


@in_job("parameter-held", Kind.TIED, "SR-UPD-STILL")
def hold_a_parameter() -> None:
    """One trainable parameter is in no group that the optimizer steps."""

    def step(number: int, optimizer: Any, original: Callable[[], Any]) -> Any:
        held = optimizer.param_groups[1]["params"][0]
        before = held.detach().clone()
        result = original()
        held.copy_(before)
        return result

    around_step(step)


@in_job("update-turned", Kind.OPTIMIZER, "SR-UPD-DIRECTION")
def turn_an_update() -> None:
    """One tensor's first update goes the other way, as far as it should."""

    def step(number: int, optimizer: Any, original: Callable[[], Any]) -> Any:
        turned = optimizer.param_groups[0]["params"][0]
        before = turned.detach().clone()
        result = original()
        if number == 1:
            turned.copy_(2 * before - turned)
        return result

    around_step(step)


@in_job("frozen-thawed", Kind.TIED, "SR-UPD-FROZEN-MOVED")
def move_the_frozen() -> None:
    """A frozen parameter moves with every update."""
    frozen: list[Any] = []
    after_load(lambda model, optimizer: frozen.extend(p for p in model.parameters() if not p.requires_grad))

    def step(number: int, optimizer: Any, original: Callable[[], Any]) -> Any:
        for parameter in frozen:
            parameter.mul_(1.01)
        return original()

    around_step(step)


@in_job("gradient-nan", Kind.DTYPE, "SR-UPD-NONFINITE")
def make_gradient_nan() -> None:
    """A gradient overflows in the third update after the move."""

    def step(number: int, optimizer: Any, original: Callable[[], Any]) -> Any:
        if number == 3:
            first = next(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            local(first.grad).fill_(float("nan"))
        return original()

    around_step(step)


@in_job("step-skipped", Kind.OPTIMIZER, *NUMBERS, "SR-UPD-STILL", "SR-UPD-SKIPPED", "SR-LOAD-STEP")
def skip_a_step() -> None:
    """The fourth update is silently not made, as when a scaler sees an overflow."""
    around_step(lambda number, optimizer, original: None if number == 4 else original())


@in_job("replica-drifts", Kind.REPLICAS, "SR-UPD-REPLICA", layout="dp_replicate=2,dp_shard=2")
def drift_apart() -> None:
    """From the second update on, one replica rounds one weight otherwise, by its last bit."""

    def step(number: int, optimizer: Any, original: Callable[[], Any]) -> Any:
        result = original()
        if number >= 2 and second_half():
            flip_last_bit(local(optimizer.param_groups[0]["params"][0]))
        return result

    around_step(step)


@in_job("crash", Kind.JOB, "SR-JOB-FAILED")
def fall_over() -> None:
    """One rank crashes while the model is loaded."""

    def then(model: Any, optimizer: Any) -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("model.head.weight")

    after_load(then)


@in_job("writes-checkpoint", Kind.JOB, "SR-JOB-WROTE", writes=True)
def write_into_the_checkpoint() -> None:
    """The disposable job writes into the checkpoint that it was started from."""

    def then(model: Any, optimizer: Any) -> None:
        if os.environ["RANK"] == "0":
            Path(sys.argv[sys.argv.index("--resume") + 1], "latest").write_text("step-13", encoding="utf-8")

    after_load(then)

"""Faults of what is kept beside model and optimizer: the gradient scaler, and the average of the model."""

from __future__ import annotations

from typing import Any

from samerun.demo.faults.catalog import Kind, in_job
from samerun.demo.faults.wrap import local, wrap


@in_job("scaler-reset", Kind.SCALER, "SR-LOAD-OBJECT")
def forget_the_scale() -> None:
    """The gradient scaler starts at its initial scale."""
    import torch

    def around(original: Any, scaler: Any, state: Any) -> None:
        """Loads nothing."""

    wrap(torch.amp.GradScaler, "load_state_dict", around)


@in_job("scaler-counts", Kind.SCALER, "SR-LOAD-OBJECT")
def count_a_good_step() -> None:
    """A dummy step counted as one without overflow: scale and updates are right until the scale grows too early."""
    import torch

    def around(original: Any, scaler: Any, state: Any) -> None:
        original(scaler, {**state, "_growth_tracker": state["_growth_tracker"] + 1})

    wrap(torch.amp.GradScaler, "load_state_dict", around)


@in_job("average-restarted", Kind.AVERAGE, "SR-LOAD-PARAM")
def average_the_model_anew() -> None:
    """The average of the model is not restored and starts from the model; no update shows it."""
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.state_dict as state_dict

    averages: list[dict[str, Any]] = []

    def around_load(original: Any, state: Any, *args: Any, **rest: Any) -> Any:
        averages.append(state["ema"])
        return original(state, *args, **rest)

    def around_set(original: Any, model: Any, *args: Any, **rest: Any) -> Any:
        result = original(model, *args, **rest)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in averages[0]:
                    local(averages[0][name]).copy_(local(parameter))
        return result

    wrap(dcp, "load", around_load)
    wrap(state_dict, "set_state_dict", around_set)


@in_job("average-stands", Kind.AVERAGE, "SR-UPD-AVERAGE")
def average_another_model() -> None:
    """The average is restored and never updated again; losses and updates are right to the end of training."""
    import torch
    import torch.distributed.checkpoint as dcp

    averages: set[int] = set()

    def around_load(original: Any, state: Any, *args: Any, **rest: Any) -> Any:
        averages.update(id(tensor) for tensor in state["ema"].values())
        return original(state, *args, **rest)

    def around(original: Any, tensor: Any, *args: Any, **rest: Any) -> Any:
        return tensor if id(tensor) in averages else original(tensor, *args, **rest)

    wrap(dcp, "load", around_load)
    for name in ("mul_", "add_"):
        wrap(torch.Tensor, name, around)

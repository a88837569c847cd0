"""Where a fault of a job takes hold: around calls that every script makes. Needs torch only when called."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces `owner.name` by `around(original, *args, **kwargs)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **rest: Any) -> Any:
        return around(original, *args, **rest)

    setattr(owner, name, wrapped)


def after_load(then: Callable[[Any, Any], None]) -> None:
    """Lets `then(model, optimizer)` happen, without gradients, right after a state dict was put into both."""
    import torch
    import torch.distributed.checkpoint.state_dict as state_dict

    def around(original: Any, model: Any, optimizers: Any, **rest: Any) -> Any:
        result = original(model, optimizers, **rest)
        with torch.no_grad():
            then(model, optimizers[0] if isinstance(optimizers, list | tuple) else optimizers)
        return result

    wrap(state_dict, "set_state_dict", around)


def after_scheduler_load(then: Callable[[Any], None]) -> None:
    """Lets `then(scheduler)` happen right after the schedule was restored."""
    from torch.optim.lr_scheduler import LambdaLR

    def around(original: Any, scheduler: Any, state: Any) -> None:
        original(scheduler, state)
        then(scheduler)

    wrap(LambdaLR, "load_state_dict", around)


def around_step(step: Callable[[int, Any, Callable[[], Any]], Any]) -> None:
    """Calls `step(number, optimizer, original)` in place of each optimizer step after loading; `number` is 1-based.

    Steps before are those by which torch makes the empty state that a checkpoint is loaded into.
    """
    import torch

    numbers: Iterator[int] | None = None

    def begin(model: Any, optimizer: Any) -> None:
        nonlocal numbers
        numbers = itertools.count(1)

    def around(original: Any, optimizer: Any, *args: Any, **rest: Any) -> Any:
        if numbers is None:
            return original(optimizer, *args, **rest)
        with torch.no_grad():
            return step(next(numbers), optimizer, lambda: original(optimizer, *args, **rest))

    after_load(begin)
    wrap(torch.optim.AdamW, "step", around)


def local(tensor: Any) -> Any:
    """Returns the part of a tensor that this rank holds, as a view."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def flip_last_bit(values: Any) -> None:
    """Changes the first of these values, a view, by its last bit."""
    import torch

    values.view(-1).view(torch.int32 if values.element_size() == 4 else torch.int16)[0] ^= 1


def trained(model: Any) -> Iterator[Any]:
    """Yields the trainable parameters that hold values on this rank."""
    return (p for p in model.parameters() if p.requires_grad and local(p).numel())


def second_half() -> bool:
    """Whether this rank is in the upper half of the ranks."""
    return int(os.environ["RANK"]) >= (int(os.environ["WORLD_SIZE"]) + 1) // 2

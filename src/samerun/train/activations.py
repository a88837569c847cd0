"""What every module of a model gives out in one forward pass, as one number each: where two passes part can be seen."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from samerun.core.state import normalize_fqn
from samerun.train.named import as_list
from samerun.train.norms import local_part, squared_norm

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_MODULES = 4096
"""Modules watched at most. A deeper model is watched down to the level at which it has no more than these."""


@dataclass(slots=True)
class ModuleOutputs:
    """Sums over the calls of each module, in the order in which modules first gave something out. This rank's only."""

    squares: dict[str, float] = field(default_factory=dict[str, float])
    elements: dict[str, int] = field(default_factory=dict[str, int])
    projected: dict[str, float] = field(default_factory=dict[str, float])
    dtypes: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, name: str, output: Any) -> None:
        """Adds the floating-point tensors of one call's output."""
        for tensor in _tensors(output):
            self.squares[name] = self.squares.get(name, 0.0) + float(squared_norm(tensor))
            self.elements[name] = self.elements.get(name, 0) + tensor.numel()
            self.projected[name] = self.projected.get(name, 0.0) + float(squared_norm(_project(tensor)))
            self.dtypes[name] = str(tensor.dtype).removeprefix("torch.")

    def rows(self) -> list[list[Any]]:
        """Returns `[name, L2 norm, elements]` for every module."""
        return [[name, math.sqrt(square), self.elements[name]] for name, square in self.squares.items()]

    def details(self) -> dict[str, list[Any]]:
        """Returns `[L2 norm of the projected output, element type]` by module.

        The projection adds a row's features up with fixed signs. Features in another order have the same norm and
        another projection.
        """
        return {name: [math.sqrt(square), self.dtypes[name]] for name, square in self.projected.items()}


@contextmanager
def watch_modules(model: nn.Module | Sequence[nn.Module]) -> Generator[ModuleOutputs]:
    """Watches the modules' outputs through forward hooks, which are taken off at the end. Local, no communication.

    A compiled module is not looked into: a hook inside would compile it anew.
    """
    outputs = ModuleOutputs()
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            outputs.note(name, output)

        return note

    try:
        for part in as_list(model):
            handles += [module.register_forward_hook(hook(name)) for name, module in _watched(part)]
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _watched(model: nn.Module) -> list[tuple[str, nn.Module]]:
    named = [
        (normalize_fqn(name), module)
        for name, module in model.named_modules()
        if name and "_orig_mod" not in name.split(".") and not hasattr(module, "_orig_mod")
    ]
    named = [(name, module) for name, module in named if name]
    depth = max((name.count(".") for name, _ in named), default=0)
    while len(named) > MOST_MODULES and depth > 0:
        depth -= 1
        named = [(name, module) for name, module in named if name.count(".") <= depth]
    return named


def _project(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    if not wide.ndim:
        return wide
    signs = torch.arange(wide.shape[-1], device=wide.device).mul_(0x9E3779B1).bitwise_right_shift_(16).bitwise_and_(1)
    return wide @ (1 - 2 * signs).to(wide.dtype)


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    import torch

    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.numel():
            yield local_part(output)
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)

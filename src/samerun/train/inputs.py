"""What a model is given in one update, as one number that does not depend on how its samples were dealt.

Each sample (row of an input's first dimension) has a digest of its own, and those of all passes and ranks add up modulo
2**64. Two runs that were given the same samples in other portions and another order have the same sum, unless their
loaders pad a sample to the longest one beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samerun.core.digest import MASK, STRIDE, to_hex
from samerun.train.digest import as_integers, mixed, signed, widened
from samerun.train.named import as_list
from samerun.train.norms import local_part

if TYPE_CHECKING:
    import torch
    from torch import nn


class InputWatch:
    """Adds up what the model is given while it trains, until `take`. Local, no communication.

    Args:
        model: the model, or this rank's pipeline stages, of which only the first is given samples.
        whole: whether this rank holds the whole model from its inputs on. Numbers that are not whole (pixels, waves)
            are looked at only then: a later pipeline stage is given activations.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], *, whole: bool = True) -> None:
        self._whole = whole
        self._rows = 0
        self._sum: torch.Tensor | None = None
        self._autocast: str | None = None
        first = as_list(model)[0]
        compiled = hasattr(first, "_orig_mod") or getattr(first, "_compiled_call_impl", None) is not None
        register: Any = getattr(first, "register_forward_pre_hook", None)  # a bridge's stand-in for a model has none
        self._handle = None if compiled or register is None else register(self._note, with_kwargs=True, prepend=True)

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        import torch

        if not module.training or not torch.is_grad_enabled():
            return
        rows = 0
        self._autocast = self._autocast or _autocast_type(module)
        for place, tensor in _tensors({**{str(i): item for i, item in enumerate(arguments)}, **named}):
            if tensor.ndim and tensor.numel() and (self._whole or not tensor.is_floating_point()):
                total = _sum_of_rows(tensor, place).cpu()
                self._sum = total if self._sum is None else self._sum + total
                rows = max(rows, len(tensor))
        self._rows += rows

    def take(self) -> dict[str, Any] | None:
        """Returns {"rows", "digest"} of what was given since the beginning, or None for nothing, and stops watching.

        Where the forward pass ran under autocast, "autocast" is the type that it computes in.
        """
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._sum is None:
            return None
        found = {"rows": self._rows, "digest": to_hex(int(self._sum.item()) & MASK)}
        self._sum = None
        return found if self._autocast is None else {**found, "autocast": self._autocast}


def _autocast_type(module: nn.Module) -> str | None:
    """Returns the type that autocast computes in around this forward pass, or None where it is off."""
    import torch

    parameter = next(module.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _tensors(named: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for place, value in named.items():
        if isinstance(value, torch.Tensor):
            yield place, local_part(value)
        elif isinstance(value, Mapping):
            yield from _tensors({f"{place}.{name}": item for name, item in value.items()})
        elif isinstance(value, tuple | list):
            yield from _tensors({f"{place}.{number}": item for number, item in enumerate(value)})


def _sum_of_rows(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """Returns the sum, modulo 2**64, of one digest per row, of all its values."""
    import torch

    seed = sum(ord(letter) * 257**i for i, letter in enumerate(place))
    bits = widened(as_integers(tensor)).view(len(tensor), -1)
    steps = torch.arange(1, bits.shape[1] + 1, dtype=torch.int64, device=bits.device).mul_(signed(STRIDE))
    rows = mixed(bits ^ (steps + signed(seed))).sum(1)
    return mixed(rows).sum()

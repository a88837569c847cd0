"""Faults of the forward pass: right weights in a model that computes something else."""

from __future__ import annotations

from typing import Any

from samerun.demo.faults.catalog import Kind, in_job
from samerun.demo.faults.wrap import after_load, wrap

FORWARD = ("SR-EVAL-LOGITS", "SR-EVAL-LOSS", "SR-UPD-LOSS")
"""In float32 the fixed examples show it. In bfloat16 a small difference is rounding there, and the first update's loss,
over many more tokens, is what leaves its band."""


@in_job("epsilon-changed", Kind.ARCHITECTURE, *FORWARD)
def change_epsilon() -> None:
    """The norms use another epsilon."""
    from torch import nn

    def then(model: Any, optimizer: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                module.eps = 1e-3

    after_load(then)


@in_job("activation-changed", Kind.ARCHITECTURE, *FORWARD)
def change_activation() -> None:
    """The gated layers use another activation."""
    import torch.nn.functional as functional

    functional.silu = functional.gelu  # type: ignore[assignment]


@in_job("heads-interleaved", Kind.LAYOUT, *FORWARD)
def interleave_heads() -> None:
    """The rows of the query are read as interleaved heads, where they were contiguous."""

    def interleave(module: Any, args: Any, output: Any) -> Any:
        return output.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    def then(model: Any, optimizer: Any) -> None:
        for block in model.blocks:
            block.attention.query.register_forward_hook(interleave)

    after_load(then)


@in_job("mask-lost", Kind.ARCHITECTURE, *FORWARD)
def look_ahead() -> None:
    """Attention is no longer causal; the loss only looks better."""
    import torch.nn.functional as functional

    def around(original: Any, *args: Any, **rest: Any) -> Any:
        return original(*args, **{**rest, "is_causal": False})

    wrap(functional, "scaled_dot_product_attention", around)


@in_job("autocast", Kind.DTYPE, *FORWARD, precisions=("float32",))
def compute_in_bfloat16() -> None:
    """The forward pass runs under bfloat16 autocast, where it did not before."""
    import torch

    def then(model: Any, optimizer: Any) -> None:
        forward = type(model).forward

        def lower(self: Any, tokens: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(self, tokens)

        type(model).forward = lower

    after_load(then)


@in_job("draws-in-eval", Kind.RNG, "SR-EVAL-CHANGED")
def draw_while_evaluating() -> None:
    """The model draws a random number in every forward pass without gradients."""
    import torch
    from torch import nn

    def around(original: Any, *args: Any, **rest: Any) -> Any:
        if not torch.is_grad_enabled():
            torch.rand(1)
        return original(*args, **rest)

    wrap(nn.Module, "__call__", around)


@in_job("dropout-on", Kind.RNG, "SR-UPD-LOSS", "SR-UPD-GRADNORM")
def turn_dropout_on() -> None:
    """Dropout is on in training, where it was off; evaluation cannot show it."""
    from torch import nn

    def then(model: Any, optimizer: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1

    after_load(then)

"""What follows training beside the parameters, as a few numbers: an average of the model, and its buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from samerun.train.named import named_average
from samerun.train.norms import ParameterNorms, add_over_ranks

if TYPE_CHECKING:
    from torch import nn


def measure_beside(model: nn.Module | Sequence[nn.Module], average: Any) -> dict[str, Any]:
    """Returns how far the average lies from the model, and the norm of every floating-point buffer. Collective.

    `average_lag` is the L2 norm over all averaged parameters, None without an average: it shows another decay at once,
    which the average's own norm hardly does. `buffers` are those of the lowest rank that holds each.
    """
    import torch

    lag: float | None = None
    with torch.no_grad():
        if others := named_average(average):
            lag = math.sqrt(math.fsum(add_over_ranks(ParameterNorms.of(model).squared_distance(others))))
        buffers = ParameterNorms.of_buffers(model)
        squares = add_over_ranks(buffers.squared_values()) if buffers.names else []
    return {"average_lag": lag, "buffers": buffers.norms(squares, buffers.names)}

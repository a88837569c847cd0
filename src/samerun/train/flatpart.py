"""Parts of tensors as optimizers cut them that shard flat: a run of a tensor's row-major elements on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samerun.core.flat import flat_boxes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """Elements `start` and following of a tensor of `shape`, row-major: as many as the vector `local` has, or none.

    Stands in the state of an optimizer where a tensor would, and is its own shard. `lead` is the lowest rank of those
    that together hold the tensor; each of them has a part, be it empty.
    """

    shape: tuple[int, ...]
    local: torch.Tensor
    start: int
    lead: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.local.dtype

    @property
    def num_elements(self) -> int:
        """Elements that this rank holds."""
        return self.local.numel()

    def describe_cuts(self) -> list[list[Any]] | None:
        """Returns None: no axis of a mesh says how a flat tensor is cut."""
        return None

    def boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yields (global offsets, values) for each box of the part."""
        for box in flat_boxes(self.shape, self.start, self.start + self.local.numel()):
            first = box.start - self.start
            yield box.offsets, self.local[first : first + math.prod(box.sizes)].reshape(box.sizes)


def is_partitioned(parameter: Any) -> bool:
    """Whether DeepSpeed's ZeRO 3 holds a parameter: the tensor itself is empty then, and a rank has a part of it."""
    return hasattr(parameter, "ds_tensor")


def partitioned_part(parameter: Any, rank: int) -> FlatPart:
    """Returns what this rank holds of a ZeRO 3 parameter.

    Rank r has elements r x ds_numel and following of the padded tensor (deepspeed 0.19.8,
    `runtime/zero/partition_parameters.py`).
    """
    shape, part = tuple(parameter.ds_shape), parameter.ds_tensor.detach().reshape(-1)
    start = min(rank * part.numel(), math.prod(shape))
    return FlatPart(shape, part[: max(0, min(part.numel(), math.prod(shape) - start))], start)

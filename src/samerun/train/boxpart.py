"""Parts of tensors as frameworks cut them that stack and fuse: any boxes of a tensor on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from samerun.train.flatpart import FlatPart

if TYPE_CHECKING:
    import torch

Boxes = Sequence[tuple[tuple[int, ...], "torch.Tensor"]]
"""Global offsets, and values as the box is shaped."""


class BoxPart:
    """The boxes of a tensor that this rank holds, or none at all.

    Stands where a parameter or a tensor of the optimizer's state would, and is its own shard.

    Attributes:
        shape: of the whole tensor.
        dtype: the element type.
        lead: the lowest rank of those that together hold this replica of the tensor; each of them has a part, be it
            empty.
        counts: whether this rank's part counts in a sum over ranks, for a gradient that is cut otherwise than its
            parameter; None: as the parameter does.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[], Boxes],
        *,
        lead: int = 0,
        counts: bool | None = None,
    ) -> None:
        self.shape, self.dtype, self.lead, self.counts = shape, dtype, lead, counts
        self._read = read

    @property
    def local(self) -> torch.Tensor:
        """The values of all boxes, one after another, as a vector: a copy."""
        import torch

        parts = [values.reshape(-1) for _, values in self.boxes()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    @property
    def num_elements(self) -> int:
        """Elements that this rank holds."""
        return sum(values.numel() for _, values in self.boxes())

    def describe_cuts(self) -> list[list[Any]] | None:
        """Returns None: no axis of a mesh says how the boxes are cut."""
        return None

    def boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yields (global offsets, values) for each box of the part."""
        for offsets, values in self._read():
            yield offsets, values.detach()


Part = FlatPart | BoxPart

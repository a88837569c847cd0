"""Parameters of a whole model where a rank's own ones are parts of them: stacked layers, fused and split tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from samerun.core.flat import Block, row_major_strides, run_parts
from samerun.train.boxpart import BoxPart

if TYPE_CHECKING:
    import torch
    from torch import nn

Values = Callable[[Any], "tuple[torch.Tensor, int] | None"]
"""Of one of a rank's own parameters: the row-major values that it holds and the number of their first one, or None."""


class LogicalParameter(BoxPart):
    """A parameter of the whole model, of which this rank holds boxes: of several layers, or of a fused tensor.

    Attributes:
        name: the checkpoint's name.
        replica: Megatron's `replica_id`.
        shared_lead: the lowest rank of those that hold the parameter's optimizer state, where data-parallel ranks
            share it.
        primary: whether this rank's replica within its model-parallel group is the one that counts.
    """

    def __init__(self, name: str, shape: tuple[int, ...], parameter: nn.Parameter, replica: tuple[int, ...]) -> None:
        super().__init__(shape, parameter.dtype, lambda: self.read(_whole))
        self.name, self.replica = name, replica
        self.requires_grad, self.device = parameter.requires_grad, parameter.device
        self.shared_lead, self.primary = 0, True
        self.gradient: Callable[[LogicalParameter], BoxPart | None] = lambda _: None
        self._blocks: dict[int, tuple[nn.Parameter, list[tuple[tuple[int, ...], Block]]]] = {}

    def add(self, parameter: nn.Parameter, place: tuple[int, ...], block: Block) -> None:
        """Says where a block of one of this rank's parameters lies: in which layer, if they are stacked, and where."""
        self._blocks.setdefault(id(parameter), (parameter, []))[1].append((place, block))

    @property
    def own(self) -> list[Any]:
        """This rank's parameters."""
        return [parameter for parameter, _ in self._blocks.values()]

    @property
    def grad(self) -> BoxPart | None:
        """The gradient after all ranks added theirs, as far as this rank holds it."""
        return self.gradient(self)

    def read(self, values_of: Values) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Returns the boxes of something that is as large as the parameter, from this rank's values of it."""
        boxes: list[tuple[tuple[int, ...], torch.Tensor]] = []
        for parameter, blocks in self._blocks.values():
            if (held := values_of(parameter)) is None:
                continue
            values, first = held
            flat, shape = values.detach().reshape(-1), tuple(parameter.shape)
            strides = row_major_strides(shape)
            for part in run_parts(shape, [block for _, block in blocks], first, flat.numel()):
                box = flat.as_strided(part.sizes, strides, flat.storage_offset() + part.start)
                place, _ = blocks[part.block]
                boxes.append(((*place, *part.offsets), box.reshape((*(1,) * len(place), *part.sizes))))
        return boxes


def _whole(parameter: Any) -> tuple[torch.Tensor, int]:
    return parameter, 0

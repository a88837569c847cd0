"""How far an optimizer step moves parameters: L2 norms of changes, per parameter, whatever the parameters' placement.

Sharded parameters are never gathered. Each rank squares what it holds; each element is counted on exactly one rank,
and one small all-reduce adds the squares up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from samerun.train.agree import collective_device, distinct, world
from samerun.train.boxpart import BoxPart, Part
from samerun.train.flatpart import is_partitioned, partitioned_part
from samerun.train.named import named_buffers, named_parameters
from samerun.train.shards import local_shard

if TYPE_CHECKING:
    import torch
    from torch import nn

_NOBODY = 2**62
_FULL_BYTES = 4
_ROW_ELEMENTS = 4096

QUIET = 1e-5
"""An element whose gradient is below this part of its tensor's root mean square, and not zero, is hardly but rounding.

So it is with the key's part of a fused bias, which softmax cancels. Adam scales such a gradient up to a full step, in a
direction that another order of additions changes; its tensor's other elements agree to seven digits."""


class ParameterNorms:
    """The job's parameters in one order that all ranks share, and which rank counts which shard.

    Attributes:
        names: every parameter of the job (over all pipeline stages), owner's names.
        trainable: those of them that require a gradient.
    """

    def __init__(
        self, names: Sequence[str], trainable: frozenset[str], mine: Mapping[str, torch.Tensor], counted: frozenset[str]
    ) -> None:
        self.names = tuple(names)
        self.trainable = trainable
        self._mine = dict(mine)
        self._counted = counted
        self._rank, _ = world()
        self._index = {name: index for index, name in enumerate(names)}

    @classmethod
    def of(cls, model: nn.Module | Sequence[nn.Module]) -> Self:
        """Reads a model's parameters. Collective: every rank calls it, outside a forward pass."""
        return cls._of(named_parameters(model))

    @classmethod
    def of_buffers(cls, model: nn.Module | Sequence[nn.Module]) -> Self:
        """Reads a model's saved floating-point buffers, in place of its parameters. Collective, as above."""
        return cls._of({name: value for name, value in named_buffers(model).items() if value.is_floating_point()})

    @classmethod
    def _of(cls, mine: Mapping[str, torch.Tensor]) -> Self:
        rank, _ = world()
        known: dict[str, bool] = {}
        for variant in distinct([[name, parameter.requires_grad] for name, parameter in mine.items()]):
            for name, trains in variant.value:
                known[name] = known.get(name, False) or trains
        names = list(known)
        leads: dict[str, int] = {}
        for name, parameter in mine.items():
            shard = local_shard(parameter, rank=rank)
            leads[name] = _NOBODY if shard is None else shard.lead
        lowest = _lowest_over_ranks([leads.get(name, _NOBODY) for name in names])
        # Every replica of a parameter has another lead rank; the replica with the lowest one is the one that counts.
        counted = {name for name, low in zip(names, lowest, strict=True) if leads.get(name, _NOBODY) == low < _NOBODY}
        return cls(names, frozenset(name for name in names if known[name]), mine, frozenset(counted))

    def copy(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns copies of what this rank counts of `names`: its memory cost. Local."""
        return {name: local.clone() for name, local in self._locals(names).items()}

    def quiet(self, names: Iterable[str], squared_gradients: Sequence[float]) -> dict[str, torch.Tensor]:
        """Returns which elements of what this rank counts have a gradient that is hardly more than rounding. Local.

        Args:
            names: the parameters to look at.
            squared_gradients: of all parameters, added over ranks.

        Returns:
            Masks, of the parameters that have such elements. None in half precision, where bands are wider than that.
        """
        found: dict[str, torch.Tensor] = {}
        for name in names:
            gradient = self._mine[name].grad if name in self._counted else None
            elements = 0 if gradient is None else math.prod(gradient.shape)
            if gradient is None or not elements:
                continue
            if isinstance(gradient, BoxPart) and gradient.counts is not None:
                continue  # cut otherwise than its parameter: a mask would fit on some ranks and at some layouts only
            local = local_part(gradient, self._rank)
            if local.element_size() < _FULL_BYTES:
                continue
            size = local.abs()
            limit = QUIET * math.sqrt(squared_gradients[self._index[name]] / elements)
            mask = (size < limit) & (size > 0)
            if bool(mask.any()):
                found[name] = mask
        return found

    def squared_change(
        self, before: Mapping[str, torch.Tensor], quiet: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns, for every parameter, this rank's part of the squared L2 norm of its change since `before`.

        Once of all its elements, once without the `quiet` ones. Overwrites `before`. Shape `(len(names),)` each,
        float64, on the CPU. Local: `add_over_ranks` completes it.
        """
        whole: dict[str, torch.Tensor] = {}
        loud: dict[str, torch.Tensor] = {}
        for name, local in self._locals(before).items():
            change = _wide(before[name]).sub_(_wide(local))
            whole[name] = loud[name] = squared_norm(change)
            if name in quiet and quiet[name].shape == change.shape:
                loud[name] = squared_norm(change.masked_fill_(quiet[name], 0))
        return self._vector(whole), self._vector(loud)

    def squared_gradient(self) -> torch.Tensor:
        """Returns, for every parameter, this rank's part of the squared L2 norm of its gradient, as above. Local."""
        gradients = {name: gradient for name, p in self._mine.items() if (gradient := p.grad) is not None}
        parts = ((name, local_part(g, self._rank)) for name, g in gradients.items() if self._is_counted(name, g))
        return self._squares(parts)

    def _is_counted(self, name: str, gradient: torch.Tensor | BoxPart) -> bool:
        own = gradient.counts if isinstance(gradient, BoxPart) else None
        return name in self._counted if own is None else own

    def squared_values(self) -> torch.Tensor:
        """Returns, for every tensor, this rank's part of its own squared L2 norm, as above. Local."""
        return self._squares(self._locals(self.names).items())

    def squared_distance(self, others: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns this rank's part of the squared L2 distances to `others`, as above. Local.

        Those that are cut in another way than the parameter are left out.
        """
        pairs = {name: (local, local_part(others[name], self._rank)) for name, local in self._locals(others).items()}
        return self._squares(
            (name, _wide(a) - _wide(b).to(a.device)) for name, (a, b) in pairs.items() if a.shape == b.shape
        )

    def norms(self, squares: Sequence[float], names: Iterable[str]) -> dict[str, float]:
        """Returns the L2 norm of each of `names` from squares that were added over ranks."""
        return {name: math.sqrt(squares[self._index[name]]) for name in names}

    def watched(self, count: int = 5) -> tuple[str, ...]:
        """Returns `count` trainable parameters (or all, if fewer) spread evenly from the first layer to the last."""
        trained = [name for name in self.names if name in self.trainable]
        if len(trained) <= count:
            return tuple(trained)
        return tuple(trained[round(i * (len(trained) - 1) / (count - 1))] for i in range(count))

    def _locals(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: local_part(self._mine[name], self._rank) for name in names if name in self._counted}

    def _squares(self, parts: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        return self._vector({name: squared_norm(part) for name, part in parts})

    def _vector(self, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        squares = torch.zeros(len(self.names), dtype=torch.float64)
        if found:
            squares[[self._index[name] for name in found]] = torch.stack(list(found.values())).cpu().double()
        return squares


def local_part(tensor: Any, rank: int = 0) -> torch.Tensor:
    """Returns what this rank holds of a tensor, without its graph."""
    if is_partitioned(tensor):
        return partitioned_part(tensor, rank).local
    if isinstance(tensor, Part):
        return tensor.local
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` in at least float32: the difference of two bfloat16 numbers need not be one."""
    import torch

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the squared L2 norm, in float64 where the device has it.

    Rows of a few thousand elements are summed in the tensor's own precision and the rows in float64: as exact as
    float64 throughout (a part in 10^7 for float32) at a quarter of the time. What overflows is done over.
    """
    import torch

    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    wide = flat.dtype if flat.device.type == "mps" else torch.float64
    whole_rows = flat.numel() - flat.numel() % _ROW_ELEMENTS
    rows = flat[:whole_rows].view(-1, _ROW_ELEMENTS)
    norms = torch.cat([torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(flat[whole_rows:]).reshape(1)])
    total = norms.to(wide).square().sum()
    return total if torch.isfinite(total) else flat.to(wide).square().sum()


def add_over_ranks(values: torch.Tensor) -> list[float]:
    """Returns the sum over all ranks of a vector of floats. Collective."""
    if world()[1] > 1:
        import torch.distributed as dist

        values = values.to(collective_device())
        dist.all_reduce(values)
    return values.tolist()


def _lowest_over_ranks(values: list[int]) -> list[int]:
    import torch

    if world()[1] == 1 or not values:
        return values
    import torch.distributed as dist

    there = torch.tensor(values, dtype=torch.int64, device=collective_device())
    dist.all_reduce(there, op=dist.ReduceOp.MIN)
    return there.tolist()

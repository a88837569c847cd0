"""Which way a tensor points, in a few numbers that add up over shards: projections onto fixed pseudo-random weights.

Element `i` of tensor `name` (row-major, in the whole tensor) has eight weights with mean 0 and variance 1, each a byte
of a mixed key such as its term in the tensor's digest has. A projection is the sum of weight times value. For two
tensors of one name the mean square of the differences of their projections estimates the squared L2 norm of their
difference, whoever held which elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from samerun.core.digest import box_runs
from samerun.core.mix import fold_key
from samerun.core.sketch import NUM_PROJECTIONS
from samerun.train.digest import element_keys, mixed
from samerun.train.shards import LocalShard, Shard

if TYPE_CHECKING:
    import torch

COLUMNS = NUM_PROJECTIONS + 2
"""What is added up per tensor: its projections, its squared L2 norm, and how many elements they are of."""

_CPU_CHUNK_ELEMENTS = 1 << 14
_DEVICE_CHUNK_ELEMENTS = 1 << 20
_SCALE = math.sqrt(12 / ((1 << 16) - 1))  # a weight is one of 256 equal steps


def sketch(name: str, shard: Shard, values: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of the sketch of a tensor that is cut as `shard` is. Local: no communication.

    Args:
        name: the tensor's.
        shard: where in the whole tensor each element belongs.
        values: of those elements, shaped as `shard.local` is.

    Returns:
        `COLUMNS` numbers, float64 where the device has it.
    """
    import torch

    from samerun.train.norms import squared_norm

    wide = torch.float32 if values.device.type == "mps" else torch.float64
    seed = fold_key(*name.encode("utf-8", "surrogatepass"))
    total = torch.zeros(NUM_PROJECTIONS, dtype=wide, device=values.device)
    for offsets, part in _boxes(shard, values):
        total += _project(part, shard.shape, offsets, seed)
    rest = torch.stack([squared_norm(values).to(wide), torch.full_like(total[0], values.numel())])
    return torch.cat([total * _SCALE, rest])


def _boxes(shard: Shard, values: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(shard, LocalShard):
        yield from LocalShard(shard.shape, values, shard.intervals, shard.lead).boxes()
        return
    flat, first = values.reshape(-1), 0
    for offsets, box in shard.boxes():
        yield offsets, flat[first : first + box.numel()].reshape(box.shape)
        first += box.numel()


def _project(part: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], seed: int) -> torch.Tensor:
    """Returns the sums of value times weight, in units of the weights' steps."""
    import torch

    if part.is_complex():
        part, shape, offsets = torch.view_as_real(part), (*shape, 2), (*offsets, 0)
    flat = part.reshape(-1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    chunk = _CPU_CHUNK_ELEMENTS if flat.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    wide = flat.dtype if flat.device.type == "mps" else torch.float64
    total = torch.zeros(NUM_PROJECTIONS, dtype=wide, device=flat.device)
    for first, keys in element_keys(box_runs(shape, offsets, tuple(part.shape)), seed, flat.device, chunk):
        weights = mixed(keys).view(torch.int8).view(-1, NUM_PROJECTIONS).to(flat.dtype).add_(0.5)
        total += weights.mul_(flat[first : first + len(weights), None]).sum(0)
    return total


def directions(rows: Sequence[float], names: Sequence[str], elements: Mapping[str, int]) -> dict[str, list[float]]:
    """Returns the projections of each tensor over its own L2 norm, from `COLUMNS` numbers per name, added over ranks.

    Left out is what has no direction, is not finite, or was not seen whole: `elements` says how many each tensor has.
    """
    found: dict[str, list[float]] = {}
    for index, name in enumerate(names):
        *projections, square, count = rows[index * COLUMNS : (index + 1) * COLUMNS]
        if count == elements[name] and square > 0 and all(map(math.isfinite, (square, *projections))):
            found[name] = [float(f"{value / math.sqrt(square):.6g}") for value in projections]
    return found

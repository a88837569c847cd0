"""The additive digest over torch tensors, on whatever device they are: shard by shard, nothing gathered.

Same numbers as `samerun.core.digest`. torch has no unsigned 64-bit arithmetic worth the name, so the sums run in int64,
whose wrap-around is the same arithmetic modulo 2**64; only the right shifts need their sign bits masked off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from samerun.core.digest import (
    MASK,
    MULTIPLIER_1,
    MULTIPLIER_2,
    STRIDE,
    Runs,
    box_runs,
    complex_as_two,
    digest_seed,
    to_hex,
    whole_digest,
)
from samerun.core.dtype import DType, parse_dtype
from samerun.train.shards import LocalShard, Shard, local_shard

if TYPE_CHECKING:
    import torch
    from torch import nn

_CPU_CHUNK_ELEMENTS = 1 << 15
_DEVICE_CHUNK_ELEMENTS = 1 << 24
_COMPILED_FROM_ELEMENTS = 1 << 22
_UNORDERED_CHUNK_ELEMENTS = 1 << 20


def dtype_of(tensor: torch.Tensor | Shard) -> DType:
    """Returns the element type of `tensor`. Raises ValueError for one that samerun does not know."""
    return parse_dtype(str(tensor.dtype))


def digest_shard(key: str, shard: Shard) -> int:
    """Returns the digest of the part of a tensor that this rank holds. Local: no communication.

    The digests of all ranks that together hold one replica add up (modulo 2**64) to the tensor's digest.
    """
    dtype = dtype_of(shard)
    seed = digest_seed(key, dtype, shard.shape)
    total = 0
    for offsets, part in shard.boxes():
        total += _digest_box(part, *complex_as_two(dtype, shard.shape, offsets, part.shape), seed)
    return total & MASK


def digest_tensor(key: str, tensor: torch.Tensor) -> str:
    """Returns the digest of a whole plain tensor as 16 hexadecimal digits."""
    return whole_digest(digest_shard(key, LocalShard.whole(tensor)), key, dtype_of(tensor), tuple(tensor.shape))


def state_fingerprint(model: nn.Module | Sequence[nn.Module], optimizer: object = None) -> dict[str, str]:
    """Returns a digest of everything that this rank holds of model and optimizer, by tensor key.

    Local and cheap: no communication, and only good for comparing this rank with itself, before and after something
    that must not change the state. Buffers that are not saved are included: an evaluation may not move them either.
    """
    from samerun.train.agree import world
    from samerun.train.named import named_buffers, named_optimizer_tensors, named_parameters

    tensors = {f"param:{name}": tensor for name, tensor in named_parameters(model).items()}
    tensors |= {f"buffer:{name}": tensor for name, tensor in named_buffers(model, persistent_only=False).items()}
    if optimizer is not None:
        tensors |= named_optimizer_tensors(model, optimizer)
    rank, _ = world()
    shards = {key: local_shard(tensor, rank=rank) for key, tensor in tensors.items()}
    return {key: to_hex(digest_shard(key, shard)) for key, shard in shards.items() if shard is not None}


def _digest_box(
    part: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], seed: int
) -> int:
    import torch

    runs = box_runs(shape, offsets, sizes)
    if not runs.length:
        return 0
    bits = as_integers(part)
    if part.device.type == "cpu" and bits.numel() >= _COMPILED_FROM_ELEMENTS:
        return _digest_compiled(bits, runs, seed)
    chunk = _CPU_CHUNK_ELEMENTS if part.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first, keys in element_keys(runs, seed, bits.device, chunk):
        total += mixed(keys.bitwise_xor_(widened(bits[first : first + keys.numel()]))).sum()
    return int(total.item()) & MASK


def _digest_compiled(bits: torch.Tensor, runs: Runs, seed: int) -> int:
    """The compiled kernel for files: ten times as fast on a CPU, and worth its loading time for large shards only."""
    import numpy as np

    from samerun.verify.state.kernel import sum_terms

    unsigned = bits.numpy().view(f"u{bits.element_size()}")
    return int(sum_terms(unsigned, runs.starts, runs.length, np.uint64(seed)))


def element_keys(runs: Runs, seed: int, device: torch.device, chunk: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (place of the first, keys) for the elements of a box, at most `chunk` at a time, in the box's own order.

    An element's key is `seed + i * STRIDE` modulo 2**64 as an int64, `i` its row-major index in the whole tensor.
    """
    import torch

    length = runs.length
    steps = torch.arange(min(chunk, length), dtype=torch.int64, device=device).mul_(signed(STRIDE))
    if len(runs.starts) == 1 or length > chunk:
        for row, start in enumerate(runs.starts.tolist()):
            for first in range(0, length, chunk):
                keys = steps[: min(chunk, length - first)] + signed(seed + (start + first) * STRIDE)
                yield row * length + first, keys
        return
    starts = torch.from_numpy(runs.starts.view("int64")).to(device)
    row_keys = starts.mul(signed(STRIDE)).add_(signed(seed))
    rows = max(1, chunk // max(length, 1))
    for first in range(0, len(starts), rows):
        yield first * length, (row_keys[first : first + rows, None] + steps[None, :]).reshape(-1)


def mixed(z: torch.Tensor) -> torch.Tensor:
    """Returns `samerun.core.mix.mix64` of every int64 of `z`, in place."""
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(signed(MULTIPLIER_1))
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(signed(MULTIPLIER_2))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def sum_unordered(local: torch.Tensor) -> int:
    """Returns `samerun.core.digest.sum_unordered` of what this rank holds: a number that places do not change."""
    import torch

    bits = as_integers(local)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_UNORDERED_CHUNK_ELEMENTS):
        wide = widened(chunk)
        total += (wide * signed(MULTIPLIER_1) + signed(MULTIPLIER_2)).mul_(wide).sum()
    return int(total.item()) & MASK


def as_integers(part: torch.Tensor) -> torch.Tensor:
    """Returns the elements' bits as a vector of signed integers of the elements' own width."""
    import torch

    flat = part.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def widened(bits: torch.Tensor) -> torch.Tensor:
    """Returns the bits zero-extended to int64."""
    import torch

    width = bits.element_size()
    wide = bits.to(torch.int64)
    return wide.bitwise_and_((1 << 8 * width) - 1) if width in (2, 4) else wide


def signed(number: int) -> int:
    """Returns the int64 that has the bits of `number` modulo 2**64."""
    number &= MASK
    return number - (1 << 64) if number >> 63 else number

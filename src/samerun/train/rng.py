"""Randomness that belongs to samples and names: dropout and initial weights that no layout changes.

    keys = SampleKeys(seed=0)
    use_keyed_dropout(model, keys)                 # every nn.Dropout becomes a KeyedDropout with its own name
    for update in sampler.updates(loader, until=total):
        for microbatch in update:
            keys.set(microbatch.ids, epoch=update.epoch)
            loss = ...

The bits are those of `samerun.core.rng`, computed with torch where the activation lies. A sample's mask in a layer is a
function of (seed, epoch, sample, layer name, element): the same on whatever rank, in whatever microbatch, at whatever
place in it, and again when a checkpointed activation is recomputed in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from samerun.core.mix import MASK
from samerun.core.rng import MULTIPLIERS, ROUNDS, WEYL, StreamKey, keep_threshold
from samerun.errors import Problem, UsageError

_LOW = 0xFFFFFFFF


def philox(k0: torch.Tensor, k1: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Returns Philox 4x64-10 blocks as int64 with the bits of `samerun.core.rng.philox`, shape `(..., 4)`.

    Args:
        k0, k1, counters: int64 tensors that broadcast against each other, any device.
    """
    k0, k1, c0 = torch.broadcast_tensors(k0, k1, counters)
    c1 = c2 = c3 = torch.zeros_like(c0)
    for number in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        step0, step1 = (signed(number * word) for word in WEYL)
        c0, c1, c2, c3 = high1 ^ c1 ^ (k0 + step0), low1, high0 ^ c3 ^ (k1 + step1), low0
    return torch.stack([c0, c1, c2, c3], dim=-1)


def signed(word: int) -> int:
    """Returns the int64 with the bits of a 64-bit word."""
    word &= MASK
    return word - (1 << 64) if word >> 63 else word


def _multiply(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    f_high, f_low = factor >> 32, factor & _LOW
    w_high, w_low = (words >> 32) & _LOW, words & _LOW
    middle = f_high * w_low
    carried = ((f_low * w_low >> 32) & _LOW) + (middle & _LOW) + f_low * w_high
    high = f_high * w_high + ((middle >> 32) & _LOW) + ((carried >> 32) & _LOW)
    return high, signed(factor) * words


def words32(k0: torch.Tensor, k1: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns 32-bit words start..stop-1 of one stream per key, int64 in 0..2**32-1, shape `(keys, stop - start)`.

    Args:
        k0, k1: `(keys,)` int64.
    """
    blocks = torch.arange(start // 8, -(-stop // 8), dtype=torch.int64, device=k0.device) + 1
    found = philox(k0[:, None], k1[:, None], blocks[None, :])
    halves = torch.stack([found & _LOW, (found >> 32) & _LOW], dim=-1).reshape(len(k0), -1)
    return halves[:, start % 8 : start % 8 + stop - start]


class SampleKeys:
    """Which samples the current microbatch holds; shared by all keyed layers of a model.

    Args:
        seed: the run's seed for this purpose, the same on every rank.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.epoch = 0
        self._ids: tuple[int, ...] | None = None
        self._tensor: torch.Tensor | None = None

    def set(self, ids: Sequence[int], *, epoch: int = 0, num_rows: int | None = None) -> None:
        """Says what the next forward works on. It stands until the next call, so that recomputation finds it.

        Args:
            ids: sample id of each row.
            epoch: the epoch that the samples are in: they get other masks in the next one.
            num_rows: rows of the batch, where it holds more than the samples that count (a placeholder): these get the
                masks of id -1.
        """
        self._ids = (*map(int, ids), *[-1] * ((num_rows or len(ids)) - len(ids)))
        self.epoch = epoch
        self._tensor = None

    def rows(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Returns the ids as the second key word, int64.

        Raises:
            UsageError: SR-RNG-KEYS if nothing was set, or for another number of rows.
        """
        if self._ids is None or len(self._ids) != num_rows:
            raise UsageError(
                Problem(
                    "SR-RNG-KEYS",
                    "a keyed layer does not know which samples its rows are",
                    expected=f"{num_rows} ids",
                    found="none" if self._ids is None else len(self._ids),
                    hint="call keys.set(microbatch.ids, epoch=...) before each forward, one id per row of the batch",
                )
            )
        if self._tensor is None or self._tensor.device != device:
            self._tensor = torch.tensor([signed(item) for item in self._ids], dtype=torch.int64, device=device)
        return self._tensor


class KeyedDropout(nn.Module):
    """Dropout whose mask belongs to the sample and the layer.

    The first dimension of the input are the samples. Element e of a sample (row-major over the other dimensions) is
    kept where 32-bit word e of the stream of (seed, epoch, sample, "dropout:" + name) reaches `rate * 2**32`, and
    scaled by 1 / (1 - rate). With inputs of shape (samples, time, features) a sample's mask does not depend on how far
    its microbatch is padded; where an inner dimension is padded (attention probabilities), it does.

    Args:
        rate: the part that is dropped.
        name: the layer's name, another one for each layer.
        keys: says which samples the rows are.
    """

    def __init__(self, rate: float, name: str, keys: SampleKeys) -> None:
        super().__init__()
        self.threshold = keep_threshold(rate)
        self.rate = rate
        self.name = name
        self.keys = keys

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` with elements dropped, in training mode."""
        if not self.training or not self.threshold:
            return x
        return x * self.mask(x) / (1 - self.rate)

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """Returns which elements are kept, bool, of `x`'s shape."""
        rows = self.keys.rows(x.shape[0], x.device)
        key = StreamKey.of(self.keys.seed, epoch=self.keys.epoch, operation=f"dropout:{self.name}")
        k0 = torch.full_like(rows, signed(key.words[0]))
        return (words32(k0, rows, 0, math.prod(x.shape[1:])) >= self.threshold).reshape(x.shape)

    def extra_repr(self) -> str:
        """Returns what `print(model)` shows."""
        return f"rate={self.rate}, name={self.name!r}"


def use_keyed_dropout(model: nn.Module, keys: SampleKeys) -> list[str]:
    """Replaces every `nn.Dropout` of `model` by a `KeyedDropout` named after it, and returns the names.

    Dropout that is a function call or an argument (`scaled_dot_product_attention(dropout_p=...)`) is not found: set it
    to 0 and put a `KeyedDropout` there.
    """
    found: list[str] = []
    for name, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, KeyedDropout(module.p, name, keys))
            found.append(name)
    return found


def keyed_uniform_(
    tensor: torch.Tensor, seed: int, name: str, low: float = 0.0, high: float = 1.0, *, first_row: int = 0
) -> torch.Tensor:
    """Fills a parameter with uniform numbers that belong to its name, and returns it.

    Args:
        tensor: the parameter, or the rows of it that this rank holds.
        first_row: which row of the whole parameter `tensor` begins with (sharded along dimension 0).
        name: the parameter's fully qualified name.
    """
    return _fill(tensor, _uniforms(tensor, seed, name, first_row, 1)[0] * (high - low) + low)


def keyed_normal_(
    tensor: torch.Tensor, seed: int, name: str, mean: float = 0.0, std: float = 1.0, *, first_row: int = 0
) -> torch.Tensor:
    """Fills a parameter with normal numbers that belong to its name (Box-Muller in fp64), and returns it.

    Arguments as for `keyed_uniform_`. Element i uses numbers 2i and 2i + 1 of the stream.
    """
    first, second = _uniforms(tensor, seed, name, first_row, 2)
    normal = torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)
    return _fill(tensor, normal * std + mean)


def _uniforms(tensor: torch.Tensor, seed: int, name: str, first_row: int, each: int) -> torch.Tensor:
    row = math.prod(tensor.shape[1:])
    start, stop = first_row * row * each, (first_row * row + tensor.numel()) * each
    key = StreamKey.named(seed, name)
    k0, k1 = (torch.tensor([signed(word)], dtype=torch.int64, device=tensor.device) for word in key.words)
    blocks = torch.arange(start // 4, -(-stop // 4), dtype=torch.int64, device=tensor.device) + 1
    words = philox(k0, k1, blocks).reshape(-1)[start % 4 : start % 4 + stop - start]
    return (((words >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53).reshape(-1, each).T


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(values.reshape(tensor.shape))

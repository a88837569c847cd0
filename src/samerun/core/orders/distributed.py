"""The orders of torch's own samplers, before anything is cut by rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samerun.core.order import Ids, require_span
from samerun.core.orders.randperm import Draw, torch_randperm


@dataclass(frozen=True, slots=True)
class DistributedSamplerOrder:
    """The order in which `torch.utils.data.DistributedSampler` (torch 2.13.0) hands out samples before it cuts by rank.

    Its permutation depends on seed + epoch only; the padding of an epoch's tail (or its drop) depends on the number of
    ranks. So a run that was started with `DistributedSampler(num_replicas=R, ...)` keeps *that* R here for good,
    whatever number of replicas it is dealt to later. With the default of 1 nothing is padded or dropped.

    `length` is the data set's, `drop_last` the *sampler's* (cut the tail instead of padding it). `loader_batch` is the
    batch size per rank if the run's *DataLoader* had `drop_last=True` and so never saw the last short batch of each
    rank; else None. `frozen_epoch` is for a run that never called `set_epoch`, whose every epoch has epoch 0's order.
    `draw` makes the permutations (`Draw`) and is no part of what the order is.
    """

    length: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    num_replicas: int = 1
    loader_batch: int | None = None
    frozen_epoch: bool = False
    draw: Draw = field(default=torch_randperm, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.length < 1 or self.num_replicas < 1 or (self.loader_batch is not None and self.loader_batch < 1):
            raise ValueError(f"length, num_replicas and loader_batch are whole numbers of at least 1: {self}")
        if not self.num_samples(0):
            raise ValueError(f"dropping the tail leaves no sample in an epoch: {self}")

    def num_samples(self, epoch: int) -> int:
        """Returns the positions of an epoch over all ranks, padding included; the same in every epoch."""
        each = self.length // self.num_replicas if self.drop_last else -(-self.length // self.num_replicas)
        if self.loader_batch is not None:
            each -= each % self.loader_batch
        return each * self.num_replicas

    def num_unpadded(self, epoch: int) -> int:
        """Returns how many positions of an epoch come before its padding."""
        return min(self.length, self.num_samples(epoch))

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the ids at positions start..stop-1; padding starts the epoch's permutation over again."""
        require_span(start, stop, self.num_samples(epoch))
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64) % self.length
        drawn = self.draw(self.length, self.seed + (0 if self.frozen_epoch else epoch))
        return drawn[start:stop] if stop <= self.length else drawn[np.arange(start, stop) % self.length]

    def identity(self) -> dict[str, Any]:
        """Returns the arguments that decide the order. `seed` is None where nothing is shuffled."""
        return {
            "kind": "torch-distributed",
            "num_samples": self.length,
            "seed": self.seed if self.shuffle else None,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "num_replicas": self.num_replicas,
            "loader_batch": self.loader_batch,
            **({"frozen_epoch": True} if self.frozen_epoch else {}),
        }


@dataclass(frozen=True, slots=True)
class RandomSamplerOrder:
    """The order of `torch.utils.data.RandomSampler` (torch 2.13.0) without replacement, on one process.

    `seeds` are what the sampler's generator was seeded with in each epoch. Two ways in which a run fixes them:

    * `RandomSamplerOrder.reseeded(length, seed)`: a sampler whose generator is seeded anew with seed + epoch, as
      Accelerate's seedable sampler does;
    * explicit seeds. A `RandomSampler` without a generator takes each epoch's seed from torch's global generator:
      `samerun.train.draw.random_sampler_seeds` reads those off a saved generator state.

    After the last of explicit seeds there is no order, and asking for one raises ValueError.
    """

    length: int
    seeds: tuple[int, ...] = ()
    first_seed: int = 0
    draw: Draw = field(default=torch_randperm, compare=False, repr=False)

    @classmethod
    def reseeded(cls, length: int, seed: int, draw: Draw = torch_randperm) -> RandomSamplerOrder:
        """Returns the order of a sampler that is seeded with `seed + epoch`."""
        return cls(length, (), seed, draw)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"an order needs at least one sample, not {self.length}")

    def num_samples(self, epoch: int) -> int:
        """Returns the number of samples, the same in every epoch."""
        return self.length

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the ids at positions start..stop-1."""
        require_span(start, stop, self.length)
        return self.draw(self.length, self._seed(epoch))[start:stop]

    def _seed(self, epoch: int) -> int:
        if not self.seeds:
            return self.first_seed + epoch
        if epoch >= len(self.seeds):
            raise ValueError(f"the seed of epoch {epoch} is not known: {len(self.seeds)} were given")
        return self.seeds[epoch]

    def identity(self) -> dict[str, Any]:
        """Returns the length and the seeds."""
        seeds: dict[str, Any] = {"seeds": list(self.seeds)} if self.seeds else {"seed": self.first_seed}
        return {"kind": "torch-random", "num_samples": self.length, **seeds}

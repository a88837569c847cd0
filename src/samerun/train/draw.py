"""torch's own permutations, and the seeds that its samplers take from a generator."""

from __future__ import annotations

from functools import lru_cache

import torch

from samerun.core.order import Ids


@lru_cache(maxsize=2)
def torch_draw(length: int, seed: int) -> Ids:
    """Returns `torch.randperm` of a CPU generator seeded with `seed`: read-only int64, 8 bytes per sample."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    drawn: Ids = torch.randperm(length, generator=generator).numpy()
    drawn.setflags(write=False)
    return drawn


def random_sampler_seed(generator_state: torch.Tensor, *, inside_loader: bool = True) -> int:
    """Returns the seed that a `RandomSampler` without a generator takes for its next epoch (torch 2.13.0).

    Args:
        generator_state: torch's global CPU generator (`torch.get_rng_state()`) where `iter(...)` is called.
        inside_loader: whether that is `iter(loader)`, which draws its workers' base seed first, or `iter(sampler)`.
    """
    generator = torch.Generator()
    generator.set_state(generator_state)
    seed = 0
    for _ in range(1 + inside_loader):
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    return seed

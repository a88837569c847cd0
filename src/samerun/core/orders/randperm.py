"""What `torch.randperm` draws on the CPU, without torch: so that an order can be read where no torch is installed.

torch's CPU generator is MT19937 (Matsumoto and Nishimura 1998), seeded by `init_genrand` with the lower 32 bits of the
seed; `randperm` is a Fisher-Yates shuffle that takes `random() % (n - i)` for each place i (ATen
`native/TensorFactories.cpp`, torch 2.13.0). A job that has torch passes its own function instead
(`samerun.train.draw`): same numbers, 50 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Draw = Callable[[int, int], Ids]
"""`draw(length, seed)`: the permutation that torch draws after `manual_seed(seed)`, read-only int64."""

MAX_LENGTH = ((1 << 32) - 1) // 20
"""From this length on torch takes 64-bit random words and another rule; only torch itself draws those."""


@lru_cache(maxsize=2)
def torch_randperm(length: int, seed: int) -> Ids:
    """Returns `torch.randperm(length, generator=torch.Generator().manual_seed(seed))`, read-only, shape `(length,)`.

    Costs about half a second per million.

    >>> torch_randperm(8, 0).tolist()
    [4, 0, 7, 3, 2, 5, 1, 6]

    Raises:
        ValueError: for lengths of `MAX_LENGTH` and more.
    """
    if not 0 <= length < MAX_LENGTH:
        raise ValueError(f"torch draws permutations of {length} by another rule: only torch itself can")
    raw = _generator(seed).random_raw(max(length - 1, 1)).astype(np.int64)[: max(length - 1, 0)]
    jumps: list[int] = (raw % np.arange(length, 1, -1, dtype=np.int64)).tolist()
    drawn = list(range(length))
    for place, jump in enumerate(jumps):
        other = place + jump
        drawn[place], drawn[other] = drawn[other], drawn[place]
    found = np.array(drawn, dtype=np.int64)
    found.setflags(write=False)
    return found


def _generator(seed: int) -> np.random.MT19937:
    word = seed & 0xFFFFFFFF
    key = [word]
    for number in range(1, 624):
        word = (1812433253 * (word ^ (word >> 30)) + number) & 0xFFFFFFFF
        key.append(word)
    generator = np.random.MT19937()
    generator.state = {"bit_generator": "MT19937", "state": {"key": np.array(key, dtype=np.uint32), "pos": 624}}
    return generator

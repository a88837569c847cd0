"""How Accelerate, and the Hugging Face Trainer through it, cut a loader's order into processes.

Derived from accelerate 1.15.0 (`data_loader.py`: `BatchSamplerShard`, `DataLoaderDispatcher`, `skip_first_batches`,
`SeedableRandomSampler`) and compared with ids that the real loaders emitted (`tests/golden/order`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from samerun.core.order import GlobalOrder, Ids, require_span
from samerun.errors import Problem


@dataclass(frozen=True, slots=True)
class AccelerateOrder:
    """A sampler's order as `Accelerator.prepare(DataLoader(...))` hands it to `num_processes` processes, padding
    included.

    Step k takes the next `step_samples` positions; process r gets the r-th contiguous part. What depends on the number
    of processes is the tail of an epoch only: it is padded from the epoch's beginning (`even_batches`, the default),
    given to the first processes only (`even_batches=False`), or dropped (`drop_last`). A run that was begun on P
    processes keeps P here for good, whatever it is dealt to later.

    `base` is the sampler's own order: `RandomSamplerOrder.reseeded(length, seed)` for the seedable sampler, which the
    Trainer uses (seed: `data_seed`, else `seed`), `SequentialOrder` without shuffling, `RandomSamplerOrder(length,
    seeds)` for a plain `RandomSampler`.

    `batch_size` is what the DataLoader was built with: per process, or over all with `split_batches`. With
    `dispatch_batches` process 0 reads for all, and pads to a multiple of the processes, not of the step.
    """

    base: GlobalOrder
    batch_size: int
    num_processes: int
    split_batches: bool = False
    dispatch_batches: bool = False
    even_batches: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_processes < 1:
            raise ValueError(f"batch_size and num_processes are at least 1: {self}")
        if self.split_batches and self.batch_size % self.num_processes:
            raise ValueError(f"split_batches needs a batch size that {self.num_processes} processes divide: {self}")
        if not self.num_samples(0):
            raise ValueError(f"dropping the tail leaves no sample in an epoch: {self}")

    @property
    def step_samples(self) -> int:
        """Samples over all processes of one step of the loader: a pass, not an update, where gradients accumulate."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def num_samples(self, epoch: int) -> int:
        """Returns the positions of an epoch over all processes, padding included."""
        length, step = self.base.num_samples(epoch), self.step_samples
        if self.drop_last:
            return length - length % step
        if self.dispatch_batches:
            return -(-length // self.num_processes) * self.num_processes
        return -(-length // step) * step if self.even_batches and self.num_processes > 1 else length

    def num_unpadded(self, epoch: int) -> int:
        """Returns how many positions of an epoch come before its padding."""
        return min(self.base.num_samples(epoch), self.num_samples(epoch))

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the ids at positions start..stop-1; padding starts the epoch over again."""
        require_span(start, stop, self.num_samples(epoch))
        length = self.base.num_samples(epoch)
        if stop <= length:
            return self.base.ids(epoch, start, stop)
        return self.base.ids(epoch, 0, length)[np.arange(start, stop, dtype=np.int64) % length]

    @property
    def skip_samples(self) -> int:
        """Samples over all processes that `skip_first_batches` passes over for each batch that it is told to skip.

        A step's, except when process 0 dispatches to all: it then skips its own reader's batches, of which every step
        takes one per process. A loop that skips its number of *steps* replays the rest (`check_skip`).
        """
        return self.batch_size if self.dispatch_batches else self.step_samples

    def skipped(self, epoch: int, num_batches: int) -> int:
        """Returns the position that `skip_first_batches(loader, num_batches)` goes to, in samples."""
        return min(num_batches * self.skip_samples, self.num_samples(epoch))

    def num_batches(self, epoch: int, position: int) -> int | None:
        """Returns what to give `skip_first_batches` to be at `position`, or None: no whole number of batches is."""
        if position == self.num_samples(epoch):
            return -(-position // self.skip_samples)
        batches, rest = divmod(position, self.skip_samples)
        return None if rest else batches

    def identity(self) -> dict[str, Any]:
        """Returns the sampler's own identity and what decides the tail."""
        return {
            "kind": "accelerate",
            "base": self.base.identity(),
            "num_samples": self.num_samples(0),
            "padded_for": None if self.drop_last else self.num_samples(0) - self.num_unpadded(0),
        }


def check_skip(order: AccelerateOrder, num_steps: int) -> list[Problem]:
    """Returns SR-ORDER-SKIP if `skip_first_batches(loader, num_steps)` does not pass over that many steps' samples."""
    expected, found = num_steps * order.step_samples, num_steps * order.skip_samples
    if expected == found:
        return []
    return [
        Problem(
            "SR-ORDER-SKIP",
            f"skipping {num_steps} batches of a dispatching loader replays {expected - found} samples",
            expected=f"{expected} samples passed over",
            found=f"{found}: the reader's own batches, {order.num_processes} of which make one step",
            hint=f"skip {expected // order.skip_samples} batches, or use split_batches; the Trainer skips steps",
        )
    ]

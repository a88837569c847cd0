"""Samples that carry their own ids through whatever loader a trainer makes of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.utils.data import Dataset

SAMPLE_IDS = "sample_ids"
"""The key under which a sample, and then a batch, carries ids."""


class Sized(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class WithSampleIds(Dataset[dict[str, Any]]):
    """A map-style data set of dictionaries, each with its index added as `sample_ids`.

    Collators stack it into a tensor like any other number, so that a batch says by itself which samples it holds,
    whatever sampler, workers, prefetching, skipping or dispatching stood between. Samples must be mappings.
    """

    def __init__(self, dataset: Sized) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: Mapping[str, Any] = self.dataset[index]
        return {**sample, SAMPLE_IDS: int(index)}

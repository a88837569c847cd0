"""Flat buffers that one rank gathered: `distrib_optim.pt`, and the objects of dp_zero_gather_scatter.

`{"buckets_coalesced": True, buffer: {(param dtype, grad dtype): {"param", "exp_avg", ..., "numel_unpadded"}}}`: the
buckets of each buffer one after another, without the padding at their ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from samerun.formats.base import Extent
from samerun.formats.mcore.flat import Buffer, Local, Slot, default_bucket_size, plan_buckets, plan_slots
from samerun.formats.mcore.run import Run
from samerun.formats.torchfile import Archive, TensorRef

_DTYPE = re.compile(r"torch\.(\w+)")


@dataclass(frozen=True, slots=True)
class JoinedBuffer:
    """One buffer: its number, the element type of its parameters, and where each slot's values lie."""

    number: int
    dtype: str
    slots: Mapping[str, Extent]

    @property
    def num_elements(self) -> int:
        """Number of elements of every slot."""
        return next(iter(self.slots.values())).shape[0]


def read_joined(value: Any, archive: Archive) -> list[JoinedBuffer] | None:
    """Returns the buffers of one optimizer, None if the value has another form.

    Raises:
        CorruptCheckpoint: if a tensor does not lie inside its storage.
    """
    if not isinstance(value, dict) or value.get("buckets_coalesced") is not True:
        return None
    found: list[JoinedBuffer] = []
    for number, dtypes in sorted((key, item) for key, item in value.items() if type(key) is int):
        for dtype, slots in dtypes.items() if isinstance(dtypes, dict) else ():
            tensors = {
                str(name): archive.extent(item)
                for name, item in (slots.items() if isinstance(slots, dict) else ())
                if isinstance(item, TensorRef) and len(item.shape) == 1 and item.strides in ((1,), ())
            }
            if not tensors or len({extent.shape for extent in tensors.values()}) != 1:
                return None
            found.append(JoinedBuffer(number, dtype_of(str(dtype)), tensors))
    return found


def dtype_of(text: str) -> str:
    """Returns the parameters' element type from a buffer's pair of types.

    >>> dtype_of("['torch.bfloat16', 'torch.float32']")
    'bfloat16'
    """
    match = _DTYPE.search(text)
    return match[1] if match else ""


def split_dtypes(params: Sequence[Local]) -> list[tuple[str, list[Local]]]:
    """Returns parameters by element type, in the order in which types first occur: each has a buffer of its own."""
    found: dict[str, list[Local]] = {}
    for local in params:
        found.setdefault(local.dtype, []).append(local)
    return list(found.items())


def plan_joined(params: Sequence[Local], run: Run, pp: int, chunk: int, num_elements: int) -> list[Slot] | None:
    """Places parameters, in order of registration, in a joined buffer; all slots count from its first element.

    The length of buckets is not recorded. DDP makes several only where gradient reduction overlaps, on the first
    pipeline stage's first chunk.
    """
    overlapped = run.flag("overlap_grad_reduce") and pp == 0 and chunk == 0
    sizes = [None, run.count("ddp_bucket_size") or default_bucket_size(run.dp or 1)]
    for bucket_size in sizes[::-1] if overlapped else sizes[:1]:
        lengths = plan_buckets(params, bucket_size)
        slots = plan_slots(params, lengths) if sum(lengths) == num_elements else None
        if slots is not None:
            first = [0, *accumulate(lengths)]
            return [Slot(slot.local, 0, first[slot.bucket] + slot.start) for slot in slots]
    return None


def buffers_of(joined: JoinedBuffer) -> Iterator[tuple[str, Buffer]]:
    """Yields every slot as a buffer of one segment."""
    for slot, extent in joined.slots.items():
        yield slot, Buffer(extent, np.array([0]), np.array([extent.shape[0]]), np.array([0]))

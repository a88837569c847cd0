"""A checkpoint that lies in memory: the reader's protocol over NumPy arrays, cut into pieces as a test likes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samerun.core.dtype import parse_dtype
from samerun.core.state import LogicalState, ParamGroup, RecordedProgress, TensorEntry, TensorKey, Tiling
from samerun.errors import CorruptCheckpoint, Problem


class MemoryCheckpoint:
    """Holds every tensor whole; `cuts` gives, by key, where dimension 0 is cut into pieces."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        groups: Sequence[ParamGroup] = (),
        progress: RecordedProgress | None = None,
        scheduler: Mapping[str, Any] | None = None,
        objects: Mapping[str, Any] | None = None,
        rng: Mapping[str, Any] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        cuts: Mapping[str, Sequence[int]] | None = None,
        replicas: int = 1,
    ) -> None:
        self.path = Path("memory")
        self.arrays = dict(arrays)
        self.reads: list[str] = []
        tensors = {
            key: TensorEntry(
                key=TensorKey.parse(key),
                shape=array.shape,
                dtype=parse_dtype(array.dtype.name),
                tiling=_tiling(array.shape, (cuts or {}).get(key, ()), replicas),
                original=key,
                aliases=(aliases or {}).get(key, ()),
            )
            for key, array in arrays.items()
        }
        self.state = LogicalState(
            format="memory",
            tensors=tensors,
            groups=tuple(groups),
            progress=progress or RecordedProgress(),
            scheduler=scheduler,
            objects=objects or {},
            rng=rng or {},
        )

    def read(
        self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None
    ) -> np.ndarray:
        array = self.arrays[key]
        if offsets is None or sizes is None:
            return array
        return array[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]

    def read_piece(self, key: str, piece: int) -> np.ndarray:
        self.reads.append(key)
        tiling = self.state.tensors[key].tiling
        return self.read(key, tuple(tiling.offsets[piece].tolist()), tuple(tiling.sizes[piece].tolist()))

    def locate(self, key: str, piece: int) -> Any:
        raise CorruptCheckpoint(Problem("SR-USAGE-PIECE", "memory has no files", where={"tensor": key}))

    def close(self) -> None:
        self.arrays.clear()


def _tiling(shape: tuple[int, ...], cuts: Sequence[int], replicas: int) -> Tiling:
    if not shape:
        return Tiling(np.zeros((replicas, 0), np.int64), np.zeros((replicas, 0), np.int64))
    edges = [0, *cuts, shape[0]]
    offsets = [[start, *(0 for _ in shape[1:])] for start in edges[:-1]] * replicas
    sizes = [[stop - start, *shape[1:]] for start, stop in itertools.pairwise(edges)] * replicas
    return Tiling(np.array(offsets, np.int64), np.array(sizes, np.int64))

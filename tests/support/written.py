"""Carries out a destination plan in the simplest way: the oracle against which a real executor is tested."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from samerun.core.written import DestinationPlan
from samerun.formats.base import Checkpoint, WriteSource, numpy_dtype


def source_of(checkpoint: Checkpoint) -> WriteSource:
    """Returns what a writer is given for an opened checkpoint."""
    return WriteSource(checkpoint.state, checkpoint.read)


def carry_out(plan: DestinationPlan, checkpoint: Checkpoint, destination: Path) -> Path:
    """Writes every file whole, in memory. Raises AssertionError if the plan does not tile a file exactly."""
    buffers = [np.zeros(file.size, np.uint8) for file in plan.files]
    written = [np.zeros(file.size, np.uint8) for file in plan.files]

    def put(file: int, at: int, content: bytes) -> None:
        buffers[file][at : at + len(content)] = np.frombuffer(content, np.uint8)
        written[file][at : at + len(content)] += 1

    for number, file in enumerate(plan.files):
        for literal in file.literals:
            put(number, literal.at, literal.content)
        for fill in file.fills:
            put(number, fill.at, bytes(fill.size))
    for slots in plan.tensors:
        for row in range(len(slots)):
            box = checkpoint.read(slots.key, tuple(slots.offsets[row].tolist()), tuple(slots.sizes[row].tolist()))
            put(int(slots.file[row]), int(slots.at[row]), box.astype(numpy_dtype(slots.dtype)).tobytes())
    for number, file in enumerate(plan.files):
        assert (written[number] == 1).all(), f"{file.path} is not tiled exactly"
        for checksum in file.checksums:
            crc = zlib.crc32(buffers[number][checksum.start : checksum.stop].tobytes())
            for place in checksum.places:
                buffers[number][place : place + 4] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
        path = destination if plan.single_file else destination / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffers[number].tobytes())
    return destination

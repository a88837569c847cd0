"""Inspecting a DCP directory's metadata, against torch reading the same file with its own reader.

python benchmarks/inspect_dcp.py --tensors 1000 --ranks 64
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def write_checkpoint(folder: Path, num_tensors: int, num_ranks: int) -> int:
    """Writes the metadata that torch writes for `num_tensors` row-sharded tensors; returns the number of chunks."""
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    rows, width = 3 * num_ranks, 8
    tensors, places, ends = {}, {}, [0] * num_ranks
    for number in range(num_tensors):
        name = f"model.layers.{number}.weight"
        chunks = []
        for rank in range(num_ranks):
            offsets, sizes = torch.Size([3 * rank, 0]), torch.Size([3, width])
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            places[MetadataIndex(name, offsets, rank)] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], 1700)
            ends[rank] += 1700
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([rows, width]), chunks)
    folder.mkdir(parents=True)
    metadata = Metadata(tensors, {name: ("model", name[6:]) for name in tensors}, places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for rank in range(num_ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(ends[rank])
    return num_tensors * num_ranks


def best(function: Callable[[], object], repeats: int = 3) -> float:
    """Returns the shortest of several times, in seconds."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--ranks", type=int, default=100)
    args = parser.parse_args()
    from torch.distributed.checkpoint import FileSystemReader

    from samerun.core.box import check_tilings
    from samerun.formats.detect import open_checkpoint

    print("chunks     torch reads   samerun opens   ratio   + coverage   whole process")
    for tensors in args.tensors:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "step-1"
            chunks = write_checkpoint(folder, tensors, args.ranks)
            reading = best(lambda folder=folder: FileSystemReader(folder).read_metadata())
            opening = best(lambda folder=folder: open_checkpoint(folder))
            state = open_checkpoint(folder).state
            pairs = [(entry.shape, entry.tiling) for entry in state.tensors.values()]
            covering = best(lambda pairs=pairs: check_tilings(pairs))
            command = [sys.executable, "-m", "samerun", "inspect", str(folder), "--json"]
            whole = best(lambda command=command: subprocess.run(command, capture_output=True))
        print(
            f"{chunks:>9,}  {reading:>9.3f} s  {opening:>12.3f} s  {opening / reading:>6.2f}  {covering:>9.3f} s"
            f"  {whole:>12.2f} s"
        )


if __name__ == "__main__":
    main()

"""Inspecting a DCP directory's metadata, against torch reading the same file with its own reader.

python benchmarks/inspect_dcp.py --tensors 1000 --ranks 64
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

Chunks = list[tuple[tuple[int, ...], tuple[int, ...], str, int]]  # offsets, sizes, file, offset in the file


def write_metadata(folder: Path, tensors: Iterable[tuple[str, tuple[int, ...], str, Chunks]], item_bytes: int) -> None:
    """Writes the `.metadata` that torch writes for tensors of (name, shape, element type, chunks)."""
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

    entries, places, paths = {}, {}, {}
    for name, shape, dtype, chunks in tensors:
        boxes = []
        for number, (start, extent, file, at) in enumerate(chunks):
            offsets, sizes = torch.Size(start), torch.Size(extent)
            boxes.append(ChunkStorageMetadata(offsets, sizes))
            places[MetadataIndex(name, offsets, number)] = _StorageInfo(file, at, item_bytes)
        entries[name] = TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(shape), boxes)
        paths[name] = ("model", name[6:]) if name.startswith("model.") else (name,)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, paths, places)))


def write_checkpoint(folder: Path, num_tensors: int, num_ranks: int) -> int:
    """Writes a directory of `num_tensors` row-sharded tensors, data files of zeros; returns the number of chunks."""
    width, item_bytes = 8, 1700

    def chunks(number: int) -> Chunks:
        at = number * item_bytes
        return [((3 * rank, 0), (3, width), f"__{rank}_0.distcp", at) for rank in range(num_ranks)]

    folder.mkdir(parents=True)
    names = (f"model.layers.{number}.weight" for number in range(num_tensors))
    shape = (3 * num_ranks, width)
    write_metadata(folder, ((name, shape, "float32", chunks(number)) for number, name in enumerate(names)), item_bytes)
    for rank in range(num_ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(num_tensors * item_bytes)
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

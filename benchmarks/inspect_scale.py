"""Inspecting large checkpoints: whole process against the C unpickler on the same metadata, and memory on deep reading.

python benchmarks/inspect_scale.py --chunks 10000 100000 1000000 --size 2 --work /tmp/bench
python benchmarks/inspect_scale.py --chunks 10000 --size 0 --work /tmp/bench       # metadata alone, in a minute

Every row is a process of its own; CPU seconds are user and system time, memory is the peak of anonymous pages in MB
(mapped files are the page cache's). The unpickler is measured beside torch's classes already imported, with the
collector of cycles as Python has it, and without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import inspect_dcp
import inspect_megatron

from convert import Cost, convert, least, remove, run, write_export

UNPICKLE = """
import gc, json, pickle, resource, sys
import torch.distributed.checkpoint
if {collect} == 0: gc.disable()
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
before, memory = resource.getrusage(resource.RUSAGE_SELF), anonymous()
with open({path!r}, "rb") as file: found = pickle.load(file)
after = resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps([cpu, anonymous() - memory]))
"""


def unpickle(path: Path, *, collect: bool) -> Cost:
    """Unpickles a file with torch's own classes; their import is not counted."""
    script = UNPICKLE.format(path=str(path), collect=int(collect))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    cpu, anon = json.loads(done.stdout)
    return Cost(0.0, cpu, anon)


def inspect(path: Path, *options: str) -> Cost:
    """Runs `samerun inspect`; what it finds of a synthetic checkpoint is none of its business."""
    return run(sys.executable, "-m", "samerun", "inspect", str(path), *options, ok=(0, 1))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--only", choices=["dcp", "megatron"], help="the metadata of one format")
    parser.add_argument("--size", type=float, default=2.0, help="gigabytes of what is read whole; 0: nothing is")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, in turn; the least counts")
    parser.add_argument("--work", type=Path, required=True, help="an empty directory with three times that space")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    writers = {name: write for name, write in WRITERS.items() if args.only in (None, name)}
    warm_up(args.work)
    print(
        f"{'metadata':<10}{'chunks':>11} | {'samerun':>15} | {'unpickled':>15} {'no gc':>7} | {'x':>5} {'x no gc':>8} "
        f"{'x MB':>5} | {'load':>5}"
    )
    for wanted in args.chunks:
        for name, write in writers.items():
            folder = args.work / name / "iter_0000001"
            remove(folder.parent)
            folder.parent.mkdir()
            print_scale(name, write(folder, wanted), folder, args.repeat)
            remove(folder.parent)
    if args.size > 0:
        read_whole(args.work, args.size)


def warm_up(work: Path) -> None:
    """Inspects metadata just long enough to be scanned by compiled code: what is compiled is kept for later runs."""
    folder = work / "warm" / "iter_0000001"
    remove(folder.parent)
    for write in WRITERS.values():
        folder.parent.mkdir()
        write(folder, 20_000)
        inspect(folder)
        remove(folder.parent)


def write_dcp(folder: Path, chunks: int) -> int:
    """Writes DCP metadata of so many chunks, a hundred per tensor."""
    return inspect_dcp.write_checkpoint(folder, max(1, chunks // 100), 100)


def write_megatron(folder: Path, chunks: int) -> int:
    """Writes a Megatron checkpoint of about so many chunks, most of them in flat optimizer buffers."""
    return inspect_megatron.write(folder, max(1, chunks // 24))


WRITERS = {"dcp": write_dcp, "megatron": write_megatron}


def print_scale(name: str, chunks: int, folder: Path, repeat: int) -> None:
    """Prints one row."""
    mine, plain, quick = [], [], []
    for _ in range(repeat):
        mine.append(inspect(folder))
        plain.append(unpickle(folder / ".metadata", collect=True))
        quick.append(unpickle(folder / ".metadata", collect=False))
    own, slow, fast = least(mine), least(plain), least(quick)
    costs = f"{own.cpu:>6.2f} s {own.anon:>4.0f} MB | {slow.cpu:>6.2f} s {slow.anon:>4.0f} MB {fast.cpu:>5.2f} s"
    ratios = f"{own.cpu / slow.cpu:>5.2f} {own.cpu / fast.cpu:>8.2f} {own.anon / slow.anon:>5.2f}"
    print(f"{name:<10}{chunks:>11,} | {costs} | {ratios} | {os.getloadavg()[0]:>5.0f}", flush=True)


def read_whole(work: Path, size: float) -> None:
    """Prints what reading a whole checkpoint costs: plainly, deeply, and compared with another layout of the same."""
    export, sharded, other = work / "export", work / "dcp4", work / "dcp3"
    for folder in (export, sharded, other):
        remove(folder)
    print(f"\n{'reading whole':<20}{'':>10} | {'CPU s   MB':>17}   wall")
    write_export(export, size)
    convert(export, sharded, "--to", "dcp", "--layout", "dp_shard=4")
    convert(export, other, "--to", "dcp", "--layout", "dp_shard=3")
    remove(export)
    rows = {
        "inspect": inspect(sharded),
        "inspect --deep": inspect(sharded, "--deep"),
        "digest": run(sys.executable, "-m", "samerun", "digest", str(sharded)),
        "diff, equal": run(sys.executable, "-m", "samerun", "diff", str(sharded), str(other)),
    }
    for name, cost in rows.items():
        print(f"{name:<20}{size:>7g} GB | {cost.cpu:>6.2f} s {cost.anon:>4.0f} MB   {cost.wall:.2f} s", flush=True)
    for folder in (sharded, other):
        remove(folder)


if __name__ == "__main__":
    main()

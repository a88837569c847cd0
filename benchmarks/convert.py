"""Converting checkpoints, against the framework's own tools and against copying the same bytes.

python benchmarks/convert.py --size 1.4 --work /tmp/bench
python benchmarks/convert.py --size 0.5 1 2 4 --work /tmp/bench --skip-framework

Every row is a process of its own. `copied` is samerun without reading back: planned, compared with the source's
checksums, copied and flushed, by its library; ratios to `cp` give that first, then the whole verb. CPU seconds are user
and system time of that process and those it starts, memory is the peak of its anonymous pages (mapped files are the
page cache's). All are run one after the other, `--repeat` times; the least of each counts. Ratios are of CPU time, to
`cp`, to `cp` followed by flushing to disk (which samerun does before it renames, and `cp` leaves to the kernel's
threads), and to the framework's tool. What importing the framework alone costs is printed above.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDTH = 2048
LAYER = WIDTH * 1536 * 4 * 3  # bytes of one layer in float32: parameter and two moments

TORCH_SAVE = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; f({source!r}, {dest!r})"
FROM_TORCH = "from torch.distributed.checkpoint.format_utils import torch_save_to_dcp as f; f({source!r}, {dest!r})"
IMPORT = "import torch.distributed.checkpoint.format_utils"
SCRIPT = """
import torch, torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint import FileSystemReader
state = {{}}
planner = _EmptyStateDictLoadPlanner()
_load_state_dict(state, storage_reader=FileSystemReader({source!r}), planner=planner, no_dist=True)
def flat(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict): yield from flat(value, prefix + str(name) + ".")
        elif isinstance(value, torch.Tensor): yield prefix + str(name), value.contiguous()
save_file(dict(flat(state)), {dest!r})
"""
RESHARD = """
import os, sys, tempfile, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
WORLD = 3
def work(rank, meeting):
    dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    state = {{}}
    for name, item in FileSystemReader({source!r}).read_metadata().state_dict_metadata.items():
        if not hasattr(item, "chunks"):
            continue
        kind = item.properties.dtype
        if not item.size:
            state[name] = torch.empty((), dtype=kind)
            continue
        rows = -(-item.size[0] // WORLD)
        mine = max(0, min(rows, item.size[0] - rank * rows))
        local = torch.empty((mine, *item.size[1:]), dtype=kind)
        stride = torch.empty(item.size, device="meta").stride()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=item.size, stride=stride)
    dcp.load(state, checkpoint_id={source!r})
    dcp.save(state, checkpoint_id={dest!r})
    dist.destroy_process_group()
meeting = os.path.join(tempfile.mkdtemp(), "meeting")
children = []
for rank in range(WORLD):
    child = os.fork()
    if child == 0:
        work(rank, meeting)
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitpid(child, 0)[1] != 0 for child in children))
"""
COPY = """
import os
from samerun.convert.convert import open_place
from samerun.convert.prepare import prepare
from samerun.core.mesh import Layout
from samerun.execute.engine import Settings, execute_plan
from samerun.formats.detect import open_checkpoint
settings = Settings(threads=min(8, os.cpu_count() or 1))
layout = Layout.parse({layout!r}) if {layout!r} else None
prepared = prepare(open_checkpoint({source!r}), {dest!r}, to={to!r}, layout=layout, settings=settings)
place = open_place(prepared, settings)
execute_plan(prepared.plan, prepared.view, place.payload, place.journal, place.done, settings)
place.discard()
"""
FLUSHED = "cp -r {source!s} {dest!s} && find {dest!s} -type f -exec sync {{}} +"


@dataclass(frozen=True)
class Cost:
    """What one process and those it started cost. `anon` is the peak of their anonymous memory together, in MB;
    `written` are the bytes of pages that they made dirty, in GB."""

    wall: float
    cpu: float
    anon: float
    written: float = 0.0


def run(*command: str, ok: tuple[int, ...] = (0,)) -> Cost:
    """Runs a command to its end, looking at its memory all the while. Python keeps what it compiles, as installed."""
    began = time.monotonic()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
    peak = 0
    while True:
        done, status, usage = os.wait4(job.pid, os.WNOHANG)
        if done:
            break
        peak = max(peak, sum(map(_anonymous, _family(job.pid))))
        time.sleep(0.01)
    if os.waitstatus_to_exitcode(status) not in ok:
        raise SystemExit(f"{' '.join(command)[:200]} failed: {status}")
    job.returncode = 0
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(time.monotonic() - began, cpu, peak / 1024, usage.ru_oublock * 512 / 1e9)


def _family(pid: int) -> list[int]:
    """Returns a process and everything that it started."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return [pid]
    return [pid, *(one for text in lists for child in text.split() for one in _family(int(child)))]


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def write_export(folder: Path, size: float) -> None:
    """Writes `size` GB of model and AdamW state as samerun's own export, one tensor in memory at a time."""
    import json

    from samerun.core.state import LogicalState, ParamGroup, RecordedProgress
    from samerun.formats.safetensors.sidecar import dump_sidecar

    layers = max(1, round(size * 1e9 / LAYER))
    random = np.random.default_rng(0)
    header: dict[str, object] = {}
    at = 0
    keys = [f"{role}:layers.{n}.w" for n in range(layers) for role in ("param", "optim.exp_avg", "optim.exp_avg_sq")]
    steps = [f"optim.step:layers.{n}.w" for n in range(layers)]
    for key in keys + steps:
        shape = [1536, WIDTH] if key in set(keys) else []
        size = 4 * int(np.prod(shape))
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with open(folder / "state.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        values = random.random((1536, WIDTH), dtype=np.float32)
        for _ in keys:
            values += np.float32(0.1)  # drawing all of them would take longer than everything that is measured
            file.write(values.data)
        file.write(np.full(len(steps), 5.0, np.float32).tobytes())
    groups = (ParamGroup(tuple(f"layers.{n}.w" for n in range(layers)), {"lr": 1e-3, "weight_decay": 0.1}),)
    state = LogicalState(format="x", tensors={}, groups=groups, progress=RecordedProgress(update=5))
    (folder / "state.json").write_text(dump_sidecar(state))


def convert(source: Path, dest: Path, *options: str) -> Cost:
    """Runs `samerun convert`."""
    return run(sys.executable, "-m", "samerun", "convert", str(source), str(dest), *options)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, nargs="*", default=[1.4], help="gigabytes of model and optimizer")
    parser.add_argument("--work", type=Path, required=True, help="an empty directory with five times that space")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--skip-framework", action="store_true")
    parser.add_argument("--only", default="", help="rows with this in their name")
    args = parser.parse_args()
    for size in args.size:
        folder = args.work / f"{size:g}"
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder, size, args.repeat, args.only, framework=not args.skip_framework)
        shutil.rmtree(folder)


def measure(work: Path, size: float, repeat: int, only: str, *, framework: bool) -> None:
    """Prints the table of one size."""
    export, sharded, file = work / "export", work / "dcp4", work / "whole.pt"
    write_export(export, size)
    convert(export, sharded, "--to", "dcp", "--layout", "dp_shard=4")
    convert(sharded, file, "--to", "torch")
    remove(export)
    imported = f"; framework's import {run(sys.executable, '-c', IMPORT).cpu:.1f} CPU s" if framework else ""
    print(f"{file.stat().st_size / 1e9:.2f} GB of values{imported}")
    head = (
        f"{'work':<20}{'samerun':>20} {'copied':>7} | {'cp':>12} {'cp, flushed':>14} | {'tool':>16} | "
        f"{'x cp':>11} {'x flushed':>11} {'x tool':>7} | load"
    )
    units = (
        f"{'CPU s  wall   MB':>20} {'CPU s':>7} | {'CPU s  wall':>12} {'CPU s  wall':>14} | {'CPU s  wall   MB':>16}"
    )
    print(f"{head}\n{'':<20}{units} |")
    rows = [
        ("DCP -> torch.save", sharded, ["--to", "torch"], TORCH_SAVE),
        ("torch.save -> DCP", file, ["--to", "dcp"], FROM_TORCH),
        ("DCP -> safetensors", sharded, ["--to", "safetensors"], SCRIPT),
        ("DCP 4 -> DCP 3", sharded, ["--to", "dcp", "--layout", "dp_shard=3"], RESHARD),
    ]
    for name, source, options, script in (row for row in rows if only in row[0]):
        copied, flushed, mine, unproved, theirs = [], [], [], [], []
        facts = {"to": options[1], "layout": options[3] if len(options) > 3 else ""}
        for _ in range(repeat):
            dest = work / "dest"
            copied.append(run("cp", "-r", str(source), str(dest)))
            remove(dest)
            flushed.append(run("sh", "-c", FLUSHED.format(source=source, dest=dest)))
            remove(dest)
            mine.append(convert(source, dest, *options))
            remove(dest)
            remove(work / "dest.samerun-proof.json")
            unproved.append(run(sys.executable, "-c", COPY.format(source=str(source), dest=str(dest), **facts)))
            if framework:
                theirs.append(run(sys.executable, "-c", script.format(source=str(source), dest=str(dest))))
                remove(dest)
        tool = least(theirs) if theirs else None
        print(_row(name, least(mine), least(unproved), least(copied), least(flushed), tool), flush=True)


def least(found: list[Cost]) -> Cost:
    """Returns the least CPU and wall time and the largest memory of several runs."""
    wall, cpu = min(x.wall for x in found), min(x.cpu for x in found)
    return Cost(wall, cpu, max(x.anon for x in found), max(x.written for x in found))


def _row(name: str, mine: Cost, unproved: Cost, copied: Cost, flushed: Cost, tool: Cost | None) -> str:
    theirs = f"{tool.cpu:>5.1f} {tool.wall:>5.1f} {tool.anon:>4.0f}" if tool else ""
    ratio = f"{mine.cpu / tool.cpu:.2f}" if tool else ""
    return (
        f"{name:<20}{mine.cpu:>9.2f} {mine.wall:>5.1f} {mine.anon:>4.0f} {unproved.cpu:>7.2f} | {copied.cpu:>6.2f} "
        f"{copied.wall:>5.1f} {flushed.cpu:>8.2f} {flushed.wall:>5.1f} | {theirs:>16} | "
        f"{unproved.cpu / copied.cpu:>5.2f} {mine.cpu / copied.cpu:>5.2f} {unproved.cpu / flushed.cpu:>5.2f} "
        f"{mine.cpu / flushed.cpu:>5.2f} {ratio:>7} | {os.getloadavg()[0]:.0f}"
    )


def remove(path: Path) -> None:
    """Removes a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

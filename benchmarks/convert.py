"""Converting checkpoints, against the framework's own tools and against copying the same bytes.

python benchmarks/convert.py --gigabytes 1.4 --work /tmp/bench

Every row is a process of its own. CPU seconds are user and system time of that process, memory is the peak of its
anonymous pages (mapped files are the page cache's). Ratios are of CPU time, to `cp` and to the framework's tool; what
importing the framework alone costs is printed above.
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
_load_state_dict(state, FileSystemReader({source!r}), _EmptyStateDictLoadPlanner(), no_dist=True)
def flat(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict): yield from flat(value, prefix + str(name) + ".")
        elif isinstance(value, torch.Tensor): yield prefix + str(name), value.contiguous()
save_file(dict(flat(state)), {dest!r})
"""


@dataclass(frozen=True)
class Cost:
    """What one process cost. `anon` is the peak of its anonymous memory in MB."""

    wall: float
    cpu: float
    anon: float


def run(*command: str) -> Cost:
    """Runs a command to its end, looking at its memory all the while."""
    began = time.monotonic()
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while True:
        done, status, usage = os.wait4(job.pid, os.WNOHANG)
        if done:
            break
        peak = max(peak, _anonymous(job.pid))
        time.sleep(0.01)
    if status:
        raise SystemExit(f"{' '.join(command)[:200]} failed: {status}")
    job.returncode = 0
    return Cost(time.monotonic() - began, usage.ru_utime + usage.ru_stime, peak / 1024)


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def write_export(folder: Path, layers: int) -> None:
    """Writes a model with AdamW's state as samerun's own export, one tensor in memory at a time."""
    import json

    from samerun.core.state import LogicalState, ParamGroup, RecordedProgress
    from samerun.formats.safetensors.sidecar import dump_sidecar

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
        for _ in keys:
            file.write(random.random((1536, WIDTH), dtype=np.float32).tobytes())
        file.write(np.full(len(steps), 5.0, np.float32).tobytes())
    groups = (ParamGroup(tuple(f"layers.{n}.w" for n in range(layers)), {"lr": 1e-3, "weight_decay": 0.1}),)
    state = LogicalState(format="x", tensors={}, groups=groups, progress=RecordedProgress(update=5))
    (folder / "state.json").write_text(dump_sidecar(state))


def convert(source: Path, dest: Path, *options: str) -> Cost:
    """Runs `samerun convert`; warnings about the synthetic checkpoint are none of its business."""
    allow = ("SR-RES-NOTHING", "SR-SCHED-MISSING", "SR-RNG-MISSING", "SR-DATA-MISSING")
    allowed = [part for code in allow for part in ("--allow", code)]
    return run(sys.executable, "-m", "samerun", "convert", str(source), str(dest), *options, *allowed)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.4)
    parser.add_argument("--work", type=Path, required=True, help="an empty directory with four times that space")
    parser.add_argument("--skip-framework", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    export, sharded, file = args.work / "export", args.work / "dcp4", args.work / "whole.pt"
    if not export.exists():
        write_export(export, max(1, round(args.gigabytes * 1e9 / LAYER)))
    size = (export / "state.safetensors").stat().st_size / 1e9
    if not sharded.exists():
        convert(export, sharded, "--to", "dcp", "--layout", "dp_shard=4")
    if not file.exists():
        convert(sharded, file, "--to", "torch")
    imported = run(sys.executable, "-c", IMPORT) if not args.skip_framework else None
    rows = [
        ("DCP -> torch.save", sharded, ["--to", "torch"], TORCH_SAVE),
        ("torch.save -> DCP", file, ["--to", "dcp"], FROM_TORCH),
        ("DCP -> safetensors", sharded, ["--to", "safetensors"], SCRIPT),
        ("DCP 4 -> DCP 3", sharded, ["--to", "dcp", "--layout", "dp_shard=3"], None),
    ]
    print(f"{size:.2f} GB of values; framework's import {imported.cpu:.1f} CPU s" if imported else f"{size:.2f} GB")
    print(f"{'work':<22}samerun CPU s  wall s  anon MB | cp CPU s  wall s | tool CPU s  anon MB |    x cp  x tool")
    for name, source, options, script in rows:
        copy, mine, theirs = args.work / "copy", args.work / "mine", args.work / "theirs"
        for path in (copy, mine, theirs, args.work / "mine.samerun-proof.json"):
            _remove(path)
        copied = run("cp", "-r", str(source), str(copy))
        _remove(copy)
        made = convert(source, mine, *options)
        _remove(mine)
        tool = ratio = ""
        if script is not None and imported is not None:
            found = run(sys.executable, "-c", script.format(source=str(source), dest=str(theirs)))
            tool = f"{found.cpu:>9.1f} {found.anon:>9.0f}"
            ratio = f"{made.cpu / found.cpu:.2f}"
            _remove(theirs)
        print(
            f"{name:<22}{made.cpu:>12.1f} {made.wall:>8.1f} {made.anon:>8.0f} |{copied.cpu:>9.1f} {copied.wall:>7.1f} |"
            f" {tool:>20} | {made.cpu / copied.cpu:>8.2f}  {ratio:>6}",
            flush=True,
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

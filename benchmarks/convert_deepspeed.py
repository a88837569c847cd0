"""Converting ZeRO checkpoints, against DeepSpeed's own tools and against copying the same bytes.

python benchmarks/convert_deepspeed.py --parameters 110 --work /tmp/bench

Needs DeepSpeed. A real job of several gloo processes trains a model of so many millions of parameters for one update in
bf16 with AdamW and saves it at ZeRO 2 and 3. Every row is a process of its own; see `convert.py` for what is measured.
The tools' import is measured apart and taken off their time; samerun's own start stays in. The last ratio is of whole
processes, import and all. `written` is everything that was written to disk on the way, as a multiple of the result.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from convert import Cost, convert, least, remove, run

JOB = """
import os, sys, tempfile, deepspeed, deepspeed.ops, torch, torch.distributed as dist
from torch import nn
WORLD, STAGE, LAYERS, WIDTH = {ranks}, {stage}, {layers}, {width}
def work(rank, meeting):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=WORLD)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    config = dict(train_batch_size=WORLD, train_micro_batch_size_per_gpu=1, bf16=dict(enabled=True),
        zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False, zero_optimization=dict(stage=STAGE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint({dest!r})
    dist.barrier()
meeting = os.path.join(tempfile.mkdtemp(), "meeting")
children = []
for rank in range(WORLD):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(rank, meeting)
            code = 0
        finally:
            os._exit(code)
    children.append(child)
sys.exit(max(os.waitpid(child, 0)[1] != 0 for child in children))
"""
UNIVERSAL = (
    "-m",
    "deepspeed.checkpoint.ds_to_universal",
    "--input_folder",
    "{tag}",
    "--output_folder",
    "{dest}",
    "--inject_missing_state",
)
TO_FP32 = ("-m", "deepspeed.utils.zero_to_fp32", "{folder}", "{dest}", "--max_shard_size", "1TB")
WIDTH = 1536


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=110, help="millions")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--work", type=Path, required=True, help="an empty directory with ten times that space")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    print(
        f"{'work':<22}{'samerun':>30} | {'cp':>6} | {'tool without import':>30} | "
        f"{'x tool':>6} {'x cp':>6} {'x whole tool':>12}"
    )
    print(f"{'':<22}{'CPU s   wall    MB  written':>30} | {'CPU s':>6} | {'CPU s   wall    MB  written':>30} |")
    for stage in (2, 3):
        folder = args.work / f"zero{stage}"
        layers = max(1, round(args.parameters * 1e6 / WIDTH**2))
        remove(folder)
        print(f"making {folder}", file=sys.stderr)
        script = JOB.format(ranks=args.ranks, stage=stage, layers=layers, width=WIDTH, dest=str(folder))
        run(sys.executable, "-c", script)
        measure(f"ZeRO {stage} -> universal", folder, args, ("--to", "universal"), UNIVERSAL)
        if stage == 3:
            fp32 = ("--to", "torch", "--weights-only", "--masters", "params")
            measure("ZeRO 3 -> one fp32 file", folder, args, fp32, TO_FP32)
        shutil.rmtree(folder)


def measure(name: str, folder: Path, args: argparse.Namespace, options: tuple[str, ...], tool: tuple[str, ...]) -> None:
    """Prints one row."""
    tag = folder / (folder / "latest").read_text().strip()
    dest = args.work / "dest"
    importing = run(sys.executable, "-c", f"import {tool[1]}").cpu
    copied, mine, theirs = [], [], []
    for _ in range(args.repeat):
        copied.append(run("cp", "-r", str(tag), str(dest)))
        remove(dest)
        mine.append(convert(tag, dest, *options))
        my_size = size_of(dest)
        remove(dest)
        remove(dest.with_name("dest.samerun-proof.json"))
        filled = [part.format(tag=tag, folder=folder, dest=dest) for part in tool]
        theirs.append(run(sys.executable, *filled))
        their_size = size_of(dest)
        remove(dest)
    own, other, copy = least(mine), least(theirs), least(copied)
    other_cpu = other.cpu - importing
    print(
        f"{name:<22}{_columns(own.cpu, own, my_size)} | {copy.cpu:>6.2f} | {_columns(other_cpu, other, their_size)} | "
        f"{own.cpu / other_cpu:>6.2f} {own.cpu / copy.cpu:>6.2f} {own.cpu / other.cpu:>12.2f}   "
        f"({my_size:.2f} GB, the tool's {their_size:.2f})",
        flush=True,
    )


def _columns(cpu: float, cost: Cost, size: float) -> str:
    return f"{cpu:>9.2f} {cost.wall:>6.1f} {cost.anon:>5.0f} {cost.written / size:>7.2f}"


def size_of(path: Path) -> float:
    """Returns the bytes of all files, in GB."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e9


if __name__ == "__main__":
    main()

"""Converts checkpoints to DCP and has torch load them at many layouts: how many tensors, how many differ in a bit.

    PYTHONPATH=src:tests python scripts/load_matrix.py CKPT... [--world-sizes 1 2 3 4 8]

Each checkpoint is written as a DCP directory (for one layout, then loaded by all), and real gloo ranks load it through
`get_state_dict`, `dcp.load` and `set_state_dict` into FSDP2, HSDP and TP x FSDP2 models of its names and shapes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from samerun.core.mesh import Layout
from samerun.formats.dcp.write import lay_out
from samerun.formats.detect import open_checkpoint
from support.gloo import run_ranks
from support.skeleton import build_model, build_optimizer, check_loaded, distribute, load_dcp
from support.written import carry_out, source_of

TARGETS = {
    1: ["dp_shard=1"],
    2: ["dp_shard=2", "tp=2"],
    3: ["dp_shard=3"],
    4: ["dp_shard=4", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"],
    8: ["dp_shard=8", "dp_replicate=2,dp_shard=2,tp=2"],
}


def load(rank: int, world_size: int, source: str, folder: str, text: str) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")
    checkpoint = open_checkpoint(Path(source))
    model = distribute(build_model(checkpoint.state), Layout.parse(text))
    optimizer = build_optimizer(model, checkpoint.state)
    root = "optim" if any(name.startswith("optim.") for name in _names(folder)) else "optimizer"
    load_dcp(Path(folder), model, optimizer, names=("model", root))
    return len(checkpoint.state.tensors), check_loaded(model, optimizer, checkpoint)


def _names(folder: str) -> list[str]:
    import torch.distributed.checkpoint as dcp

    return list(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[1, 2, 3, 4], choices=TARGETS)
    parser.add_argument("--written-for", default=None, help="the layout to write for")
    args = parser.parse_args()
    total = wrong = 0
    for source in args.checkpoints:
        checkpoint = open_checkpoint(source)
        with tempfile.TemporaryDirectory() as scratch:
            layout = Layout.parse(args.written_for) if args.written_for else None
            folder = carry_out(lay_out(source_of(checkpoint), layout), checkpoint, Path(scratch) / "ckpt")
            for text in [text for size in args.world_sizes for text in TARGETS[size]]:
                start = time.monotonic()
                ranks = run_ranks(Layout.parse(text).world_size, load, str(source), str(folder), text)
                found = {key for _, keys in ranks for key in keys}
                total, wrong = total + ranks[0][0], wrong + len(found)
                told = f"{ranks[0][0] - len(found)} of {ranks[0][0]} equal"
                print(f"{source}  {text}  {told}  {time.monotonic() - start:.1f} s  {sorted(found)[:4]}", flush=True)
    print(f"{total} tensors, {wrong} differ")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

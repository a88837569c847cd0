"""Inspecting a checkpoint of ordinary size in each sharded format: the whole process, CPU seconds and memory.

python benchmarks/inspect_ordinary.py --size 1.5 --work /tmp/bench

Writes model and AdamW state of so many gigabytes, four matrices and two vectors per layer, and converts it: a directory
of four ranks for `dcp`, `zero` and `universal`, one file for `torch` and `safetensors`, torch_dist for `megatron` (from
the names and arguments of a golden checkpoint, its sizes multiplied). Then inspects each, plainly and with `--deep`.
CPU seconds are user and system time, memory is the peak of anonymous pages; the least and the largest of `--repeat`.
Beside them what a process costs that only imports NumPy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert import convert, least, remove, run

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "megatron" / "fr_tp2pp2"
TIMES = 128  # the golden model's width and vocabulary, multiplied
STEP = 3  # of the golden checkpoint, in its groups too
SIZES = {"F32": 4, "BF16": 2, "F64": 8}
FORMATS = {
    "dcp": ("--to", "dcp", "--layout", "dp_shard=4"),
    "torch": ("--to", "torch"),
    "zero 2": ("--to", "zero", "--stage", "2", "--layout", "dp=4"),
    "zero 3": ("--to", "zero", "--stage", "3", "--layout", "dp_shard=4"),
    "universal": ("--to", "universal"),
}


def write(folder: Path, tensors: Mapping[str, tuple[str, list[int]]], state: str) -> None:
    """Writes samerun's own export, a few megabytes in memory at a time. Values are random."""
    random = np.random.default_rng(0)
    header: dict[str, Any] = {}
    at = 0
    for key, (kind, shape) in tensors.items():
        end = at + SIZES[kind] * int(np.prod(shape))
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with open(folder / "state.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, (kind, shape) in tensors.items():
            for block in _values(random, kind, int(np.prod(shape)), step=".step:" in key):
                file.write(block)
    (folder / "state.json").write_text(state)


def _values(random: np.random.Generator, kind: str, count: int, *, step: bool) -> Iterator[bytes]:
    if step:
        yield np.full(count, STEP, {"F32": np.float32, "F64": np.float64}[kind]).tobytes()
        return
    for start in range(0, count, 1 << 20):
        values = random.random(min(1 << 20, count - start), dtype=np.float32)
        yield values.tobytes() if kind == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_plain(folder: Path, size: float) -> None:
    """Writes a model of transformer layers in float32 with AdamW's state."""
    from samerun.core.state import LogicalState, ParamGroup, RecordedProgress
    from samerun.formats.safetensors.sidecar import dump_sidecar

    width = 768
    layer = {
        "attn.weight": [3 * width, width],
        "proj.weight": [width, width],
        "norm": [width],
        "up": [4 * width, width],
        "down": [width, 4 * width],
        "norm2": [width],
    }
    each = sum(int(np.prod(shape)) for shape in layer.values()) * 12
    names = {f"layers.{n}.{name}": s for n in range(max(1, round(size * 1e9 / each))) for name, s in layer.items()}
    tensors = {
        f"{role}:{n}": ("F32", s) for n, s in names.items() for role in ("param", "optim.exp_avg", "optim.exp_avg_sq")
    }
    tensors |= {f"optim.step:{name}": ("F32", []) for name in names}
    group = ParamGroup(tuple(names), {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1})
    state = LogicalState(format="x", tensors={}, groups=(group,), progress=RecordedProgress(update=STEP))
    write(folder, tensors, dump_sidecar(state))


def write_megatron(folder: Path, size: float) -> None:
    """Writes the golden Megatron checkpoint, its sizes multiplied, as torch_dist."""
    small, large = folder.parent / "golden", folder.parent / "large"
    convert(GOLDEN, small, "--to", "safetensors")
    state = json.loads((small / "state.json").read_text())
    args = state["objects"]["args"]
    width, vocabulary, layers = args["hidden_size"], args["padded_vocab_size"], args["num_layers"]
    deep = layers * max(1, round(size * 1e9 / (14 * layers * 792 * TIMES**2)))
    widened = {width, args["ffn_hidden_size"], 2 * args["ffn_hidden_size"], 2 * width, args["vocab_size"], vocabulary}
    args |= {name: args[name] * TIMES for name in ("hidden_size", "ffn_hidden_size", "kv_channels", "vocab_size")}
    args |= {"padded_vocab_size": vocabulary * TIMES, "num_layers": deep}
    raw = (small / "state.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    tensors = {
        key: (entry["dtype"], [deep if d == layers else TIMES * d if d in widened else d for d in entry["shape"]])
        for key, entry in header.items()
        if key != "__metadata__"
    }
    write(large, tensors, json.dumps(state))
    convert(large, folder, "--to", "megatron")
    remove(small)
    remove(large)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.5, help="gigabytes of model and optimizer")
    parser.add_argument("--work", type=Path, required=True, help="an empty directory with three times that space")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="formats with this in their name")
    args = parser.parse_args()
    export = args.work / "export"
    write_plain(export, args.size)
    base = least([run(sys.executable, "-c", "import numpy") for _ in range(args.repeat)])
    print(f"{'':<12}{'GB':>6} | {'inspect':>22} | {'inspect --deep':>22}")
    print(f"{'':<12}{'':>6} | {'CPU s  wall s   MB':>22} | {'CPU s  wall s   MB':>22}")
    print(f"{'NumPy alone':<12}{'':>6} | {base.cpu:>7.2f} {base.wall:>7.2f} {base.anon:>5.0f}")
    for name in (*FORMATS, "safetensors", "megatron"):
        if args.only in name:
            measure(name, args.work, args.size, args.repeat)
    remove(export)


def measure(name: str, work: Path, size: float, repeat: int) -> None:
    """Prints one row."""
    made = work / "made"
    if name == "megatron":
        write_megatron(made, size)
    elif name != "safetensors":
        convert(work / "export", made, *FORMATS[name])
    path = work / "export" if name == "safetensors" else made
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    stored = sum(file.stat().st_size for file in files) / 1e9
    (path / "samerun-proof.json" if path.is_dir() else work / "made.samerun-proof.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "samerun", "inspect", str(path)]
    costs = [least([run(*command, *more, ok=(0, 1)) for _ in range(repeat)]) for more in ([], ["--deep"])]
    shown = " | ".join(f"{cost.cpu:>7.2f} {cost.wall:>7.2f} {cost.anon:>5.0f}" for cost in costs)
    print(f"{name:<12}{stored:>6.2f} | {shown}", flush=True)
    remove(made)


if __name__ == "__main__":
    main()

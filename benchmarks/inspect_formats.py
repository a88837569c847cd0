"""How long `samerun inspect` takes on an ordinary checkpoint of each format: the whole process, CPU seconds.

    python benchmarks/inspect_formats.py [--repeat 3]

Reads the golden checkpoints of the tests. CPU seconds (user and system) are the least of the repeats, which a shared
machine disturbs less than wall time; beside them the ratio to a process that only imports NumPy.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
CASES = {
    "dcp": GOLDEN / "statedict" / "lightning-sharded" / "step2.ckpt",
    "torch": GOLDEN / "statedict" / "torch" / "zip.pt",
    "ranklocal": GOLDEN / "statedict" / "bare",
    "fsdp1": GOLDEN / "statedict" / "fsdp1-orig",
    "zero 2": GOLDEN / "deepspeed" / "z2_align_rr",
    "zero 3": GOLDEN / "deepspeed" / "z3_sub_bf16",
    "universal": GOLDEN / "deepspeed" / "universal_z3_bf16",
    "huggingface": GOLDEN / "statedict" / "trainer" / "checkpoint-4",
    "accelerate": GOLDEN / "statedict" / "accelerate",
    "lightning": GOLDEN / "statedict" / "lightning" / "step3.ckpt",
    "safetensors": GOLDEN / "statedict" / "shards",
    "zero in accelerate": GOLDEN / "wrapped" / "accelerate_z2",
}


def cpu_seconds(line: list[str], repeat: int) -> float:
    """Returns the least CPU seconds that a process took."""
    times: list[float] = []
    for _ in range(repeat):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(line, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    base = cpu_seconds([sys.executable, "-c", "import numpy"], repeat)
    print(f"{'import numpy':<20} {base:6.2f} s CPU")
    for name, path in CASES.items():
        seconds = cpu_seconds([sys.executable, "-m", "samerun", "inspect", str(path)], repeat)
        print(f"{name:<20} {seconds:6.2f} s CPU  {seconds / base:5.1f} x", flush=True)


if __name__ == "__main__":
    main()

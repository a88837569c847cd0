"""The additive digest of a buffer in memory on one core, against a plain copy of the same buffer.

python benchmarks/digest_kernel.py --mebibytes 256
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np


def best(function: Callable[[], object], repeats: int = 5) -> float:
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
    parser.add_argument("--mebibytes", type=int, default=256)
    args = parser.parse_args()
    import ml_dtypes

    from samerun.core.digest import bits_of
    from samerun.verify.kernel import sum_terms

    num_bytes = args.mebibytes << 20
    raw = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    target = np.empty_like(raw)
    copying = best(lambda: np.copyto(target, raw))
    print(f"copy       {num_bytes / copying / 1e9:6.2f} GB/s")
    start, seed = np.zeros(1, np.uint64), np.uint64(1)
    for name, kind in (("float32", np.dtype(np.float32)), ("bfloat16", np.dtype(ml_dtypes.bfloat16))):
        values = raw.view(kind)
        bits = bits_of(values)
        sum_terms(bits[:8], start, 8, seed)  # compiles
        seconds = best(lambda bits=bits: sum_terms(bits, start, bits.size, seed))
        print(f"{name:<9}  {num_bytes / seconds / 1e9:6.2f} GB/s   {copying / seconds:5.2f} of a copy")


if __name__ == "__main__":
    main()

"""The additive digest and the CRC-32 of a buffer in memory on one core, against copying it, xxh3_128 and zlib.

python benchmarks/digest_kernel.py --size 256
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable

import numpy as np


def best(function: Callable[[], object], repeats: int = 5) -> float:
    """Returns the least of several CPU times, in seconds."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="mebibytes")
    args = parser.parse_args()
    import ml_dtypes

    from samerun.core.digest import bits_of
    from samerun.stores.crc32 import crc32
    from samerun.verify.state.kernel import sum_terms

    num_bytes = args.size << 20
    raw = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    target = np.empty_like(raw)
    copying = best(lambda: np.copyto(target, raw))
    print(f"copy       {num_bytes / copying / 1e9:6.2f} GB/s")
    hashing = 0.0
    try:
        import xxhash

        hashing = best(lambda: xxhash.xxh3_128(raw).digest())
        print(f"xxh3_128   {num_bytes / hashing / 1e9:6.2f} GB/s")
    except ImportError:
        print("xxh3_128   not installed (pip install xxhash)")
    start, seed = np.zeros(1, np.uint64), np.uint64(1)
    for name, kind in (("float32", np.dtype(np.float32)), ("bfloat16", np.dtype(ml_dtypes.bfloat16))):
        values = raw.view(kind)
        bits = bits_of(values)
        sum_terms(bits[:8], start, 8, seed)  # compiles
        seconds = best(lambda bits=bits: sum_terms(bits, start, bits.size, seed))
        beside = f"   {hashing / seconds:5.2f} of xxh3_128" if hashing else ""
        print(f"{name:<9}  {num_bytes / seconds / 1e9:6.2f} GB/s   {copying / seconds:5.2f} of a copy{beside}")
    summing = best(lambda: crc32(raw.data))
    plain = best(lambda: zlib.crc32(raw.data))
    print(f"crc32      {num_bytes / summing / 1e9:6.2f} GB/s   {plain / summing:5.2f} of zlib's speed")


if __name__ == "__main__":
    main()

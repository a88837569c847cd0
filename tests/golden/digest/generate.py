"""Writes vectors.json, prints the table of docs/digest.md. The digests come from plain integers, not from samerun."""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from pathlib import Path

HERE = Path(__file__).parent
MASK = (1 << 64) - 1


def digest(key: str, dtype: str, shape: list[int], words: list[int]) -> str:
    """Follows the definition in docs/digest.md word by word."""
    text = f"samerun-digest/1\n{key}\n{dtype}\n{','.join(map(str, shape))}"
    seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
    total = 0
    if 0 in shape:
        return f"{seed:016x}"
    for index, bits in enumerate(words):
        z = bits ^ ((seed + index * 0x9E3779B97F4A7C15) & MASK)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        total += z ^ (z >> 31)
    return f"{total & MASK:016x}"


def floats(*values: float) -> list[int]:
    return [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]


# (key, dtype, shape, the elements' bits as integers, what they are)
CASES = [
    ("param:w", "float32", [2, 3], floats(0, 1, 2, 3, 4, 5), "0 1 2 3 4 5"),
    ("param:w", "float32", [3, 2], floats(0, 1, 2, 3, 4, 5), "the same, another shape"),
    ("param:v", "float32", [2, 3], floats(0, 1, 2, 3, 4, 5), "the same, another key"),
    ("param:w", "float32", [2, 3], floats(1, 0, 2, 3, 4, 5), "two elements exchanged"),
    ("param:w", "float32", [2, 3], floats(-0.0, 1, 2, 3, 4, 5), "-0 for 0"),
    ("param:w", "bfloat16", [3], [0x3F80, 0xBF80, 0x7FC0], "1 -1 nan"),
    ("param:w", "float16", [2], [0x3C00, 0xFC00], "1 -inf"),
    ("param:w", "float8_e4m3fn", [2], [0x38, 0xB8], "1 -1"),
    ("optim.exp_avg:layers.0.w", "float32", [4], [0, 0, 0, 0], "zeros"),
    ("buffer:seen", "int64", [], [7], "7"),
    ("buffer:seen", "int64", [], [MASK], "-1"),
    ("buffer:mask", "bool", [3], [1, 0, 1], "true false true"),
    ("buffer:freqs", "complex64", [2], floats(1, 2, 3, -4), "1+2i 3-4i"),
    ("param:empty", "float32", [0, 5], [], "no elements"),
    ("param:empty", "float32", [5, 0], [], "no elements, another shape"),
    ("param:empty", "int64", [0, 5], [], "no elements, another type"),
]


def main() -> None:
    vectors = [
        {
            "key": key,
            "dtype": dtype,
            "shape": shape,
            "bits": [f"{word:x}" for word in words],
            "digest": digest(key, dtype, shape, words),
        }
        for key, dtype, shape, words, _ in CASES
    ]
    (HERE / "vectors.json").write_text(json.dumps(vectors, indent=1) + "\n")
    for vector, case in zip(vectors, CASES, strict=True):
        shape = f"({', '.join(map(str, vector['shape']))})"
        print(f"| `{vector['key']}` | {vector['dtype']} | {shape} | {case[4]} | `{vector['digest']}` |")


if __name__ == "__main__":
    main()

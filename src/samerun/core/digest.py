"""The additive digest: one 64-bit number per tensor that does not see how the tensor is cut up.

Definition (version 1; `docs/digest.md` has the reasons and test vectors). All arithmetic is modulo 2**64.

    seed   = blake2b(text, 8 bytes), read big-endian, of the UTF-8 text
             "samerun-digest/1\\n<key>\\n<dtype>\\n<shape, decimal, joined by commas>"
    term_i = mix(bits_i XOR (seed + i * 0x9E3779B97F4A7C15))
    digest = sum of term_i over every element i; the seed itself if there is none

`i` is the element's row-major index in the *global* tensor and `bits_i` its stored bits, zero-extended to 64. A complex
number counts as two elements, real part first. `mix` is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast
splittable pseudorandom number generators, OOPSLA 2014; the constants are Stafford's variant 13).

For one index `mix` is a bijection of the bits, so a change in exactly one element always changes the digest. Because
terms are added, the digests of disjoint parts add up to the digest of the whole, whoever computes them and in which
order. It guards against accidents, not against an adversary.

This module is the definition in plain NumPy. The fast kernels, in `samerun.verify.state.digest` for files and in
`samerun.train.digest` for tensors in a job, give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DType, parse_dtype

VERSION = 1
MASK = 0xFFFF_FFFF_FFFF_FFFF
STRIDE = 0x9E37_79B9_7F4A_7C15  # 2**64 / golden ratio, odd: successive indices spread evenly over 64 bits
MULTIPLIER_1 = 0xBF58_476D_1CE4_E5B9
MULTIPLIER_2 = 0x94D0_49BB_1331_11EB

_CHUNK_ELEMENTS = 1 << 16  # a few hundred KiB of temporaries: stays in the L2 cache


def digest_seed(key: str, dtype: DType, shape: Sequence[int]) -> int:
    """Returns the seed that ties a digest to its tensor's key, element type and global shape.

    >>> f"{digest_seed('param:w', parse_dtype('float32'), (2, 3)):016x}"
    '7c273d4c02f5cac0'
    """
    text = f"samerun-digest/{VERSION}\n{key}\n{dtype.name}\n{','.join(str(size) for size in shape)}"
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def to_hex(digest: int) -> str:
    """Returns the 16 hexadecimal digits under which a digest is written; any integer is reduced modulo 2**64 first."""
    return f"{digest & MASK:016x}"


def whole_digest(total: int, key: str, dtype: DType, shape: Sequence[int]) -> str:
    """Returns the digest of a whole tensor from the sum of its parts' terms, as 16 hexadecimal digits.

    A tensor without elements has its seed as digest, so that shape, type and name show there too. Whoever knows the
    whole adds it once: the parts, all of them empty, add nothing.

    >>> kind = parse_dtype("float32")
    >>> whole_digest(7, "param:w", kind, (2, 3)), whole_digest(0, "param:w", kind, (0,))
    ('0000000000000007', 'a8febfb4874c88e8')
    """
    return to_hex(digest_seed(key, dtype, shape) if 0 in shape else total)


def add_digests(parts: Iterable[int]) -> int:
    """Returns the digest of a tensor from the digests of disjoint parts that together cover it."""
    return sum(parts) & MASK


def state_digest(digests: Mapping[str, str]) -> str:
    """Returns one digest of a whole state from the digests of its tensors, whatever order they come in.

    >>> state_digest({"param:b": "02", "param:a": "01"}) == state_digest({"param:a": "01", "param:b": "02"})
    True
    """
    text = "".join(f"{key} {digests[key]}\n" for key in sorted(digests))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """A box in a global tensor as runs of consecutive row-major indices, in the box's own row-major order.

    `starts` holds the first global index of each run, shape `(runs,)` uint64; every run has `length` elements.
    """

    starts: npt.NDArray[np.uint64]
    length: int


def box_runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Runs:
    """Returns the runs of the box at `offsets` with `sizes` in a tensor of global `shape` (all in elements).

    >>> box_runs((4, 6), (1, 2), (2, 3)).starts.tolist(), box_runs((4, 6), (1, 0), (2, 6)).starts.tolist()
    ([8, 14], [6])

    Raises:
        ValueError: if the box does not lie inside the tensor.
    """
    shape, offsets, sizes = ([int(number) for number in numbers] for numbers in (shape, offsets, sizes))
    if not len(shape) == len(offsets) == len(sizes) or any(
        offset < 0 or size < 0 or offset + size > full for full, offset, size in zip(shape, offsets, sizes, strict=True)
    ):
        raise ValueError(f"box at {tuple(offsets)} of {tuple(sizes)} is not inside a tensor of {tuple(shape)}")
    if 0 in sizes:
        return Runs(np.zeros(0, np.uint64), 0)
    inner = _first_whole_dim(shape, sizes)
    cut = max(inner - 1, 0)  # dims after `cut` are whole, so `cut` and everything after it is consecutive
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = np.zeros(1, np.uint64)
    for dim in range(cut):
        steps = (offsets[dim] + np.arange(sizes[dim], dtype=np.uint64)) * np.uint64(strides[dim])
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    base = sum(offsets[dim] * strides[dim] for dim in range(cut, len(shape)))
    return Runs(starts + np.uint64(base), math.prod(sizes[cut:]))


def _first_whole_dim(shape: Sequence[int], sizes: Sequence[int]) -> int:
    dim = len(shape)
    while dim and sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    return dim


def bits_of(array: npt.NDArray[np.generic]) -> npt.NDArray[np.unsignedinteger]:
    """Returns the elements' bits as unsigned integers in a contiguous vector; a complex number gives two."""
    flat = np.ascontiguousarray(array).reshape(-1)
    width = flat.dtype.itemsize // 2 if flat.dtype.kind == "c" else flat.dtype.itemsize
    return flat.view(f"u{width}")


def sum_unordered(bits: npt.NDArray[np.unsignedinteger]) -> int:
    """Returns a sum over elements, modulo 2**64, that their places do not change; parts of a tensor add up.

    Equal sums of two tensors of one shape whose digests differ say that the values are the same ones in other places.
    It tells kinds of damage apart and proves nothing: unlike the digest it is easily forged.
    """
    wide = bits.astype(np.uint64)
    with np.errstate(over="ignore"):
        terms = (wide * np.uint64(MULTIPLIER_1) + np.uint64(MULTIPLIER_2)) * wide
        return int(terms.sum(dtype=np.uint64))


def complex_as_two(
    dtype: DType, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns shape, offsets and sizes in digest elements: a complex tensor gains a trailing dimension of two."""
    if dtype.kind != "complex":
        return tuple(shape), tuple(offsets), tuple(sizes)
    return (*shape, 2), (*offsets, 0), (*sizes, 2)


def digest_box(
    key: str,
    array: npt.NDArray[np.generic],
    *,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    dtype: DType | None = None,
) -> int:
    """Returns the digest of the part of a tensor that `array` holds.

    Args:
        key: the tensor's key, `<role>[.<slot>]:<fqn>`.
        array: the values of the box, with the box's shape. bfloat16 and float8 as `ml_dtypes` types.
        shape: the tensor's global shape; by default `array` is the whole tensor.
        offsets: where the box begins in the global tensor; by default at the origin.
        dtype: the element type, if `array` carries it as raw integers.
    """
    element = dtype or parse_dtype(array.dtype.name)
    full = tuple(shape) if shape is not None else array.shape
    seed = digest_seed(key, element, full)
    geometry = complex_as_two(element, full, tuple(offsets) if offsets is not None else (0,) * array.ndim, array.shape)
    runs = box_runs(*geometry)
    bits = bits_of(array).reshape(len(runs.starts), runs.length)
    return add_digests(
        _digest_run(row, int(start), seed) for row, start in zip(bits, runs.starts.tolist(), strict=True)
    )


def _digest_run(bits: npt.NDArray[np.unsignedinteger], start: int, seed: int) -> int:
    total = 0
    for first in range(0, bits.size, _CHUNK_ELEMENTS):
        chunk = bits[first : first + _CHUNK_ELEMENTS].astype(np.uint64)
        index_key = np.arange(chunk.size, dtype=np.uint64) * np.uint64(STRIDE)
        index_key += np.uint64((seed + (start + first) * STRIDE) & MASK)
        total += int(_mix(chunk ^ index_key).sum(dtype=np.uint64))
    return total & MASK


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return z ^ (z >> np.uint64(31))


def digest_array(key: str, array: npt.NDArray[np.generic], *, dtype: DType | None = None) -> str:
    """Returns the digest of a whole tensor as 16 hexadecimal digits.

    >>> digest_array("param:w", np.arange(6, dtype=np.float32).reshape(2, 3))
    '9f3a48c81fc5ed16'
    """
    return whole_digest(digest_box(key, array, dtype=dtype), key, dtype or parse_dtype(array.dtype.name), array.shape)

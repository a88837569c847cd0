"""Element types under torch's own short names, with what storage and comparison need to know about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["float", "int", "uint", "bool", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `name` is torch's name without the `torch.` prefix.

    `mantissa_bits` counts stored fraction bits (0 for non-floats), so the unit round-off is 2**-(mantissa_bits + 1).
    """

    name: str
    num_bytes: int
    kind: Kind
    mantissa_bits: int = 0

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding one real number to this type (0.0 for exact types)."""
        return 2.0 ** -(self.mantissa_bits + 1) if self.kind in ("float", "complex") else 0.0


_ALL = (
    DType("float64", 8, "float", 52),
    DType("float32", 4, "float", 23),
    DType("float16", 2, "float", 10),
    DType("bfloat16", 2, "float", 7),
    DType("float8_e4m3fn", 1, "float", 3),
    DType("float8_e4m3fnuz", 1, "float", 3),
    DType("float8_e5m2", 1, "float", 2),
    DType("float8_e5m2fnuz", 1, "float", 2),
    DType("float8_e8m0fnu", 1, "float", 0),
    DType("complex128", 16, "complex", 52),
    DType("complex64", 8, "complex", 23),
    DType("int64", 8, "int"),
    DType("int32", 4, "int"),
    DType("int16", 2, "int"),
    DType("int8", 1, "int"),
    DType("uint64", 8, "uint"),
    DType("uint32", 4, "uint"),
    DType("uint16", 2, "uint"),
    DType("uint8", 1, "uint"),
    DType("bool", 1, "bool"),
)

DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}

_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
    "fp32": "float32",
    "fp64": "float64",
    "fp16": "float16",
    "bf16": "bfloat16",
}


def parse_dtype(name: str) -> DType:
    """Returns the element type called `name` (`float32`, `torch.float32` and `fp32` all work).

    Raises:
        ValueError: if no such type is known; the message lists those that are.
    """
    plain = name.removeprefix("torch.")
    found = DTYPES.get(_ALIASES.get(plain, plain))
    if found is None:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return found

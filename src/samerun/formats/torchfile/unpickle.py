"""From a pickle to plain data without ever calling what the pickle names.

Decoding has two steps. Python's own decoder runs first, but every name in the pickle resolves to a stub that only
remembers what was done to it (`stubs`). Then the stubs of known classes become plain data and every other an `Inert`
record (`plain`). Neither step imports anything, and nothing that the pickle says is executed.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.torchfile.plain import Converter
from samerun.formats.torchfile.scan import scan_pickle
from samerun.formats.torchfile.stubs import RestrictedUnpickler
from samerun.formats.torchfile.values import TensorRef

# Everything that decoding a damaged pickle raises. MemoryError is among them: a scanned pickle is bounded by its file,
# but a file may be larger than memory.
DECODING_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded pickle: the plain value, and the names of classes that were not known."""

    value: Any
    unknown: tuple[str, ...] = field(default=())


def decode_pickle(data: bytes, name: str) -> Decoded:
    """Scans and decodes a pickle into plain data. `name` says where it lies, for messages.

    Plain means numbers, strings, bytes, None, lists (tuples and sets become lists), dicts, `numpy.ndarray`,
    `TensorRef` and `Inert`.

    Raises:
        CorruptCheckpoint: if it is malformed or hostile.
    """
    known = _decoded.get(data)
    if known is not None:
        return known
    end = scan_pickle(data, name)
    try:
        stream = io.BufferedReader(io.BytesIO(data[:end]))  # pyright: ignore[reportArgumentType]
        raw = RestrictedUnpickler(stream).load()
        converter = Converter(len(data))
        decoded = Decoded(converter.plain(raw), tuple(sorted(converter.unknown)))
    except DECODING_ERRORS as error:
        raise broken_pickle(name, error) from None
    if len(data) <= _KEPT_BYTES and isinstance(decoded.value, TensorRef | bool | int | float | str | None):
        if len(_decoded) > _KEPT:
            _decoded.clear()
        _decoded[data] = decoded
    return decoded


# A checkpoint repeats the same few small pickles for thousands of items: equal shapes, equal hyperparameters. Only
# immutable values are kept.
_decoded: dict[bytes, Decoded] = {}
_KEPT, _KEPT_BYTES = 4_096, 512


def broken_pickle(name: str, error: BaseException) -> CorruptCheckpoint:
    """Returns the exception for a pickle that the decoder gave up on."""
    detail = str(error).split("\n")[0][:200]
    return CorruptCheckpoint(
        Problem(
            "SR-PKL-BROKEN",
            f"the pickle cannot be decoded: {type(error).__name__}{f' ({detail})' if detail else ''}",
            where={"file": name},
            hint="the file is damaged; restore it from the source",
        )
    )

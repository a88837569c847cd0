"""A checkpoint's fingerprint from checksums that its files record, without reading values; and what it was made of.

See `samerun.verify.state.fingerprint` for one tensor. The whole state has a fingerprint if every tensor has one that
does not depend on the cut: the same for the same values, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from samerun.core.state import TensorEntry
from samerun.errors import FormatError
from samerun.formats.base import Checkpoint, PayloadCheck
from samerun.verify.state.fingerprint import fingerprint_tensor

_MOST_PIECES = 4_096  # each costs the reading of an archive's directory
_WHOLE = "crc32:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """How recorded checksums were put together. `tensors` has the CRC-32 of whole tensors by key, in hexadecimal.

    `fingerprint` is that of the state, None for the reason `why`. `pieces` tensors are cut so that only pieces have a
    checksum, `none` have none. `checked` of `total` payloads were compared with the bytes; None if nothing was read.
    """

    fingerprint: str | None
    why: str
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    numbers: int = 0
    pieces: int = 0
    none: int = 0
    checked: int | None = None
    total: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the value of `checksums` in the `samerun/inspect/1` document."""
        return {
            "fingerprint": self.fingerprint,
            "why_none": self.why or None,
            "tensors": {
                "combined": len(self.tensors),
                "numbers": self.numbers,
                "pieces": self.pieces,
                "none": self.none,
            },
            "compared_with_bytes": None if self.checked is None else {"payloads": self.checked, "of": self.total},
        }


def combine_checksums(checkpoint: Checkpoint, payloads: PayloadCheck | None = None) -> Checksums:
    """Puts the recorded checksums together. `payloads` is what comparing them with the bytes gave, if that was done."""
    checked, total = (None, None) if payloads is None else (payloads.checked, payloads.total)
    entries = checkpoint.state.tensors
    count = sum(len(entry.tiling) for entry in entries.values())
    if count > _MOST_PIECES:
        why = f"{count:,} pieces are more than the {_MOST_PIECES:,} whose archives are looked into"
        return Checksums(fingerprint=None, why=why, none=len(entries), checked=checked, total=total)
    whole: dict[str, str] = {}
    lines: list[str] = []
    pieces = none = numbers = 0
    for key, entry in entries.items():
        found = fingerprint_tensor(checkpoint, key)
        number = _number(checkpoint, key, entry) if found is None else None
        if found is not None and found.startswith(_WHOLE):
            whole[key] = found.removeprefix(_WHOLE)
            lines.append(_line(key, entry, whole[key]))
        elif number is not None:
            numbers += 1
            lines.append(_line(key, entry, number))
        elif found is not None:
            pieces += 1
        else:
            none += 1
    why = _why(pieces, none, len(entries))
    text = "".join(f"{line}\n" for line in sorted(lines)).encode("utf-8", "surrogatepass")
    fingerprint = None if why else blake2b(text, digest_size=8).hexdigest()
    return Checksums(
        fingerprint=fingerprint,
        why=why,
        tensors=whole,
        numbers=numbers,
        pieces=pieces,
        none=none,
        checked=checked,
        total=total,
    )


def _number(checkpoint: Checkpoint, key: str, entry: TensorEntry) -> str | None:
    """Returns the value of what is one number, or the emptiness of what is none: neither needs a checksum."""
    if entry.num_elements > 1:
        return None
    try:
        return checkpoint.read(key).tobytes().hex() or "empty"
    except FormatError:
        return None


def _line(key: str, entry: TensorEntry, mark: str) -> str:
    return f"{key} {entry.dtype.name} {','.join(map(str, entry.shape))} {mark}"


def _why(pieces: int, none: int, total: int) -> str:
    if not total:
        return "there are no tensors"
    if none == total:
        return "these files record no checksum"
    told = [f"{none} of {total} tensors have no checksum of their own"] if none else []
    told += [f"{pieces} of {total} tensors are not cut into whole rows"] if pieces else []
    return ", ".join(told)

"""Checks that read values: checksums of whole files, copies of a tensor, masters against weights, rounded masters.

Everything is read piece by piece from the mapped files. Each check names the files whose values are at odds, because a
file of another save or rank shows by differing everywhere.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from samerun.core.dtype import DType
from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import Array, Extent, numpy_dtype
from samerun.formats.deepspeed.gather import Replica
from samerun.formats.deepspeed.states import StateFile
from samerun.formats.placement import Placement
from samerun.stores.crc32 import crc32
from samerun.stores.local import MappedFiles

_FEWEST_ELEMENTS = 32
_MOST_NAMED = 4
_BLOCK_ELEMENTS = 1 << 16
_FIRST_ELEMENTS = 1 << 12  # mostly enough to see that masters are no rounded weights


class Readable(Protocol):
    """What a check needs of a checkpoint."""

    state: LogicalState

    def locate(self, key: str, piece: int) -> Extent: ...

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array: ...


@dataclass(slots=True)
class Odd:
    """Tensors that differ, and in how many pieces per file."""

    tensors: dict[str, None] = field(default_factory=dict[str, None])
    files: Tally[str] = field(default_factory=Tally[str])
    compared: int = 0

    def text(self) -> str:
        """Returns the first few names, and how many more there are."""
        names = list(self.tensors)
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(names[:_MOST_NAMED]) + more

    def worst(self) -> str:
        """Returns the file that differs most often."""
        return self.files.most_common(1)[0][0]


def check_checksums(
    opened: Iterable[StateFile], files: MappedFiles, advance: Callable[[int], None] | None = None
) -> list[Problem]:
    """Compares every entry of every file with the checksum that torch.save wrote and torch.load never looks at."""
    problems: list[Problem] = []
    for file in opened:
        bad = [
            (name, record.crc32, found)
            for name, record in file.archive.records.items()
            if record.crc32 is not None
            and (found := crc32(files.range(file.path, start := record.offset_bytes, start + record.num_bytes)))
            != record.crc32
        ]
        problems += [_checksum(file, *entry) for entry in bad]
        if advance is not None:
            advance(len(files.map(file.path)))
    return problems


def _checksum(file: StateFile, name: str, expected: int, found: int) -> Problem:
    return Problem(
        "SR-FILE-CRC",
        "the bytes are not those that were written: the checksum recorded beside them differs",
        where={"file": str(file.path), "key": name},
        expected=f"{expected:08x}",
        found=f"{found:08x}",
        hint="torch loads this without an error; restore the file from the source or use another checkpoint",
    )


def compare_replicas(checkpoint: Readable, replicas: Iterable[Replica], files: MappedFiles) -> dict[str, Odd]:
    """Compares every copy of a tensor with it, bit by bit. Returns what differs, by the copy's role and label."""
    found: dict[str, Odd] = {}
    for copy in replicas:
        entry = checkpoint.state.tensors.get(copy.key)
        if entry is None:
            continue
        odd = found.setdefault(f"{entry.key.role.value} {copy.label}", Odd())
        for piece in range(len(copy.placement.tiling)):
            odd.compared += 1
            if not _same(_box(checkpoint, entry, copy.placement, piece), copy.placement.view(piece, files)):
                odd.tensors.setdefault(copy.key)
                odd.files[str(copy.placement.extent(piece).file)] += 1
    return {label: odd for label, odd in found.items() if odd.tensors}


def _box(checkpoint: Readable, entry: TensorEntry, placement: Placement, piece: int) -> Array | None:
    """Returns the values of a piece's box; None where the tensor itself has a gap there."""
    offsets = tuple(placement.tiling.offsets[piece].tolist())
    sizes = tuple(placement.tiling.sizes[piece].tolist())
    try:
        return checkpoint.read(str(entry.key), offsets, sizes)
    except FormatError:
        return None


def _same(first: Array | None, second: Array) -> bool:
    if first is None:
        return True
    return np.array_equal(_bits(first), _bits(second))


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def compare_masters(checkpoint: Readable, placements: Mapping[str, Placement], files: MappedFiles) -> Odd:
    """Compares each parameter with its masters, rounded to its type. Parameters that are that cast are left out."""
    odd = Odd()
    for key, entry in checkpoint.state.tensors.items():
        parameter = f"param:{entry.key.fqn}"
        if entry.key.role is not Role.MASTER or parameter not in checkpoint.state.tensors:
            continue
        own = placements.get(parameter)
        if own is None or own.cast is not None:
            continue
        for piece, masters in _pieces(placements[key], files):
            odd.compared += 1
            held = _box(checkpoint, checkpoint.state.tensors[parameter], placements[key], piece)
            if held is not None and not _is_cast(held, masters, checkpoint.state.tensors[parameter].dtype):
                odd.tensors.setdefault(parameter)
                odd.files[str(placements[key].extent(piece).file)] += 1
    return odd


def _pieces(placement: Placement, files: MappedFiles) -> Iterator[tuple[int, Array]]:
    for piece in range(len(placement.tiling)):
        yield piece, placement.view(piece, files)


def _is_cast(held: Array, masters: Array, dtype: DType) -> bool:
    """Whether `held` is what `masters` are in another type."""
    held = held.reshape(-1)
    return all(_same(held[part], _cast(values, dtype)) for part, values in _blocks(masters))


def _is_rounded(masters: Array, coarse: DType, dtype: DType) -> bool:
    """Whether no value changes on its way through a coarser type. The first one that does decides."""
    flat = masters.reshape(-1)
    return all(
        _same(_cast(_cast(values, coarse), dtype), values)
        for part in (flat[:_FIRST_ELEMENTS], flat[_FIRST_ELEMENTS:])
        for _, values in _blocks(part)
    )


def _blocks(values: Array) -> Iterator[tuple[slice, Array]]:
    """Yields parts of a vector of all values: casting takes long, and memory for what it makes."""
    flat = values.reshape(-1)
    for first in range(0, flat.size, _BLOCK_ELEMENTS):
        part = slice(first, first + _BLOCK_ELEMENTS)
        yield part, flat[part]


def _cast(values: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return values.astype(numpy_dtype(dtype))


def find_rounded(
    checkpoint: Readable, placements: Mapping[str, Placement], files: MappedFiles, trained: Mapping[str, DType]
) -> Odd:
    """Finds masters that hold no more than the parameter's own type can: rebuilt from weights, not kept.

    `trained` gives, by FQN, the type of the parameters. Only masters that were updated count: one whose moments are all
    zero may well still be as it was initialised.
    """
    odd = Odd()
    for key, entry in checkpoint.state.tensors.items():
        coarse = trained.get(entry.key.fqn)
        if entry.key.role is not Role.MASTER or coarse is None or coarse.mantissa_bits >= entry.dtype.mantissa_bits:
            continue
        if not _moved(checkpoint, entry.key.fqn, placements, files):
            continue
        odd.compared += 1
        for piece, masters in _pieces(placements[key], files):
            if masters.size >= _FEWEST_ELEMENTS and _is_rounded(masters, coarse, entry.dtype):
                odd.tensors.setdefault(key)
                odd.files[str(placements[key].extent(piece).file)] += 1
    return odd


def _moved(checkpoint: Readable, fqn: str, placements: Mapping[str, Placement], files: MappedFiles) -> bool:
    """Whether any slot of a parameter holds something else than zeros."""
    for key in (f"optim.exp_avg:{fqn}", f"optim.momentum_buffer:{fqn}", f"optim.exp_avg_sq:{fqn}"):
        placement = placements.get(key)
        if key in checkpoint.state.tensors and placement is not None:
            return any(bool(np.any(values)) for _, values in _pieces(placement, files))
    return False


def rounded_problem(odd: Odd, dtype: str, code: str) -> list[Problem]:
    """Returns the finding for masters that were rounded."""
    if not odd.tensors:
        return []
    return [
        Problem(
            code,
            f"{len(odd.tensors)} masters hold no more than {dtype} can: {odd.text()}",
            severity=Severity.WARNING,
            where={"file": odd.worst(), "tensor": next(iter(odd.tensors))},
            hint="they were rebuilt from rounded weights, not kept. Small updates that had not yet shown in the "
            "weights are lost; take the masters from the checkpoint that this one was made from",
        )
    ]

"""Opening one state file: its plain value, where its tensors lie, and what is wrong with it if it cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samerun.errors import CorruptCheckpoint, FormatError, Problem
from samerun.formats.base import Array, Extent, view_extent
from samerun.formats.torchfile import Archive, Inert, TensorRef, read_archive, read_value
from samerun.stores.local import MappedFiles

# Classes of DeepSpeed's that its state files are full of; their state is plain data.
KNOWN_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)
_END_BYTES = 22
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 1 << 60
_RESTORE = "restore the file from the source; nothing else holds these values"


@dataclass(frozen=True, slots=True, eq=False)
class StateFile:
    """A decoded torch.save file. Tensors in `value` are `TensorRef`; `extent` says where they lie."""

    path: Path
    archive: Archive
    value: Any
    unknown: tuple[str, ...]

    def extent(self, tensor: TensorRef) -> Extent:
        """Returns where a tensor lies. Raises CorruptCheckpoint if it does not lie inside its storage."""
        return self.archive.extent(tensor)

    def flat(self, tensor: TensorRef) -> Extent | None:
        """Returns where a packed one-dimensional tensor lies, None if it is anything else."""
        if len(tensor.shape) != 1 or (tensor.shape[0] > 1 and tensor.strides != (1,)):
            return None
        return self.extent(tensor)


def read_state_file(path: Path, files: MappedFiles) -> StateFile:
    """Maps and decodes a file; no tensor is read.

    Raises:
        CorruptCheckpoint: if it is missing, cut off, damaged or hostile. The problems name the file.
    """
    try:
        buffer = files.map(path)
    except OSError as error:
        raise CorruptCheckpoint(
            missing_file(path, f"a file of the checkpoint cannot be opened: {error.strerror}")
        ) from None
    if _is_cut_off(buffer):
        raise CorruptCheckpoint(_truncated(path, len(buffer)))
    archive = read_archive(buffer, path)
    decoded = read_value(buffer, archive)
    return StateFile(path, archive, decoded.value, decoded.unknown)


def _is_cut_off(buffer: Any) -> bool:
    """Whether a file begins as a torch.save archive, or not at all, and has no whole end record."""
    if len(buffer) == 0 or buffer[:4] != b"PK\x03\x04":
        return len(buffer) == 0
    end = buffer.rfind(b"PK\x05\x06")
    return end < 0 or end + _END_BYTES > len(buffer)


def _truncated(path: Path, num_bytes: int) -> Problem:
    return Problem(
        "SR-FILE-TRUNCATED",
        "the file is empty" if num_bytes == 0 else "the file was cut off: it has no end record",
        where={"file": str(path)},
        expected="a whole archive",
        found=f"{num_bytes} bytes",
        hint=_RESTORE,
    )


def missing_file(path: Path, message: str) -> Problem:
    """Returns the finding for a file that must be there and is not."""
    return Problem(
        "SR-FILE-MISSING",
        message,
        where={"file": str(path)},
        hint=f"{_RESTORE}. If ranks wrote to disks of their own, gather every rank's files into one directory first",
    )


def read_state_files(paths: dict[Any, Path], files: MappedFiles) -> tuple[dict[Any, StateFile], list[Problem]]:
    """Reads several files; those that cannot be read are left out and are findings."""
    opened: dict[Any, StateFile] = {}
    problems: list[Problem] = []
    for name, path in paths.items():
        try:
            opened[name] = read_state_file(path, files)
        except FormatError as error:
            problems.extend(error.problems)
    return opened, problems


def list_names(root: Path) -> list[str]:
    """Returns the names of files and links in a directory, sorted; nothing if it cannot be listed."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if not entry.is_dir())
    except OSError:
        return []


def read_tensor(tensor: TensorRef, file: StateFile, files: MappedFiles) -> Array:
    """Returns a copy of a tensor's values."""
    return view_extent(files, file.extent(tensor)).copy()


def plain_value(value: Any, file: StateFile, files: MappedFiles) -> Any:
    """Returns a value with its tensors read, and DeepSpeed's own records as mappings.

    Meant for small things: counters, generators' states, schedulers. Tensors of more than 1 MiB stay references.
    """
    if isinstance(value, TensorRef):
        small = value.dtype.num_bytes * _product(value.shape) <= 1 << 20
        return read_tensor(value, file, files) if small else Inert("tensor", (value.dtype.name, list(value.shape)))
    if isinstance(value, dict):
        return {name: plain_value(item, file, files) for name, item in value.items()}
    if isinstance(value, list):
        return [plain_value(item, file, files) for item in value]
    if isinstance(value, Inert) and value.name.startswith(KNOWN_CLASSES):
        return _record(value)
    return value


def _record(value: Inert) -> Any:
    if isinstance(value.state, dict):
        return {"class": value.name.rpartition(".")[2], **value.state}
    return value.args[0] if len(value.args) == 1 else value


def enum_number(value: Any, file: StateFile, files: MappedFiles) -> int | float | None:
    """Returns a number, an enumeration's value, or the value of a tensor of one element; None for anything else."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value if isinstance(value, float) or abs(value) < _MOST_ELEMENTS else None
    if isinstance(value, TensorRef) and _product(value.shape) == 1 and value.dtype.kind != "complex":
        return read_tensor(value, file, files).reshape(-1)[0].item()
    return None


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def tensors_of(value: Any) -> Iterator[TensorRef]:
    """Yields every tensor inside a decoded value."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors_of(item)


def as_dict(value: Any) -> dict[Any, Any]:
    """Returns a value if it is a mapping, an empty one otherwise."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Returns a value if it is a list, an empty one otherwise."""
    return value if isinstance(value, list) else []


def as_shape(value: Any) -> tuple[int, ...] | None:
    """Returns a shape if the value is one, of a tensor that a file could hold."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS or any(as_count(size) is None for size in value):
        return None
    return tuple(value) if _product(tuple(max(1, size) for size in value)) < _MOST_ELEMENTS else None


def as_count(value: Any) -> int | None:
    """Returns a whole number of at least 0 if the value is one."""
    counts = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_ELEMENTS
    return value if counts else None

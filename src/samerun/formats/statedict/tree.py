"""Nested values as a file holds them, with every tensor in place of its reference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samerun.core.dtype import DTYPES
from samerun.errors import CorruptCheckpoint, FormatError, Problem
from samerun.formats.statedict.stored import Stored, read_stored, store_nothing, store_whole
from samerun.formats.torchfile.container import TorchFile, read_torch_file
from samerun.formats.torchfile.values import Inert, TensorRef
from samerun.stores.local import MappedFiles

SMALL_BYTES = 1 << 20
Tree = Any


class Bound:
    """One opened file: its value with tensors as `Stored`, the classes it names that are unknown, and findings."""

    def __init__(self, file: Path, opened: TorchFile) -> None:
        self.file = file
        self.container = opened.container
        self.archive = opened.archive
        self.unknown = opened.decoded.unknown
        self.problems: list[Problem] = list(opened.problems)
        self._opened = opened
        self._done: dict[int, Any] = {}
        self.tree: Tree = self._bind(opened.decoded.value)

    def _bind(self, value: Any) -> Any:
        """Replaces references. Values that are shared in the file stay shared."""
        if isinstance(value, TensorRef):
            return self._tensor(value)
        if not isinstance(value, dict | list | Inert):
            return value
        done = self._done.get(id(value))
        if done is None:
            done = self._done[id(value)] = self._bind_inside(value)
        return done

    def _bind_inside(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._bind(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._bind(item) for item in value]
        args, items = tuple(self._bind(item) for item in value.args), tuple(self._bind(item) for item in value.items)
        return Inert(value.name, args, self._bind(value.state), items)

    def _tensor(self, ref: TensorRef) -> Stored:
        try:
            return store_whole(self._opened.archive.extent(ref))
        except CorruptCheckpoint as error:
            if not self._opened.problems:  # a cut-off file says so once, not once per tensor
                self.problems.extend(error.problems)
            return store_nothing(ref.shape, ref.dtype)


def open_file(file: Path, files: MappedFiles) -> Bound:
    """Opens a torch.save file or pickle. Opened again unchanged, as after telling its format, it is not decoded again.

    Raises:
        CorruptCheckpoint, UnsupportedVersion: as `read_torch_file` does.
        OSError: if the file cannot be opened.
    """
    found = os.stat(file)
    key = (file, found.st_ino, found.st_size, found.st_mtime_ns)
    known = _recent.get(key)
    if known is None:
        known = Bound(file, read_torch_file(files.map(file), file))
        while len(_recent) >= _KEPT_FILES:
            _recent.pop(next(iter(_recent)))
        _recent[key] = known
    return known


_recent: dict[tuple[Path, int, int, int], Bound] = {}
_KEPT_FILES = 2


def to_plain(tree: Tree, files: MappedFiles) -> Any:
    """Returns a value with small tensors as arrays (numbers, if they hold one) and large ones as records."""
    if isinstance(tree, Stored):
        return _plain_tensor(tree, files)
    if isinstance(tree, dict):
        return {key: to_plain(item, files) for key, item in tree.items()}
    if isinstance(tree, list):
        return [to_plain(item, files) for item in tree]
    if isinstance(tree, Inert):
        args, items = (tuple(to_plain(item, files) for item in part) for part in (tree.args, tree.items))
        return Inert(tree.name, args, to_plain(tree.state, files), items)
    return tree


def _plain_tensor(tensor: Stored, files: MappedFiles) -> Any:
    if tensor.num_bytes > SMALL_BYTES:
        return Inert("tensor", (tensor.dtype.name, list(tensor.shape)))
    try:
        array = read_stored(tensor, files)
    except FormatError:
        return Inert("tensor that cannot be read", (tensor.dtype.name, list(tensor.shape)))
    return array.item() if tensor.shape == () and tensor.dtype.kind != "complex" else array.copy()


def flatten(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) for everything in nested mappings.

    Lists and records are values, and so are mappings with other keys than text: a dotted name would lose those.
    """
    if not isinstance(tree, Mapping) or not tree or not all(isinstance(key, str) for key in tree):
        yield name, tree
        return
    for key, item in tree.items():
        yield from flatten(item, f"{name}.{key}" if name else str(key))


def contains_tensor(tree: Tree, large_bytes: int = 0) -> bool:
    """Whether a value holds a tensor of more than `large_bytes` bytes anywhere inside."""
    if isinstance(tree, Stored):
        return tree.num_bytes > large_bytes
    if isinstance(tree, dict):
        return any(contains_tensor(item, large_bytes) for item in tree.values())
    if isinstance(tree, list):
        return any(contains_tensor(item, large_bytes) for item in tree)
    if isinstance(tree, Inert):
        return contains_tensor([*tree.args, tree.state, *tree.items], large_bytes)
    return False


def number_of(value: Any) -> tuple[int | float, str] | None:
    """Returns a plain number and the name of the element type that holds it; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    name = "int64" if isinstance(value, int) else "float64"
    return (value, name) if name in DTYPES and (isinstance(value, float) or -(1 << 63) <= value < 1 << 63) else None

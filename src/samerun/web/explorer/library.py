"""Opened checkpoints, and what inspecting them found, kept until their files change."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from samerun.errors import FormatError, Severity
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from samerun.web.explorer.table import Table

KEPT = 6
"""Checkpoints that stay open."""
_MAX_FILES = 20_000
_MAX_PIECES = 200_000


@dataclass(frozen=True, eq=False)
class Opened:
    """An opened checkpoint."""

    checkpoint: Checkpoint
    report: InspectReport
    stamp: tuple[Any, ...]

    @cached_property
    def keys(self) -> dict[str, str]:
        """The tensors' keys, by key and by the name that the files have for each."""
        tensors = self.report.state.tensors
        return {entry.original: key for key, entry in tensors.items()} | {key: key for key in tensors}

    @cached_property
    def table(self) -> Table:
        """Its tensors, ready to be searched. Those that something blocking was found about are marked with its code."""
        broken: dict[str, list[str]] = {}
        blocking = [problem for problem in self.report.problems if problem.severity is Severity.ERROR]
        for problem in blocking:
            if (key := self.keys.get(str(problem.where.get("tensor")))) is not None:
                broken.setdefault(key, []).append(problem.code)
        if any("file" in problem.where for problem in blocking):
            for key, code in self._unreadable():
                broken.setdefault(key, []).append(code)
        return Table.of(self.report.state, broken)

    def _unreadable(self) -> Iterator[tuple[str, str]]:
        """Yields (key, code) of the tensors with a piece that lies in no file as it should."""
        left = _MAX_PIECES
        for key, entry in self.report.state.tensors.items():
            for piece in range(len(entry.tiling)):
                if (left := left - 1) < 0:
                    return
                try:
                    self.checkpoint.locate(key, piece)
                except FormatError as error:
                    if error.problems[0].code != "SR-USAGE-PIECE":  # a number kept inside an object lies in no file
                        yield key, error.problems[0].code


class Library:
    """Checkpoints by path. Safe to use from several threads; two never inspect the same one at once."""

    def __init__(self) -> None:
        self._opened: OrderedDict[str, Opened] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._own = threading.Lock()

    def open(self, path: Path | str, *, look_again: bool = True) -> Opened:
        """Returns the checkpoint at a path, inspected; again if its files have changed since.

        `look_again` says whether to look for changes, which costs a look at every file.

        Raises:
            UsageError: if nothing is there, or several checkpoints are.
            FormatError: if it cannot be understood.
        """
        name = str(path)
        with self._own:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            known = self._opened.get(name)
            stamp = _stamp(path) if known is None or look_again else known.stamp
            if known is None or known.stamp != stamp:
                checkpoint = open_checkpoint(path)
                known = Opened(checkpoint, inspect_checkpoint(checkpoint), stamp)
                weakref.finalize(known, checkpoint.close)  # once no job reads it any more
            with self._own:
                self._opened[name] = known
                self._opened.move_to_end(name)
                while len(self._opened) > KEPT:
                    self._opened.popitem(last=False)
            return known

    def close(self) -> None:
        """Lets go of every checkpoint; each is closed once no job reads it any more."""
        with self._own:
            self._opened.clear()


def _stamp(path: Path | str) -> tuple[Any, ...]:
    """Returns what changes when a file of the checkpoint does: names, sizes and times."""
    if not isinstance(path, Path):
        return ()
    if not path.is_dir():
        found = path.stat()
        return (found.st_size, found.st_mtime_ns)
    rows: list[tuple[str, int, int]] = []
    for folder, _, names in os.walk(path):
        for name in names:
            if len(rows) >= _MAX_FILES:
                return tuple(rows)
            found = os.stat(os.path.join(folder, name), follow_symlinks=False)
            rows.append((os.path.join(folder, name), found.st_size, found.st_mtime_ns))
    return tuple(sorted(rows))

"""What a DCP directory can prove about itself: archives where they should be, checksums, and counters per file.

torch writes a CRC-32 of every payload and never checks it. It does not see a file from another save of the same shape:
names, offsets and lengths are then all equal and each payload matches its own checksum. Only counters do, in the files
that happen to hold one; `intact` is therefore undecided unless every file holds one, or there is only one file.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import PayloadCheck
from samerun.formats.dcpfile.index import NOWHERE, Index
from samerun.formats.dcpfile.items import Items
from samerun.formats.torchfile.archive import checksum_problem


def check_items(index: Index, items: Items, limit: int | None = None) -> list[Problem]:
    """Checks that items in readable files are archives of what the metadata says; reads headers, no payload.

    With `limit`, items are picked evenly over all of them.
    """
    problems: list[Problem] = []
    total = sum(len(tensor.rows) for tensor in index.tensors)
    stride = 1 if limit is None or total <= limit else -(-total // limit)
    number = 0
    for tensor in index.tensors:
        for piece, row in enumerate(tensor.rows.tolist()):
            number += 1
            if number % stride or not items.readable(row):
                continue
            try:
                items.extent(tensor, piece)
            except FormatError as error:
                problems.extend(error.problems)
    return problems


def check_payloads(index: Index, items: Items, advance: Callable[[int], None] | None = None) -> PayloadCheck:
    """Reads every payload once and compares it with the checksum in its archive."""
    problems: list[Problem] = []
    checked = total = 0
    for tensor in index.tensors:
        for piece, row in enumerate(tensor.rows.tolist()):
            if row == NOWHERE and not bool((tensor.tiling.sizes[piece] > 0).all()):
                continue
            total += 1
            try:
                extent = items.extent(tensor, piece)
            except FormatError:
                continue  # reported by `check_items`, or as a missing or truncated file
            if extent.crc32 is None:
                continue
            checked += 1
            found = items.checksum(extent)
            if found != extent.crc32:
                problems.append(checksum_problem(extent.file, tensor.name, extent.crc32, found))
            if advance is not None:
                advance(extent.storage_bytes)
    if problems:
        return PayloadCheck(checked, total, False, tuple(problems))
    silent = _files_without_counter(index)
    if checked < total or silent:
        return PayloadCheck(checked, total, None, _generation_note(index, silent) if silent else ())
    return PayloadCheck(checked, total, True)


def check_object_payloads(index: Index, items: Items) -> list[Problem]:
    """Compares the tensors inside stored objects with the checksums in their archives."""
    problems: list[Problem] = []
    for item in index.objects:
        for row in item.rows:
            if not items.readable(row):
                continue
            try:
                problems += items.check_archive(row, item.name)
            except FormatError:
                continue  # reported when the object was read
    return problems


def _files_without_counter(index: Index) -> list[str]:
    """Returns the data files that hold no counter of updates, if there is more than one file to mix up."""
    used = {int(number) for number in np.unique(index.places.file).tolist()} if len(index.places) else set[int]()
    if len(used) < 2:
        return []
    rows = [row for tensor in index.tensors if _counts(tensor.name) for row in tensor.rows.tolist() if row != NOWHERE]
    rows += [row for item in index.objects if _counts(item.name) for row in item.rows]
    counted = {int(index.places.file[row]) for row in rows}
    return [index.files[number] for number in sorted(used - counted)]


def _counts(name: str) -> bool:
    return name.rpartition(".")[2] in ("step", "last_epoch", "_step_count", "global_step", "update", "iteration")


def _generation_note(index: Index, silent: list[str]) -> tuple[Problem, ...]:
    return (
        Problem(
            "SR-FILE-GENERATION-OPEN",
            f"{len(silent)} of {len(index.files)} data files hold no counter: one left from another save of the same "
            "run would look the same",
            severity=Severity.NOTE,
            where={"file": silent[0]},
            hint="every checksum agrees, but whether all files are of one save cannot be decided from the files",
        ),
    )

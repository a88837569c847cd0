"""Proves that a plan is right before it runs: every destination byte written once, every source value used."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.box import check_tilings
from samerun.core.state import LogicalState, Tiling
from samerun.core.written import DestinationPlan, FilePlan, TensorSlots
from samerun.errors import Problem
from samerun.execute.plan import ConversionPlan

Ints = npt.NDArray[np.int64]

PROOF_NAME = "samerun-proof.json"
_NAME_BYTES = 255
_CHECKSUM_BYTES = 4


def check_destination(
    destination: DestinationPlan, state: LogicalState, *, embedded: Collection[str] = ()
) -> list[Problem]:
    """Returns everything that is wrong with a destination as its writer laid it out; nothing if it is right.

    Every file's literals, fills and slots tile it; every tensor of `state` is covered exactly by its boxes, or is in
    `dropped`, or was put into a literal (`embedded`); checksums go into literals; paths are relative and inside.
    """
    problems = [*_check_paths(destination), *_check_tensors(destination, state, frozenset(embedded))]
    spans = _slot_spans(destination, problems)
    for number, file in enumerate(destination.files):
        problems += _check_file(file, spans.get(number, []))
    return problems


def check_plan(plan: ConversionPlan, state: LogicalState) -> list[Problem]:
    """Returns everything that is wrong with a plan: what `check_destination` finds, and what its copies do not write.

    The copies of every slot must tile it exactly. With every tensor tiled by its slots, every source value is used.
    """
    problems = check_destination(plan.destination, state, embedded=plan.embedded)
    slots, copies = plan.slots, plan.copies
    order = np.argsort(copies.slot, kind="stable")
    edges = np.searchsorted(copies.slot[order], np.arange(len(slots) + 1))
    origin, sizes = copies.origin[order], copies.sizes[order]
    tilings = [
        (tuple(slots.sizes[i].tolist()), Tiling(origin[edges[i] : edges[i + 1]], sizes[edges[i] : edges[i + 1]]))
        for i in range(len(slots))
    ]
    for i, coverage in enumerate(check_tilings(tilings)):
        if not coverage.exact or coverage.replicas:
            found = f"{coverage.missing_elements} values are in no piece of the source"
            if coverage.missing_elements == 0:
                found = "some values would be written twice"
            problems.append(
                _wrong(
                    "SR-COPY-VALUES",
                    f"a box of {plan.keys[int(slots.tensor[i])]} is not written exactly once: {found}",
                    tensor=plan.keys[int(slots.tensor[i])],
                    file=plan.destination.files[int(slots.file[i])].path,
                )
            )
    return problems


def _wrong(code: str, message: str, **where: Any) -> Problem:
    return Problem(
        code,
        message,
        where=where,
        hint="nothing was written. The source's metadata is damaged, or this is a defect in samerun's writer",
    )


# --- paths --------------------------------------------------------------------------------------------------------


def _check_paths(destination: DestinationPlan) -> list[Problem]:
    problems: list[Problem] = []
    paths = [file.path for file in destination.files]
    if destination.single_file and len(paths) != 1:
        problems.append(_wrong("SR-COPY-PATH", f"one file was announced, {len(paths)} are planned"))
    if not paths:
        problems.append(_wrong("SR-COPY-PATH", "no file is planned"))
    problems += [
        _wrong("SR-COPY-PATH", f"the path {path!r} {why}", file=path) for path in paths if (why := why_unsafe(path))
    ]
    known = set(paths)
    if len(known) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        problems.append(_wrong("SR-COPY-PATH", f"files are planned twice: {', '.join(twice[:8])}", file=twice[0]))
    for path in sorted(known):
        parts = path.split("/")
        above = next(("/".join(parts[:n]) for n in range(1, len(parts)) if "/".join(parts[:n]) in known), None)
        if above is not None:
            problems.append(_wrong("SR-COPY-PATH", f"{above!r} would be a file and a directory", file=path))
    return problems


def why_unsafe(path: str) -> str | None:
    """Returns what is wrong with the relative path of a destination file, None if nothing is.

    >>> why_unsafe("shards/rank-0.bin"), why_unsafe("../elsewhere")
    (None, "leaves the destination by its component '..'")
    """
    if path.startswith("/"):
        return "is absolute"
    if any(ord(letter) < 32 for letter in path) or "\\" in path:
        return "has a letter that no file name should have"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return f"leaves the destination by its component {part!r}"
        if len(part.encode("utf-8", "surrogateescape")) > _NAME_BYTES:
            return f"has a component of more than {_NAME_BYTES} bytes"
    return "is the name of the proof" if path == PROOF_NAME else None


# --- tensors ------------------------------------------------------------------------------------------------------


def _check_tensors(destination: DestinationPlan, state: LogicalState, embedded: frozenset[str]) -> list[Problem]:
    problems: list[Problem] = []
    planned = [slots.key for slots in destination.tensors]
    unknown = [key for key in planned if key not in state.tensors]
    problems += [_wrong("SR-COPY-TENSOR", f"{key} is not a tensor of the source", tensor=key) for key in unknown]
    if len(set(planned)) < len(planned):
        twice = sorted({key for key in planned if planned.count(key) > 1})
        problems.append(_wrong("SR-COPY-TENSOR", f"tensors are planned twice: {', '.join(twice[:8])}", tensor=twice[0]))
    accounted = {*planned, *destination.dropped, *embedded}
    problems += [
        _wrong("SR-COPY-FORGOTTEN", f"{key} is neither written nor named as dropped", tensor=key)
        for key in state.tensors
        if key not in accounted
    ]
    known = [slots for slots in destination.tensors if slots.key in state.tensors]
    fitting = [slots for slots in known if slots.offsets.shape[1] == len(state.tensors[slots.key].shape)]
    problems += [
        _wrong("SR-COPY-TENSOR", f"the boxes of {slots.key} have another number of dimensions", tensor=slots.key)
        for slots in known
        if slots.offsets.shape[1] != len(state.tensors[slots.key].shape)
    ]
    coverages = check_tilings(
        [(state.tensors[slots.key].shape, _without_whole(slots, state.tensors[slots.key].shape)) for slots in fitting]
    )
    for slots, coverage in zip(fitting, coverages, strict=True):
        partly = slots.key in destination.dropped and coverage.missing_elements is not None
        if coverage.exact or (partly and coverage.shared_elements == 0 and not coverage.outside):
            continue
        problems.append(
            _wrong(
                "SR-COPY-TENSOR",
                f"the boxes of {slots.key} do not cover it exactly: {_counted(coverage.missing_elements)} missing, "
                f"{_counted(coverage.shared_elements)} written twice, {len(coverage.outside)} boxes outside",
                tensor=slots.key,
            )
        )
    return problems


def _without_whole(slots: TensorSlots, shape: tuple[int, ...]) -> Tiling:
    """Returns the boxes without those that hold the whole tensor, if there are others: a copy is complete by itself.

    ZeRO in fp32 keeps a parameter whole in its model file, and cut as the optimizer's master.
    """
    cut = (slots.sizes != np.array(shape, np.int64)).any(axis=1)
    return Tiling(slots.offsets[cut], slots.sizes[cut]) if cut.any() else Tiling(slots.offsets, slots.sizes)


def _counted(number: int | None) -> str:
    return "an unknown number" if number is None else str(number)


# --- bytes --------------------------------------------------------------------------------------------------------


def _slot_spans(destination: DestinationPlan, problems: list[Problem]) -> dict[int, list[tuple[int, int]]]:
    """Returns, by file number, the (start, stop) of every slot with values."""
    if not destination.tensors:
        return {}
    file = np.concatenate([slots.file for slots in destination.tensors])
    at = np.concatenate([slots.at for slots in destination.tensors])
    size = np.concatenate([np.prod(slots.sizes, axis=1) * slots.dtype.num_bytes for slots in destination.tensors])
    bad = (file < 0) | (file >= len(destination.files))
    if bad.any():
        problems.append(_wrong("SR-COPY-BYTES", f"{int(bad.sum())} boxes go into files that are not planned"))
    spans: dict[int, list[tuple[int, int]]] = {}
    kept = np.flatnonzero(~bad & (size > 0))
    if not len(kept):
        return spans
    order = kept[np.lexsort((at[kept], file[kept]))]
    numbers, firsts = np.unique(file[order], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
        spans[number] = list(zip(at[rows].tolist(), (at[rows] + size[rows]).tolist(), strict=True))
    return spans


def _check_file(file: FilePlan, slots: list[tuple[int, int]]) -> list[Problem]:
    literals = [(literal.at, literal.at + len(literal.content)) for literal in file.literals]
    fills = [(fill.at, fill.at + fill.size) for fill in file.fills]
    spans = sorted(span for span in (*literals, *fills, *slots) if span[1] != span[0])
    problems: list[Problem] = []
    if any(fill.size < 0 for fill in file.fills) or file.size < 0:
        problems.append(_wrong("SR-COPY-BYTES", "a size is negative", file=file.path))
    if spans and (spans[0][0] < 0 or max(stop for _, stop in spans) > file.size):
        problems.append(_wrong("SR-COPY-BYTES", f"bytes lie outside the {file.size} of the file", file=file.path))
    edges = [(0, 0), *spans, (file.size, file.size)]
    for before, after in pairwise(edges):
        if before[1] != after[0]:
            what = "are written twice" if after[0] < before[1] else "are written by nothing"
            first, last = min(before[1], after[0]), max(before[1], after[0])
            problems.append(_wrong("SR-COPY-BYTES", f"bytes {first} to {last} {what}", file=file.path))
            break
    return [*problems, *_check_checksums(file)]


def _check_checksums(file: FilePlan) -> list[Problem]:
    problems: list[Problem] = []
    homes = sorted(file.literals, key=lambda literal: literal.at)
    home_starts = [literal.at for literal in homes]
    ranges = sorted((checksum.start, checksum.stop) for checksum in file.checksums if checksum.stop > checksum.start)
    range_starts = [start for start, _ in ranges]
    ends = list(accumulate((stop for _, stop in ranges), max))
    places = sorted(place for checksum in file.checksums for place in checksum.places)
    for checksum in file.checksums:
        if not 0 <= checksum.start <= checksum.stop <= file.size:
            what = f"bytes {checksum.start} to {checksum.stop} are not in the file"
            problems.append(_wrong("SR-COPY-CHECKSUM", what, file=file.path))
    for place in places:
        number = bisect_right(home_starts, place) - 1
        content = homes[number].content[place - homes[number].at :][:_CHECKSUM_BYTES] if number >= 0 else b""
        if len(content) < _CHECKSUM_BYTES:
            problems.append(
                _wrong("SR-COPY-CHECKSUM", f"the checksum's place {place} is in no literal", file=file.path)
            )
        elif any(content):
            problems.append(_wrong("SR-COPY-CHECKSUM", f"the literal holds other bytes at {place}", file=file.path))
        before = bisect_left(range_starts, place + _CHECKSUM_BYTES)
        if before and ends[before - 1] > place:
            what = f"the place {place} lies inside checksummed bytes"
            problems.append(_wrong("SR-COPY-CHECKSUM", what, file=file.path))
    if any(after - before < _CHECKSUM_BYTES for before, after in pairwise(places)):
        problems.append(_wrong("SR-COPY-CHECKSUM", "two checksums share a place", file=file.path))
    return problems

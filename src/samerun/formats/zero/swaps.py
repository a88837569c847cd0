"""Rank files under each other's names. DeepSpeed loads them without an error; some layouts show it.

Stages 1 and 2 keep in every file which slice of which parameter its rank holds. Stage 3 keeps nothing of the kind, but
the end of a parameter that does not divide is padding, in the last ranks' files only, and moments are zero there. And
no two of its ranks hold the same values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from samerun.errors import Problem
from samerun.formats.base import Extent, view_extent
from samerun.formats.deepspeed.layout import concatenated_segments, partitioned_padding
from samerun.formats.deepspeed.model import ModelStates, Shapes
from samerun.formats.deepspeed.model_tensors import Names
from samerun.formats.deepspeed.shards import OptimStates
from samerun.formats.zero.optimizer_tensors import alignment_of, place_of, shapes_for
from samerun.formats.zero.source import Source

_MOST_PADDINGS = 64
_FEWEST_ELEMENTS = 4
_FEWEST_BYTES = 16  # of values: a step counter is alike on all ranks


def check_swapped(source: Source, names: Names) -> list[Problem]:
    """Returns what shows that rank files do not belong to the ranks in their names."""
    return [*_by_maps(source, names), *_by_shared(source), *_by_padding(source), *_by_copies(source)]


def _by_copies(source: Source) -> list[Problem]:
    """Finds files of two ranks with the same values, at stage 3: one is a copy, and what its rank held is lost.

    Recorded checksums tell which may be equal; only those are read. Ranks that hold zeros alone are alike by right.
    """
    problems: list[Problem] = []
    alike: dict[Hashable, OptimStates] = {}
    for (mp, _), optim in source.optims.items() if source.stage == 3 else ():
        held = {name: item for name, item in optim.file.archive.records.items() if name.startswith("data/")}
        mark = (mp, tuple(sorted((name, item.num_bytes, item.crc32) for name, item in held.items())))
        first = alike.setdefault(mark, optim)
        if first is not optim and _same_values(source, first, optim):
            problems.append(_copied(first, optim))
    return problems


def _same_values(source: Source, first: OptimStates, second: OptimStates) -> bool:
    """Whether two files hold the same values, which are not all zero where there are more than a few bytes of them."""
    filled = False
    for name, item in first.file.archive.records.items():
        if name.startswith("data/"):
            other = second.file.archive.records[name]
            a, b = (
                np.frombuffer(
                    source.files.range(file.file.path, at.offset_bytes, at.offset_bytes + at.num_bytes), np.uint8
                )
                for file, at in ((first, item), (second, other))
            )
            if not np.array_equal(a, b):
                return False
            filled = filled or (item.num_bytes > _FEWEST_BYTES and bool(a.any()))
    return filled


def _copied(first: OptimStates, second: OptimStates) -> Problem:
    return Problem(
        "SR-ZERO-SWAPPED",
        f"the files of ranks {first.name.dp} and {second.name.dp} hold the same values: one is a copy of the other",
        where={"file": str(second.file.path), "rank": second.name.dp},
        expected=f"the slices of rank {second.name.dp}",
        found=f"what {first.file.path.name} holds",
        hint="a link or a copy stands in another file's place; what that rank held is in no file. Restore it, or use "
        "another checkpoint",
    )


def _by_maps(source: Source, names: Names) -> list[Problem]:
    """Compares each file's own slice map with the slice of the rank in its name."""
    found: dict[tuple[int, int], int] = {}
    for mp in range(source.degrees.mp):
        optims = {dp: optim for (rank, dp), optim in source.optims.items() if rank == mp and optim.mappings}
        for number in range(max((len(optim.shards) for optim in optims.values()), default=0)):
            for dp, other in _permuted(source, names, optims, number).items():
                found.setdefault((mp, dp), other)
    return [_swapped(source.optims[place], f"the slices of rank {other}") for place, other in found.items()]


def _permuted(source: Source, names: Names, optims: Mapping[int, OptimStates], number: int) -> dict[int, int]:
    """Returns, by rank, the other rank whose slice map its file holds; empty unless that explains every difference."""
    held = {
        dp: optim.mappings[number] for dp, optim in optims.items() if optim.mappings and number < len(optim.mappings)
    }
    for order in _orders(source, names, optims, number):
        expected = {dp: _map_of(source, optim, number, order) for dp, optim in optims.items()}
        odd = {dp for dp in held if dict(held[dp]) != expected[dp]}
        if not odd:
            return {}
        matches = {dp: next((other for other, map_ in expected.items() if map_ == dict(held[dp])), None) for dp in odd}
        if all(other is not None for other in matches.values()):
            return {dp: other for dp, other in matches.items() if other is not None}
    return {}


def _orders(
    source: Source, names: Names, optims: Mapping[int, OptimStates], number: int
) -> Iterator[tuple[Shapes, bool]]:
    """Yields the orders in which maps may be kept: the flattened one, and the model's own (round-robin gradients)."""
    for dp, optim in islice(optims.items(), 1):
        shapes = shapes_for(source, optim.name.mp, dp)
        if shapes is not None and number < len(shapes):
            yield shapes[number], True
            rank = {name: place for place, name in enumerate(names.order)}
            yield tuple(sorted(shapes[number], key=lambda pair: rank.get(pair[0], len(rank)))), False


def _map_of(source: Source, optim: OptimStates, number: int, order: tuple[Shapes, bool]) -> dict[str, tuple[int, int]]:
    if number >= len(optim.shards):
        return {}
    shapes, aligned = order
    settings = optim.groups[number] if number < len(optim.groups) else {}
    place = place_of(source, optim, number, settings)
    alignment = alignment_of(optim, number) if aligned else ()
    segments = concatenated_segments(shapes, alignment, optim.shards[number].length, place.partition)
    return {segment.name: (segment.start, segment.count) for segment in segments}


def _by_shared(source: Source) -> list[Problem]:
    """Only global rank 0 records ties, so a higher rank's file that has them was written by rank 0."""
    odd = [
        model
        for (mp, dp), model in source.models.items()
        if dp and mp == 0 and model.shared and not _first_shares(source)
    ]
    return [_swapped(model, "ties, which only rank 0 records") for model in odd]


def _first_shares(source: Source) -> bool:
    first = source.models.get((0, 0))
    return first is None or bool(first.shared)


def _by_padding(source: Source) -> list[Problem]:
    """Looks at the padding of last ranks (stage 3): a moment that is not zero there belongs to another rank."""
    if source.stage != 3:
        return []
    return [
        _swapped(optim, "moments where the last rank has padding")
        for optim in source.optims.values()
        if _padding_is_filled(source, optim)
    ]


def tells_last_rank(source: Source) -> bool:
    """Whether padding shows that every last rank's file is a last rank's: there is enough, and it is all zero."""
    last = [optim for (_, dp), optim in source.optims.items() if dp == source.degrees.dp - 1]
    counts = [_padding(source, optim) for optim in last]
    return bool(counts) and all(seen >= _FEWEST_ELEMENTS and filled == 0 for seen, filled in counts)


def _padding_is_filled(source: Source, optim: OptimStates) -> bool:
    seen, filled = _padding(source, optim)
    return seen >= _FEWEST_ELEMENTS and filled * 2 > seen


def _padding(source: Source, optim: OptimStates) -> tuple[int, int]:
    """Returns how many elements of a rank's moments should be padding, and how many of those are not zero."""
    shapes = shapes_for(source, optim.name.mp, optim.name.dp or 0) or ()
    seen = filled = 0
    for group, members in enumerate(optim.members):
        settings = optim.groups[group] if group < len(optim.groups) else {}
        for number in members if _keeps_padding_zero(settings) else ():
            if number >= len(shapes) or number >= len(optim.shards):
                continue
            place = place_of(source, optim, number, settings)
            found = partitioned_padding(shapes[number], place.partitions, place.partition)
            paddings = [(start, count) for _, start, count in islice(found, _MOST_PADDINGS)]
            for extent in islice(optim.shards[number].slots.values(), 2):
                more, nonzero = _count_filled(source, extent, paddings)
                seen, filled = seen + more, filled + nonzero
    return seen, filled


def _keeps_padding_zero(settings: Mapping[str, object]) -> bool:
    """Whether an optimizer leaves moments at zero where gradients are: coupled weight decay does not."""
    return settings.get("weight_decay") in (0, 0.0) or settings.get("decoupled_weight_decay") is True


def _count_filled(source: Source, extent: Extent, places: Sequence[tuple[int, int]]) -> tuple[int, int]:
    values = view_extent(source.files, extent)
    seen = filled = 0
    for start, count in places:
        if start + count <= values.shape[0]:
            seen += count
            filled += int(np.count_nonzero(values[start : start + count]))
    return seen, filled


def _swapped(file: OptimStates | ModelStates, found: str) -> Problem:
    return Problem(
        "SR-ZERO-SWAPPED",
        f"the file is named after rank {file.name.dp} and was written by another rank",
        where={"file": str(file.file.path), "rank": file.name.dp},
        expected=f"the slices of rank {file.name.dp}",
        found=found,
        hint="rank files were renamed or copied into each other's place; DeepSpeed loads them without an error and "
        "every parameter is wrong. Put them back under their names",
    )

"""Gives what FSDP1 flattened its names and shapes back, from optimizer state that kept both.

A local state dict holds rows of values. `FSDP.optim_state_dict` undoes the flattening for the optimizer: its slots have
the parameters' names and shapes, and its groups list them in the order in which each flat parameter holds them, without
padding when `use_orig_params=False` (`_optim_utils.py`, `_flat_param.py`, torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from samerun.core.flat import flat_boxes, row_major_strides
from samerun.core.state import normalize_fqn
from samerun.errors import Problem, Severity
from samerun.formats.base import Extent
from samerun.formats.statedict.optimizer import parse_optimizer, shape_of
from samerun.formats.statedict.stored import Stored, place_of, store_boxes

Shape = tuple[int, ...]
Path = tuple[str, ...]
Known = Mapping[str, Shape | None]

_SHOWN = 4


def known_shapes(optimizer: Mapping[Any, Any]) -> dict[str, Shape | None]:
    """Returns the names in an optimizer's state, in order, with shapes as far as slots show them; none by position."""
    parsed = parse_optimizer("", optimizer)
    if parsed.positional:
        return {}
    return {normalize_fqn(key): shape_of(parsed.members.get(key)) for key in parsed.keys}


def shape_rows(rows: Mapping[Path, Stored], known: Known, num_ranks: int) -> tuple[dict[Path, Stored], list[Problem]]:
    """Returns parameters saved as rows of values with their shapes, as rows still where nothing tells it."""
    shaped: dict[Path, Stored] = {}
    shapes = {place_of(row): shape for path, row in rows.items() if (shape := _shape(path[-1], row, known))}
    lacking: list[str] = []
    for path, row in rows.items():
        shape = _shape(path[-1], row, known) or shapes.get(place_of(row))  # a tied weight is stepped under one name
        if shape is None and place_of(row) is not None:
            lacking.append(normalize_fqn(path[-1]))
        shaped[path] = row if shape is None else cut(row, 0, shape)
    return shaped, [_no_shapes(lacking, num_ranks)] if lacking else []


def _shape(name: str, row: Stored, known: Known) -> Shape | None:
    shape = known.get(normalize_fqn(name))
    return shape if shape is not None and math.prod(shape) == row.num_elements and _plain(row) else None


def split_flats(
    flats: Mapping[Path, Stored], known: Known, num_ranks: int
) -> tuple[dict[Path, dict[str, Stored]], list[Problem]]:
    """Takes flat parameters apart. Returns the parameters inside by path of the flat one, for those that could be."""
    modules = {path: normalize_fqn(path[-1]).rpartition(".")[0] for path in flats}
    inside: dict[Path, dict[str, Stored]] = {}
    why: dict[Path, str] = {}
    for path, flat in flats.items():
        names = list(_names_in(modules[path], set(modules.values()), known))
        shapes = {name: shape for name in names if (shape := known[name]) is not None}
        count = sum(map(math.prod, shapes.values()))
        if names and len(shapes) == len(names) and count == flat.num_elements and _plain(flat):
            inside[path] = dict(_split(flat, shapes))
        elif names:
            why[path] = _lacking(flat, names, shapes, count)
        else:
            why[path] = ""
    return inside, [_no_boundaries(why, num_ranks)] if why else []


def _names_in(module: str, modules: set[str], known: Known) -> Iterator[str]:
    """Yields the parameters of a wrapped module in order, those of modules wrapped inside it left out."""
    prefix = f"{module}." if module else ""
    deeper = tuple(f"{other}." for other in modules if other != module and other.startswith(prefix))
    return (name for name in known if name.startswith(prefix) and not name.startswith(deeper))


def _split(flat: Stored, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Stored]]:
    first = 0
    for name, shape in shapes.items():
        yield name, cut(flat, first, shape)
        first += math.prod(shape)


def _plain(row: Stored) -> bool:
    return all(len(extent.shape) == 1 and extent.contiguous for extent in row.extents)


def cut(row: Stored, first: int, shape: Shape) -> Stored:
    """Returns the tensor of this shape whose values, row-major, are a row's from element `first` on."""
    boxes: list[tuple[Shape, Shape, Extent]] = []
    places = zip(row.tiling.offsets[:, 0].tolist(), row.tiling.sizes[:, 0].tolist(), row.extents, strict=True)
    for start, length, extent in places:
        low, high = max(start, first), min(start + length, first + math.prod(shape))
        if high <= low:
            continue
        for box in flat_boxes(shape, low - first, high - first):
            at = extent.offset_bytes + (box.start + first - start) * row.dtype.num_bytes
            strides = row_major_strides(box.sizes)
            boxes.append((box.offsets, box.sizes, replace(extent, offset_bytes=at, shape=box.sizes, strides=strides)))
    return store_boxes(shape, row.dtype, boxes)


def _lacking(flat: Stored, names: Sequence[str], shapes: Mapping[str, Shape], count: int) -> str:
    without = [name for name in names if name not in shapes]
    if without:
        return f"no optimizer slot tells the shape of {_some(without)}"
    return f"the optimizer's {len(names)} parameters in it have {count} values, it has {flat.num_elements}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _only(num_ranks: int) -> str:
    return (
        f"only FSDP1 with the same wrapping on {num_ranks} ranks loads it; resume there once and save a sharded or "
        "full state dict"
    )


def _no_shapes(names: Sequence[str], num_ranks: int) -> Problem:
    return Problem(
        "SR-FSDP1-SHAPES",
        f"a local FSDP1 state dict does not keep shapes, and no named optimizer state tells them for {len(names)} "
        f"parameters: {_some(names)}; they are read as rows of values, complete and in order",
        severity=Severity.WARNING,
        where={"tensor": f"param:{names[0]}"},
        hint=_only(num_ranks),
    )


def _no_boundaries(why: Mapping[Path, str], num_ranks: int) -> Problem:
    told = [f"{normalize_fqn(path[-1])}: {reason}" for path, reason in why.items() if reason]
    reasons = f" ({'; '.join(told[:_SHOWN])})" if told else ", and no optimizer state with names and shapes is here"
    return Problem(
        "SR-FSDP1-BOUNDARIES",
        "a local FSDP1 state dict does not record where parameters begin inside flat parameters"
        f"{reasons}: {len(why)} of them are read as one row of values each",
        severity=Severity.WARNING,
        where={"tensor": f"param:{normalize_fqn(next(iter(why))[-1])}"},
        hint=_only(num_ranks),
    )

"""The tensors of a checkpoint as rows that are searched, sorted and paged; as a tree of their names; by size. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.state import LogicalState

MAX_PAGE = 500
MAX_CHILDREN = 400
"""Children of one node of the tree that are listed; the rest is found by searching."""
MAX_TILES = 60
"""Rectangles of a treemap; what is smaller shares one."""

_ROLES = ("param", "master", "ema", "buffer", "optim")

Rectangle = tuple[float, float, float, float]
"""Left, top, width, height."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor. `part` is its role, with the slot for optimizer tensors. `codes` are findings that block on it."""

    key: str
    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    num_bytes: int
    pieces: int
    codes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the row as the page gets it."""
        return {
            "key": self.key,
            "part": self.part,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "elements": self.elements,
            "bytes": self.num_bytes,
            "pieces": self.pieces,
            "codes": list(self.codes),
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows are wanted. Empty fields want all. `find` has parts of a key, all of which must occur."""

    find: str = ""
    part: str = ""
    dtype: str = ""
    under: str = ""
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree: its own label, the whole prefix, and the tensors below it."""

    label: str
    prefix: str
    tensors: int
    num_bytes: int
    leaf: bool
    broken: int


@dataclass(frozen=True, slots=True)
class Table:
    """All rows: parameters first, optimizer state last, otherwise in the checkpoint's order."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, state: LogicalState, broken: Mapping[str, Sequence[str]]) -> Table:
        """Returns the table of a state. `broken` has the codes of findings by key."""
        return cls(
            tuple(
                Row(
                    key=key,
                    part=f"{entry.key.role}.{entry.key.slot}" if entry.key.slot else entry.key.role.value,
                    name=entry.key.fqn,
                    shape=entry.shape,
                    dtype=entry.dtype.name,
                    elements=entry.num_elements,
                    num_bytes=entry.num_bytes,
                    pieces=len(entry.tiling),
                    codes=tuple(dict.fromkeys(broken.get(key, ()))),
                )
                for key, entry in sorted(state.tensors.items(), key=lambda item: _ROLES.index(item[1].key.role))
            )
        )

    def choose(self, choice: Choice) -> list[Row]:
        """Returns the rows that are wanted."""
        words = choice.find.lower().split()
        return [
            row
            for row in self.rows
            if (not choice.part or row.part == choice.part)
            and (not choice.dtype or row.dtype == choice.dtype)
            and (not choice.broken or row.codes)
            and _is_under(row.name, choice.under)
            and all(word in row.key.lower() for word in words)
        ]


def _is_under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


_SORTS: dict[str, Callable[[Row], Any]] = {
    "name": lambda row: (natural(row.name), row.part),
    "part": lambda row: (row.part, natural(row.name)),
    "dtype": lambda row: (row.dtype, natural(row.name)),
    "shape": lambda row: row.shape,
    "elements": lambda row: row.elements,
    "bytes": lambda row: row.num_bytes,
    "pieces": lambda row: row.pieces,
}
SORTS = frozenset({*_SORTS, ""})


def sort_rows(rows: Sequence[Row], by: str, *, descending: bool) -> list[Row]:
    """Returns the rows in the order of a column; as they are where `by` is empty."""
    if not by:
        return list(reversed(rows)) if descending else list(rows)
    return sorted(rows, key=_SORTS[by], reverse=descending)


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Returns a key that sorts numbers inside names by their value.

    >>> sorted(["layers.10.w", "layers.9.w"], key=natural)
    ['layers.9.w', 'layers.10.w']
    """
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text) if part)


def children(rows: Iterable[Row], under: str) -> list[Node]:
    """Returns the nodes right below a prefix, in natural order. A chain of single children is one node."""
    groups: dict[str, list[Row]] = {}
    start = len(under) + 1 if under else 0
    for row in rows:
        if row.name != under:
            groups.setdefault(row.name[start:].partition(".")[0], []).append(row)
    nodes = [_node(f"{under}.{label}" if under else label, label, group) for label, group in groups.items()]
    return sorted(nodes, key=lambda node: natural(node.label))


def _node(prefix: str, label: str, rows: list[Row]) -> Node:
    while len(further := {_next(row.name, prefix) for row in rows}) == 1 and (only := further.pop()):
        prefix, label = f"{prefix}.{only}", f"{label}.{only}"
    return Node(
        label=label,
        prefix=prefix,
        tensors=len(rows),
        num_bytes=sum(row.num_bytes for row in rows),
        leaf=all(row.name == prefix for row in rows),
        broken=sum(1 for row in rows if row.codes),
    )


def _next(name: str, prefix: str) -> str:
    return name[len(prefix) + 1 :].partition(".")[0]


def sizes(rows: Iterable[Row], by: str) -> list[dict[str, Any]]:
    """Returns tensors, elements and bytes by `part` or `dtype`, the largest first."""
    found: dict[str, list[int]] = {}
    for row in rows:
        total = found.setdefault(row.part if by == "part" else row.dtype, [0, 0, 0])
        for place, count in enumerate((1, row.elements, row.num_bytes)):
            total[place] += count
    ordered = sorted(found.items(), key=lambda item: -item[1][2])
    return [
        {"name": name, "tensors": tensors, "elements": elements, "bytes": num_bytes}
        for name, (tensors, elements, num_bytes) in ordered
    ]


def treemap(nodes: Sequence[Node]) -> list[tuple[Node | None, int, Rectangle]]:
    """Returns (node, bytes, rectangle) for the largest nodes on a canvas of 100 x 100; None stands for all others."""
    ordered = sorted((node for node in nodes if node.num_bytes), key=lambda node: -node.num_bytes)
    shown, rest = ordered[:MAX_TILES], ordered[MAX_TILES:]
    parts: list[tuple[Node | None, int]] = [(node, node.num_bytes) for node in shown]
    if rest:
        parts.append((None, sum(node.num_bytes for node in rest)))
        parts.sort(key=lambda part: -part[1])
    boxes = squarify([size for _, size in parts])
    return [(node, size, box) for (node, size), box in zip(parts, boxes, strict=True)]


def squarify(amounts: Sequence[float], canvas: Rectangle = (0.0, 0.0, 100.0, 100.0)) -> list[Rectangle]:
    """Returns a rectangle per amount, its area in proportion, near squares; amounts are positive and descend.

    Source: Bruls, Huizing, van Wijk, "Squarified treemaps", 2000.
    """
    total = sum(amounts)
    left, top, width, height = canvas
    scale = width * height / total if total else 0.0
    areas = [amount * scale for amount in amounts]
    boxes: list[Rectangle] = []
    while len(boxes) < len(areas):
        row = _take_row(areas[len(boxes) :], min(width, height))
        depth = sum(row) / min(width, height)
        along = 0.0
        for area in row:
            length = area / depth
            boxes.append((left, top + along, depth, length) if width >= height else (left + along, top, length, depth))
            along += length
        if width >= height:
            left, width = left + depth, width - depth
        else:
            top, height = top + depth, height - depth
        if min(width, height) <= 1e-9:
            break
    boxes += [(left, top, 0.0, 0.0)] * (len(areas) - len(boxes))  # too small to be seen after rounding
    return [_rounded(box) for box in boxes]


def _take_row(areas: Sequence[float], side: float) -> list[float]:
    """Returns the first areas that share a row: as long as the worst proportion in it gets no worse."""
    row = [areas[0]]
    for area in areas[1:]:
        if _worst([*row, area], side) > _worst(row, side):
            break
        row.append(area)
    return row


def _worst(row: Sequence[float], side: float) -> float:
    total = sum(row)
    return max(max(side**2 * area / total**2, total**2 / (side**2 * area)) for area in row)


def _rounded(box: Rectangle) -> Rectangle:
    left, top, width, height = (round(value, 3) for value in box)
    return left, top, width, height


def page_of(rows: Sequence[Row], first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of one page as JSON."""
    for row in rows[first : first + min(count, MAX_PAGE)]:
        yield row.to_json()

"""Layouts as pictures: which rank belongs to which batch replica, and which rank owns which slice of a tensor.

Who owns what follows from the layout by the frameworks' own rules: tensor parallelism cuts first, on the first of the
two leading dimensions that it divides; FSDP2 then cuts dimension 0 into chunks of ceil(rows / ranks), so that the last
ranks may hold less, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from samerun.core.mesh import AXES, Layout

HUES = 8
"""Colours that the page has for ranks and replicas; beyond them they repeat, and the numbers tell them apart."""
MAX_DRAWN_RANKS = 256
MAX_SHAPES = 24
"""Distinct tensor shapes whose ownership is drawn."""

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a replica: its number and its place along the axes inside the replica, in words."""

    rank: int
    place: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One batch replica: its number and the ranks that see its samples."""

    number: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A layout. `left_out` replicas are not drawn one by one."""

    text: str
    world_size: int
    batch_replicas: int
    axes: tuple[tuple[str, int], ...]
    replicas: tuple[Replica, ...]
    left_out: int = 0
    idle_ranks: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """The rectangle of a tensor that one rank owns, rows x columns (everything beyond dimension 0 flattened)."""

    rank: int
    rows: Interval
    columns: Interval

    @property
    def is_empty(self) -> bool:
        """Whether the rank owns nothing of the tensor."""
        return self.rows[0] >= self.rows[1] or self.columns[0] >= self.columns[1]


@dataclass(frozen=True, slots=True)
class Mark:
    """A slice as it is drawn: the ranks that own it, and its place in the picture, in percent."""

    ranks: tuple[int, ...]
    rows: Interval
    columns: Interval
    top: float
    height: float
    left: float
    width: float

    @property
    def text(self) -> str:
        """Who owns it."""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True, slots=True)
class Ribbon:
    """Rows on their way: from a rank to a rank, with both ends' upper and lower edge in percent."""

    source: int
    destination: int
    left: tuple[float, float]
    right: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """One tensor before and after. `example` is its name, `others` further names of the same shape.

    `ribbons` connect rows, for tensors that are cut by rows only. `moved_share` is the share of rows that another rank
    number owns afterwards. `empty_before` and `empty_after` are ranks that own nothing.
    """

    shape: tuple[int, ...]
    example: str
    others: tuple[str, ...]
    before: tuple[Mark, ...]
    after: tuple[Mark, ...]
    empty_before: tuple[int, ...]
    empty_after: tuple[int, ...]
    copies_before: int
    copies_after: int
    ribbons: tuple[Ribbon, ...]
    moved_share: float


def draw_mesh(layout: Layout, *, idle_ranks: int = 0) -> Mesh:
    """Returns the layout grouped by batch replica."""
    members: dict[int, list[Member]] = {}
    shown = min(layout.world_size, MAX_DRAWN_RANKS)
    inner = [axis for axis in AXES if axis not in ("dp_replicate", "dp_shard") and getattr(layout, axis) > 1]
    for rank in range(layout.world_size):
        if rank >= shown:
            break
        at = layout.coordinate(rank)
        place = " ".join(f"{axis}{at[axis]}" for axis in inner)
        members.setdefault(layout.batch_replica(rank), []).append(Member(rank, place))
    sizes = layout.to_dict(short=True)
    return Mesh(
        text=str(layout),
        world_size=layout.world_size,
        batch_replicas=layout.batch_replicas,
        axes=tuple(sizes.items()),
        replicas=tuple(Replica(number, tuple(ranks)) for number, ranks in sorted(members.items())),
        left_out=layout.batch_replicas - len(members),
        idle_ranks=idle_ranks,
    )


def slices(layout: Layout, shape: Sequence[int]) -> tuple[Slice, ...]:
    """Returns what each rank of the first copy of a tensor owns, in rank order."""
    rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    cut_rows = layout.tp > 1 and len(shape) >= 2 and rows % layout.tp == 0
    cut_columns = layout.tp > 1 and len(shape) >= 2 and not cut_rows and shape[1] % layout.tp == 0
    shards = layout.dp_shard * layout.cp
    return tuple(_slice(layout, rank, rows, columns, cut_rows, cut_columns, shards) for rank in _first_copy(layout))


def _first_copy(layout: Layout) -> Iterator[int]:
    """Yields the ranks of one pipeline stage and one replica group: the others hold other layers, or the same again."""
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        if at["pp"] == at["dp_replicate"] == 0:
            yield rank


def _slice(layout: Layout, rank: int, rows: int, columns: int, cut_rows: bool, cut_columns: bool, shards: int) -> Slice:
    at = layout.coordinate(rank)
    first, end = 0, rows
    if cut_rows:
        part = rows // layout.tp
        first, end = at["tp"] * part, (at["tp"] + 1) * part
    chunk = -(-(end - first) // shards)
    index = at["dp_shard"] * layout.cp + at["cp"]
    mine = (min(first + index * chunk, end), min(first + (index + 1) * chunk, end))
    across = (0, columns)
    if cut_columns:
        part = columns // layout.tp
        across = (at["tp"] * part, (at["tp"] + 1) * part)
    return Slice(rank, mine, across)


def plan_ownership(source: Layout, destination: Layout, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Ownership, ...]:
    """Returns one picture per distinct shape, the largest first, for `shapes` by tensor name."""
    if max(source.world_size, destination.world_size) > MAX_DRAWN_RANKS:
        return ()
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        if shape:
            by_shape.setdefault(tuple(shape), []).append(name)
    largest = sorted(by_shape, key=lambda shape: (-math.prod(shape), shape))[:MAX_SHAPES]
    return tuple(_ownership(source, destination, shape, by_shape[shape]) for shape in largest)


def _ownership(source: Layout, destination: Layout, shape: tuple[int, ...], names: Sequence[str]) -> Ownership:
    before, after = slices(source, shape), slices(destination, shape)
    rows, columns = shape[0], math.prod(shape[1:])
    by_rows = all(item.columns == (0, columns) for item in (*before, *after))
    left, right = _marks(before, rows, columns, by_rows), _marks(after, rows, columns, by_rows)
    pairs = list(_shared_rows(left, right)) if by_rows else []
    moved = sum(end - first for one, two, (first, end) in pairs if one.ranks[0] != two.ranks[0])
    return Ownership(
        shape=shape,
        example=names[0],
        others=tuple(names[1:]),
        before=left,
        after=right,
        empty_before=tuple(item.rank for item in before if item.is_empty),
        empty_after=tuple(item.rank for item in after if item.is_empty),
        copies_before=source.dp_replicate,
        copies_after=destination.dp_replicate,
        ribbons=tuple(
            Ribbon(one.ranks[0], two.ranks[0], _edges(one, part), _edges(two, part)) for one, two, part in pairs
        ),
        moved_share=moved / rows if rows else 0.0,
    )


def _marks(parts: Sequence[Slice], rows: int, columns: int, by_rows: bool) -> tuple[Mark, ...]:
    """Returns the drawn slices. Cut by rows, they are kept apart by a gap, so that what moves is seen to move."""
    owners: dict[tuple[Interval, Interval], list[int]] = {}
    for part in parts:
        if not part.is_empty:
            owners.setdefault((part.rows, part.columns), []).append(part.rank)
    gap = min(4.0, 16.0 / max(len(owners) - 1, 1)) if by_rows else 0.0
    scale = (100.0 - gap * (len(owners) - 1)) / rows
    return tuple(
        Mark(
            ranks=tuple(ranks),
            rows=own,
            columns=across,
            top=round(own[0] * scale + number * gap, 3),
            height=round((own[1] - own[0]) * scale, 3),
            left=round(100 * across[0] / columns, 3),
            width=round(100 * (across[1] - across[0]) / columns, 3),
        )
        for number, ((own, across), ranks) in enumerate(owners.items())
    )


def _shared_rows(before: Sequence[Mark], after: Sequence[Mark]) -> Iterator[tuple[Mark, Mark, Interval]]:
    for one in before:
        for two in after:
            first, end = max(one.rows[0], two.rows[0]), min(one.rows[1], two.rows[1])
            if first < end:
                yield one, two, (first, end)


def _edges(mark: Mark, rows: Interval) -> tuple[float, float]:
    """Returns where `rows` lie in the picture of the slice that owns them."""
    scale = mark.height / (mark.rows[1] - mark.rows[0])
    return (
        round(mark.top + (rows[0] - mark.rows[0]) * scale, 3),
        round(mark.top + (rows[1] - mark.rows[0]) * scale, 3),
    )

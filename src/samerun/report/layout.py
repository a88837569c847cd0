"""Layouts as pictures: which rank belongs to which batch replica, and which rank owns which slice of a tensor.

Who owns what follows from the cuts that a job reports of each tensor. Where it reports none they are taken to be the
frameworks' usual ones: tensor parallelism cuts first, on the first of the two leading dimensions that it divides; FSDP2
then cuts dimension 0 into chunks of ceil(rows / ranks), so that the last ranks may hold less, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from samerun.core.mesh import AXES, Layout
from samerun.train.shards import Split, held_intervals

HUES = 8
"""Colours that the page has for ranks and replicas; beyond them they repeat, and the numbers tell them apart."""
MAX_DRAWN_RANKS = 256
"""Ranks that are drawn one by one in the picture of a layout."""
MAX_OWNERS = 4096
"""Ranks up to which the owners of slices are drawn."""
MAX_MARKS = 8_000
"""Slices over all pictures of owners; with many ranks fewer tensors are drawn."""
MAX_SHAPES = 24
"""Distinct tensor shapes whose ownership is drawn."""

Interval = tuple[int, int]
Cut = tuple[str, int, int]
"""Mesh axis, dimension, strided: how a tensor is cut once (`samerun.train.shards.Split`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor in a job: its global shape, its cuts in order (None: not reported), and the lowest rank that has it."""

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] | None = None
    lead: int = 0


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
    """A rectangle of a tensor that one rank owns, rows x columns (everything beyond dimension 0 flattened)."""

    rank: int
    rows: Interval
    columns: Interval


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
    number owns afterwards. `empty_before` and `empty_after` are ranks that own nothing. `reported` says whether the
    cuts are the jobs' own and not the usual ones.
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
    reported: bool


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


def slices(layout: Layout, held: Held) -> dict[int, list[Slice]] | None:
    """Returns what each rank of one copy of a tensor owns, by rank; None if its cuts make no rows and columns.

    Drawn is the copy that `held.lead` belongs to: other pipeline stages do not have the tensor, other replica groups
    have the same again.
    """
    cuts = usual_cuts(layout, held.shape) if held.cuts is None else held.cuts
    if any(dim > 1 for _, dim, _ in cuts) or any(axis not in _PARTS for axis, _, _ in cuts):
        return None
    num_rows, num_columns = held.shape[0] if held.shape else 1, held.shape[1] if len(held.shape) > 1 else 1
    depth = math.prod(held.shape[2:])
    owned: dict[int, list[Slice]] = {}
    for rank in _copy_of(layout, held.lead):
        rows = held_intervals(num_rows, _splits(layout, rank, cuts, 0))
        across = held_intervals(num_columns, _splits(layout, rank, cuts, 1))
        columns = [(first * depth, end * depth) for first, end in across]
        owned[rank] = [Slice(rank, row, column) for row in rows for column in columns if column[0] < column[1]]
    return owned


def usual_cuts(layout: Layout, shape: Sequence[int]) -> tuple[Cut, ...]:
    """Returns the cuts that a tensor of this shape usually gets."""
    cuts: list[Cut] = []
    if layout.tp > 1 and len(shape) > 1:
        cuts += [("tp", dim, 1) for dim in (0, 1) if shape[dim] % layout.tp == 0][:1]
    return (*cuts, ("dp_shard_cp", 0, 1))


_PARTS: Mapping[str, tuple[str, ...]] = {**{axis: (axis,) for axis in AXES}, "dp_shard_cp": ("dp_shard", "cp")}
"""The axes of a layout that a mesh axis runs along, outermost first."""


def _splits(layout: Layout, rank: int, cuts: Sequence[Cut], dim: int) -> list[Split]:
    at = layout.coordinate(rank)
    splits: list[Split] = []
    for axis, cut_dim, strided in cuts:
        if cut_dim != dim:
            continue
        parts, index = 1, 0
        for part in _PARTS[axis]:
            size = getattr(layout, part)
            parts, index = parts * size, index * size + at[part]
        splits.append(Split(parts=parts, index=index, strided=strided))
    return splits


def _copy_of(layout: Layout, lead: int) -> list[int]:
    """Returns the ranks of the pipeline stage and replica group that `lead` belongs to."""
    at = layout.coordinate(min(lead, layout.world_size - 1))
    group = (at["pp"], at["dp_replicate"])
    ranks = ((rank, layout.coordinate(rank)) for rank in range(layout.world_size))
    return [rank for rank, own in ranks if (own["pp"], own["dp_replicate"]) == group]


def plan_ownership(
    source: Layout, destination: Layout, before: Mapping[str, Held], after: Mapping[str, Held]
) -> tuple[Ownership, ...]:
    """Returns one picture per distinct shape and cut, the largest first, of the tensors that both jobs have.

    Args:
        source: the layout before the move.
        destination: the layout after it.
        before: the tensors by name, as a job on the source layout has them.
        after: the same on the destination; without a candidate, what is known of them.
    """
    if max(source.world_size, destination.world_size) > MAX_OWNERS:
        return ()
    alike: dict[tuple[Held, Held], list[str]] = {}
    for name, held in before.items():
        if held.shape and name in after:
            alike.setdefault((held, after[name]), []).append(name)
    largest = sorted(alike, key=lambda pair: (-math.prod(pair[0].shape), pair[0].shape))
    drawn: list[Ownership] = []
    left = MAX_MARKS
    for one, two in largest[:MAX_SHAPES]:
        item = _ownership(source, destination, one, two, alike[one, two])
        if item is None:
            continue
        left -= len(item.before) + len(item.after)
        if left < 0 and drawn:
            break
        drawn.append(item)
    return tuple(drawn)


def _ownership(source: Layout, destination: Layout, one: Held, two: Held, names: Sequence[str]) -> Ownership | None:
    before, after = slices(source, one), slices(destination, two)
    if before is None or after is None or one.shape != two.shape:
        return None
    rows, columns = one.shape[0], math.prod(one.shape[1:])
    flat = [part for parts in (*before.values(), *after.values()) for part in parts]
    by_rows = all(part.columns == (0, columns) for part in flat)
    left, right = _marks(before, rows, columns, by_rows), _marks(after, rows, columns, by_rows)
    pairs = list(_shared_rows(left, right)) if by_rows else []
    moved = sum(end - first for a, b, (first, end) in pairs if a.ranks[0] != b.ranks[0])
    return Ownership(
        shape=one.shape,
        example=names[0],
        others=tuple(names[1:]),
        before=left,
        after=right,
        empty_before=tuple(rank for rank, parts in before.items() if not parts),
        empty_after=tuple(rank for rank, parts in after.items() if not parts),
        copies_before=source.dp_replicate,
        copies_after=destination.dp_replicate,
        ribbons=tuple(Ribbon(a.ranks[0], b.ranks[0], _edges(a, part), _edges(b, part)) for a, b, part in pairs),
        moved_share=moved / rows if rows else 0.0,
        reported=one.cuts is not None and two.cuts is not None,
    )


def _marks(owned: Mapping[int, Sequence[Slice]], rows: int, columns: int, by_rows: bool) -> tuple[Mark, ...]:
    """Returns the drawn slices. Cut by rows, they are kept apart by a gap, so that what moves is seen to move."""
    owners: dict[tuple[Interval, Interval], list[int]] = {}
    for parts in owned.values():
        for part in parts:
            owners.setdefault((part.rows, part.columns), []).append(part.rank)
    placed = sorted(owners.items())
    gap = min(4.0, 16.0 / max(len(placed) - 1, 1)) if by_rows else 0.0
    scale = (100.0 - gap * (len(placed) - 1)) / rows
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
        for number, ((own, across), ranks) in enumerate(placed)
    )


def _shared_rows(before: Sequence[Mark], after: Sequence[Mark]) -> Iterator[tuple[Mark, Mark, Interval]]:
    """Yields (owner before, owner after, rows). Both are in order, and no two marks of one side share a row."""
    position = 0
    for one in before:
        while position < len(after) and after[position].rows[1] <= one.rows[0]:
            position += 1
        for two in after[position:]:
            if two.rows[0] >= one.rows[1]:
                break
            yield one, two, (max(one.rows[0], two.rows[0]), min(one.rows[1], two.rows[1]))


def _edges(mark: Mark, rows: Interval) -> tuple[float, float]:
    """Returns where `rows` lie in the picture of the slice that owns them."""
    scale = mark.height / (mark.rows[1] - mark.rows[0])
    return (
        round(mark.top + (rows[0] - mark.rows[0]) * scale, 3),
        round(mark.top + (rows[1] - mark.rows[0]) * scale, 3),
    )

"""The steps of a name map: what each does to shapes, and which elements it moves where.

A step takes tensors that belong together (one, or the parts of one) and returns their successors. It is written once,
forwards; its inverse is another step of the same kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from samerun.core.links import Link, Shape, whole


class Step(ABC):
    """One step on tensors that belong together: their shapes in, shapes and links out."""

    @abstractmethod
    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        """Returns the shapes after the step, and the links from before to after.

        Raises:
            ValueError: if the step cannot be taken with tensors of these shapes.
        """

    @abstractmethod
    def inverse(self) -> Step:
        """Returns the step that undoes this one.

        Raises:
            ValueError: if the step does not say enough to be undone.
        """


def _boxes(shape: Shape, axis: int, start: int, size: int) -> tuple[Shape, Shape]:
    offsets = tuple(start if i == axis else 0 for i in range(len(shape)))
    sizes = tuple(size if i == axis else n for i, n in enumerate(shape))
    return offsets, sizes


def _same_axes(ndim: int) -> tuple[tuple[int, int], ...]:
    return tuple((axis, axis) for axis in range(ndim))


def _require_one(shapes: list[Shape], step: str) -> Shape:
    if len(shapes) != 1:
        raise ValueError(f"{step} takes one tensor, not {len(shapes)}")
    return shapes[0]


def _require_axis(shape: Shape, axis: int, step: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{step} along axis {axis} of a tensor of shape {shape}")
    return axis % len(shape)


@dataclass(frozen=True, slots=True)
class Split(Step):
    """Cuts one tensor into parts along an axis: parts of `sizes`, or `parts` equal ones."""

    axis: int = 0
    parts: int | None = None
    sizes: tuple[int, ...] | None = None

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        shape = _require_one(shapes, "split")
        axis = _require_axis(shape, self.axis, "split")
        sizes = self._sizes(shape[axis])
        found: list[Shape] = []
        links: list[Link] = []
        start = 0
        for number, size in enumerate(sizes):
            offsets, box = _boxes(shape, axis, start, size)
            found.append(box)
            links.append(Link(0, number, offsets, (0,) * len(shape), _same_axes(len(shape)), box))
            start += size
        return found, links

    def _sizes(self, length: int) -> tuple[int, ...]:
        if self.sizes is not None:
            if sum(self.sizes) != length:
                raise ValueError(f"split into {self.sizes}, which is {sum(self.sizes)}, of {length}")
            return self.sizes
        parts = self.parts or 0
        if parts < 1 or length % parts:
            raise ValueError(f"split of {length} into {parts} equal parts")
        return (length // parts,) * parts

    def inverse(self) -> Step:
        return Concat(self.axis, self.parts, self.sizes)


@dataclass(frozen=True, slots=True)
class Concat(Step):
    """Joins parts along an axis. `parts` or `sizes` are needed to undo it."""

    axis: int = 0
    parts: int | None = None
    sizes: tuple[int, ...] | None = None

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        first = shapes[0]
        axis = _require_axis(first, self.axis, "concat")
        if any(_without(shape, axis) != _without(first, axis) for shape in shapes):
            raise ValueError(f"concat along axis {axis} of tensors of shapes {', '.join(map(str, shapes))}")
        lengths = tuple(shape[axis] for shape in shapes)
        wanted = self.sizes or (None if self.parts is None else (sum(lengths) // self.parts,) * self.parts)
        if wanted is not None and wanted != lengths:
            raise ValueError(f"concat of parts of {wanted} along axis {axis}, and they are {lengths}")
        links: list[Link] = []
        start = 0
        for number, shape in enumerate(shapes):
            offsets, box = _boxes(shape, axis, start, shape[axis])
            links.append(Link(number, 0, (0,) * len(shape), offsets, _same_axes(len(shape)), box))
            start += shape[axis]
        return [tuple(start if i == axis else n for i, n in enumerate(first))], links

    def inverse(self) -> Step:
        if self.parts is None and self.sizes is None:
            raise ValueError("concat without parts or sizes cannot be undone")
        return Split(self.axis, self.parts, self.sizes)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Transpose(Step):
    """Reorders axes: axis `i` of the result is axis `order[i]` of what is given. Vectors are left as they are."""

    order: tuple[int, ...] = (1, 0)

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        found: list[Shape] = []
        links: list[Link] = []
        for number, shape in enumerate(shapes):
            order = self.order if len(shape) > 1 else tuple(range(len(shape)))
            if sorted(order) != list(range(len(shape))):
                raise ValueError(f"transpose to order {self.order} of a tensor of shape {shape}")
            origin = (0,) * len(shape)
            links.append(
                Link(
                    number,
                    number,
                    origin,
                    origin,
                    tuple((old, new) for new, old in enumerate(order)),
                    tuple(shape[old] for old in order),
                )
            )
            found.append(tuple(shape[old] for old in order))
        return found, links

    def inverse(self) -> Step:
        return Transpose(tuple(self.order.index(axis) for axis in range(len(self.order))))


@dataclass(frozen=True, slots=True)
class SplitQKV(Step):
    """Takes a fused attention projection apart into query, key and value, along its first axis.

    The fused tensor holds, for each of `groups` key-value groups, the rows of its `heads / groups` query heads, of its
    key head and of its value head, which is how Megatron-LM lays out `linear_qkv`. `heads` are query heads.
    """

    heads: int
    groups: int

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        shape = _require_one(shapes, "split-qkv")
        width = _head_width(shape, self.heads, self.groups)
        queries = self.heads // self.groups
        tails = shape[1:]
        parts = [(self.heads * width, *tails), (self.groups * width, *tails), (self.groups * width, *tails)]
        links: list[Link] = []
        start = 0
        for group in range(self.groups):
            for part, rows in enumerate((queries * width, width, width)):
                source, box = _boxes(shape, 0, start, rows)
                target, _ = _boxes(shape, 0, group * rows, rows)
                links.append(Link(0, part, source, target, _same_axes(len(shape)), box))
                start += rows
        return parts, links

    def inverse(self) -> Step:
        return FuseQKV(self.heads, self.groups)


@dataclass(frozen=True, slots=True)
class FuseQKV(Step):
    """Puts query, key and value together as `SplitQKV` takes them apart."""

    heads: int
    groups: int

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        if len(shapes) != 3:
            raise ValueError(f"fuse-qkv takes query, key and value, not {len(shapes)} tensors")
        fused = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        parts, links = SplitQKV(self.heads, self.groups).apply([fused])
        if parts != shapes:
            raise ValueError(
                f"fuse-qkv of {self.heads} heads in {self.groups} groups: {parts} expected, {shapes} given"
            )
        return [fused], [link.reversed() for link in links]

    def inverse(self) -> Step:
        return SplitQKV(self.heads, self.groups)


def _head_width(shape: Shape, heads: int, groups: int) -> int:
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(f"{heads} heads in {groups} groups")
    width, rest = divmod(shape[0] if shape else 0, heads + 2 * groups)
    if rest or not width:
        raise ValueError(f"split-qkv of {heads} heads in {groups} groups of a tensor of shape {shape}")
    return width


@dataclass(frozen=True, slots=True)
class RotaryHalves(Step):
    """Reorders the rows of query or key heads whose rotary positions turn pairs of rows, so that they turn halves.

    Within each head, rows 0, 2, 4, ... come first and then 1, 3, 5, ...: from Meta's and torchtitan's layout to that of
    Hugging Face and Megatron-LM. `heads` has a number per tensor; one with 0 is left as it is.
    """

    heads: tuple[int, ...]

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        if len(shapes) != len(self.heads):
            raise ValueError(f"rotary rows of {len(self.heads)} tensors, not {len(shapes)}")
        links: list[Link] = []
        for number, (shape, heads) in enumerate(zip(shapes, self.heads, strict=True)):
            half, rest = divmod(shape[0] if shape else 0, 2 * heads) if heads else (0, 0)
            if rest or (heads and not half):
                raise ValueError(f"rotary rows of {heads} heads in a tensor of shape {shape}")
            links += _halved(number, shape, half) if heads else [whole(shape, number, number)]
        return shapes, links

    def inverse(self) -> Step:
        return RotaryPairs(self.heads)


def _halved(number: int, shape: Shape, half: int) -> Iterator[Link]:
    """Yields two links per head: its even rows, which become the first half, and its odd ones."""
    steps = ((2, 1), *((1, 1),) * (len(shape) - 1)) if half > 1 else ()
    for row in range(0, shape[0], half):
        head, odd = row - row % (2 * half), row // half % 2
        source, box = _boxes(shape, 0, head + odd, half)
        target, _ = _boxes(shape, 0, row, half)
        yield Link(number, number, source, target, _same_axes(len(shape)), box, steps)


@dataclass(frozen=True, slots=True)
class RotaryPairs(Step):
    """Undoes `RotaryHalves`: the rows that turn together lie together."""

    heads: tuple[int, ...]

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        found, links = RotaryHalves(self.heads).apply(shapes)
        return found, [link.reversed() for link in links]

    def inverse(self) -> Step:
        return RotaryHalves(self.heads)


@dataclass(frozen=True, slots=True)
class Resize(Step):
    """Lengthens an axis from `before` to `after` with zeros at its end, or shortens it by dropping the end.

    A vocabulary is padded so that its rows divide; the rows beyond the real ones mean nothing.
    """

    axis: int
    before: int
    after: int

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        shape = _require_one(shapes, "resize")
        axis = _require_axis(shape, self.axis, "resize")
        if shape[axis] != self.before:
            raise ValueError(f"resize of axis {axis} from {self.before}, and it is {shape[axis]} long")
        origin = (0,) * len(shape)
        _, box = _boxes(shape, axis, 0, min(self.before, self.after))
        grown = tuple(self.after if i == axis else n for i, n in enumerate(shape))
        return [grown], [Link(0, 0, origin, origin, _same_axes(len(shape)), box)]

    def inverse(self) -> Step:
        return Resize(self.axis, self.after, self.before)


@dataclass(frozen=True, slots=True)
class Unstack(Step):
    """Takes the first axis of a tensor apart: one tensor per index, named by the variable `over`, from `start` on."""

    over: str
    start: int = 0

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        shape = _require_one(shapes, "unstack")
        if not shape:
            raise ValueError("unstack of a tensor without axes")
        inner = shape[1:]
        axes = tuple((axis + 1, axis) for axis in range(len(inner)))
        links = [
            Link(0, number, (number, *(0,) * len(inner)), (0,) * len(inner), axes, inner) for number in range(shape[0])
        ]
        return [inner] * shape[0], links

    def inverse(self) -> Step:
        return Stack(self.over, self.start)


@dataclass(frozen=True, slots=True)
class Stack(Step):
    """Puts the tensors that differ in the variable `over` together along a new first axis, in its order."""

    over: str
    start: int = 0

    def apply(self, shapes: list[Shape]) -> tuple[list[Shape], list[Link]]:
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"stack of tensors of shapes {', '.join(map(str, dict.fromkeys(shapes)))}")
        stacked = (len(shapes), *shapes[0])
        _, links = Unstack(self.over, self.start).apply([stacked])
        return [stacked], [link.reversed() for link in links]

    def inverse(self) -> Step:
        return Unstack(self.over, self.start)

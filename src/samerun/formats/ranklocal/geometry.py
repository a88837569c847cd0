"""Where bare shards belong, as far as shapes and contents tell: what is a replica, and where the rest was cut.

Nothing in such files records it. Equal bytes on all ranks mean replicas. Shapes that differ in one dimension mean that
it was cut there, in rank order, the way `torch.chunk` cuts (as FSDP2 does): equal chunks, a shorter one, empty ones.
Equal shapes with different bytes leave every dimension open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from samerun.errors import FormatError, Problem, Severity
from samerun.formats.statedict.ranks import Plain, replicate, same_content
from samerun.formats.statedict.recognise import is_buffer_name
from samerun.formats.statedict.stored import Stored, store_boxes
from samerun.stores.local import MappedFiles

_SHOWN = 4
_CONSTANT_ELEMENTS = 4_096
Kind = Literal["same", "constant", "uneven", "differ"]


@dataclass(slots=True, eq=False)
class Inferred:
    """The tensors put together, and what was assumed for it. `num_shards` is 1 if all ranks are replicas."""

    tensors: dict[tuple[str, ...], Stored]
    num_shards: int
    problems: list[Problem] = field(default_factory=list[Problem])


def infer_geometry(plains: Sequence[Plain], ranks: Sequence[int], files: MappedFiles) -> Inferred:
    """Decides for each tensor whether ranks hold replicas or shards of it, and places the shards."""
    kinds: dict[tuple[str, ...], Kind] = {plain.path: _kind(plain, files) for plain in plains}
    telling = [kinds[plain.path] for plain in plains if _tells(plain) and kinds[plain.path] != "constant"]
    sharded = "uneven" in telling or telling.count("differ") > telling.count("same")
    if not sharded:
        return _replicas(plains, kinds)
    shards = _num_shards(plains, kinds, ranks, files)
    return _shards(plains, kinds, shards)


def _kind(plain: Plain, files: MappedFiles) -> Kind:
    parts = list(plain.parts.values())
    if any(part.shape != parts[0].shape for part in parts):
        return "uneven"
    if not all(same_content(parts[0], part, files) for part in parts[1:]):
        return "differ"
    return "constant" if parts[0].shape and _is_constant(parts[0], files) else "same"


def _is_constant(tensor: Stored, files: MappedFiles) -> bool:
    """Whether the first values of a tensor are all alike, so that equal bytes on all ranks prove nothing."""
    if tensor.num_elements < 2:
        return True
    try:
        values = tensor.view(0, files).reshape(-1)[:_CONSTANT_ELEMENTS]
    except FormatError:
        return True
    return bool((values == values[0]).all())


def _tells(plain: Plain) -> bool:
    """Whether a tensor is one that sharding would cut: at least one dimension, floating, not named like a buffer."""
    first = next(iter(plain.parts.values()))
    return bool(first.shape) and first.dtype.kind == "float" and not is_buffer_name(plain.path[-1])


def _replicas(plains: Sequence[Plain], kinds: Mapping[tuple[str, ...], Kind]) -> Inferred:
    made = Inferred({plain.path: replicate(plain.parts) for plain in plains}, 1)
    unequal = [plain for plain in plains if kinds[plain.path] in ("differ", "uneven")]
    steps = [plain for plain in unequal if plain.path[-1] == "step"]
    trained = [plain for plain in unequal if _tells(plain)]
    others = [plain for plain in unequal if plain not in trained and plain not in steps]
    if trained:
        made.problems.append(_unequal(trained, Severity.ERROR))
    if steps:
        made.problems.append(_steps(steps))
    if others:
        made.problems.append(_unequal(others, Severity.WARNING))
    return made


def _num_shards(
    plains: Sequence[Plain], kinds: Mapping[tuple[str, ...], Kind], ranks: Sequence[int], files: MappedFiles
) -> int:
    """Returns after how many ranks the shards repeat: fewer than all if a group of replicas was sharded (HSDP)."""
    world = len(ranks)
    cut = [plain for plain in plains if _tells(plain) and kinds[plain.path] in ("uneven", "differ")]
    cut = [plain for plain in cut if len(plain.parts) == world]
    for size in range(1, world):
        if world % size or not cut:
            continue
        repeats = all(
            same_content(plain.parts[rank], plain.parts[ranks[(number + size) % world]], files)
            for plain in cut
            for number, rank in enumerate(ranks)
        )
        if repeats:
            return size
    return world


def _shards(plains: Sequence[Plain], kinds: Mapping[tuple[str, ...], Kind], num_shards: int) -> Inferred:
    made = Inferred({}, num_shards)
    placed: list[Plain] = []
    ambiguous: list[tuple[Plain, str]] = []
    misfits: list[tuple[str, list[tuple[int, ...]]]] = []
    steps: list[Plain] = []
    for plain in plains:
        name, kind = ".".join(plain.path), kinds[plain.path]
        first = next(iter(plain.parts.values()))
        if not first.shape or kind == "same" or (kind == "constant" and not _tells(plain)):
            made.tensors[plain.path] = replicate(plain.parts)
            if kind == "differ" and plain.path[-1] == "step":
                steps.append(plain)
            continue
        dims = _cut_dims(list(plain.parts.values()), num_shards)
        if not dims or not _in_chunks([part.shape[dims[0]] for part in plain.parts.values()][:num_shards]):
            misfits.append((name, [part.shape for part in plain.parts.values()]))
        made.tensors[plain.path] = _concatenate(plain.parts, dims[0] if dims else 0, num_shards)
        placed.append(plain)
        if len(dims) > 1 or kind == "constant":
            ambiguous.append((plain, "replica or shard" if kind == "constant" else f"dim {_either(dims)}"))
    if steps:
        made.problems.append(_steps(steps))
    if placed:
        made.problems.append(_inferred(placed, len(ambiguous)))
    if ambiguous:
        made.problems.append(_ambiguous(ambiguous, len(placed) - len(ambiguous)))
    if misfits:
        made.problems.append(_misfit(misfits))
    return made


def _cut_dims(parts: Sequence[Stored], num_shards: int) -> list[int]:
    """Returns the dimensions along which the parts may have been cut, the likeliest first."""
    shapes = [part.shape for part in parts[:num_shards]]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return []
    differing = [dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
    if len(differing) > 1:
        return []
    return differing or list(range(len(shapes[0])))


def _in_chunks(sizes: Sequence[int]) -> bool:
    """Whether sizes are those of `torch.chunk`: all alike, then at most one smaller, then zeros.

    >>> _in_chunks([34, 34, 33]), _in_chunks([2, 1, 0, 0]), _in_chunks([33, 34, 34])
    (True, True, False)
    """
    full = sizes[0]
    rest = [size for size in sizes if size != full]
    tail = list(sizes[len(sizes) - len(rest) :]) == rest
    return tail and all(size < full for size in rest) and not any(rest[1:])


def _concatenate(parts: Mapping[int, Stored], dim: int, num_shards: int) -> Stored:
    held = list(parts.values())
    first = held[0]
    starts = [0]
    for part in held[:num_shards]:
        starts.append(starts[-1] + (part.shape[dim] if len(part.shape) == len(first.shape) else 0))
    shape = (*first.shape[:dim], starts[min(num_shards, len(held))], *first.shape[dim + 1 :])
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = []
    for number, part in enumerate(held):
        if len(part.shape) != len(shape) or not part.extents:
            continue
        offsets = tuple(starts[number % num_shards] if i == dim else 0 for i in range(len(shape)))
        boxes.append((offsets, part.shape, part.extents[0]))
    return store_boxes(shape, first.dtype, boxes)


def _either(dims: Sequence[int]) -> str:
    return " or ".join(map(str, dims))


def _some(names: Sequence[str], shown: int = _SHOWN) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _unequal(plains: Sequence[Plain], severity: Severity) -> Problem:
    names = [".".join(plain.path) for plain in plains]
    return Problem(
        "SR-RANK-REPLICA",
        f"{len(names)} tensors differ between ranks that otherwise hold replicas: {_some(names)}",
        severity=severity,
        where={"tensor": names[0], "rank": next(iter(plains[0].parts))},
        hint="which rank is right cannot be told"
        if severity is Severity.ERROR
        else "right for statistics that each rank keeps for itself; every reader takes one rank's",
    )


def _steps(plains: Sequence[Plain]) -> Problem:
    names = [".".join(plain.path) for plain in plains]
    return Problem(
        "SR-RANK-STEP",
        f"ranks count differently: {len(names)} step counters of the optimizer differ between files: {_some(names)}",
        where={"tensor": names[0], "rank": next(iter(plains[0].parts))},
        hint="files of different updates are mixed; gather those of one save",
    )


def _inferred(placed: Sequence[Plain], num_ambiguous: int) -> Problem:
    return Problem(
        "SR-RANK-INFERRED",
        f"{len(placed)} tensors are bare shards without geometry; they were put together in rank order, "
        f"{len(placed) - num_ambiguous} of them along the only dimension that fits",
        severity=Severity.NOTE,
        where={"tensor": ".".join(placed[0].path)},
        hint="save through torch.distributed.checkpoint, or save DTensors: they carry their place with them",
    )


def _ambiguous(ambiguous: Sequence[tuple[Plain, str]], num_certain: int) -> Problem:
    """Names the model's tensors; optimizer slots go with them and are only counted."""
    own = [(".".join(plain.path), why) for plain, why in ambiguous if "state" not in plain.path] or [
        (".".join(plain.path), why) for plain, why in ambiguous
    ]
    slots = f" (and {len(ambiguous) - len(own)} optimizer slots)" if len(ambiguous) > len(own) else ""
    support = f", as the {num_certain} others were" if num_certain else ""
    return Problem(
        "SR-RANK-GEOMETRY",
        f"{len(own)} tensors{slots} could have been cut in more than one way and are read as cut along dim 0{support}: "
        f"{_some([f'{name} ({why})' for name, why in own], 16)}",
        severity=Severity.WARNING,
        where={"tensor": own[0][0]},
        hint="right for FSDP; with tensor parallelism some were cut along dim 1. Compare shapes with the model's",
    )


def _misfit(misfits: Sequence[tuple[str, list[tuple[int, ...]]]]) -> Problem:
    name, shapes = misfits[0]
    return Problem(
        "SR-RANK-CHUNKS",
        f"{len(misfits)} tensors have shard sizes that no one save leaves in this order: {name} has "
        f"{_some([str(list(shape)) for shape in shapes], 8)}",
        where={"tensor": name},
        hint="files of ranks are swapped, or some are from a save with another number of ranks; shards of equal shape "
        "are then in the wrong place too, which no shape shows",
    )

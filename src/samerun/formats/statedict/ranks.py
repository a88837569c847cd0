"""One saved value per rank, merged into one: distributed tensors placed, the rest equal on all ranks or kept apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samerun.errors import FormatError, Problem, Severity
from samerun.formats.statedict.geometry import GeometryError, Meshes, Part, is_distributed, read_part
from samerun.formats.statedict.recognise import is_loader, looks_random
from samerun.formats.statedict.stored import Stored, store_boxes, store_nothing
from samerun.formats.statedict.tree import Tree, contains_tensor, to_plain
from samerun.stores.local import MappedFiles

_SHOWN = 4
_COUNTERS = frozenset({"step", "global_step", "iteration", "update", "last_epoch", "_step_count", "epoch"})
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """Ordinary tensors of one name, by rank: replicas, or shards that do not say so."""

    path: tuple[str, ...]
    parts: Mapping[int, Stored]


@dataclass(slots=True, eq=False)
class Merged:
    """The merged value. `plain` are the tensors in it that still are `Plain`; `parts` what distributed ones said."""

    tree: Tree
    problems: list[Problem] = field(default_factory=list[Problem])
    plain: list[Plain] = field(default_factory=list[Plain])
    recorded_ranks: dict[int, int] = field(default_factory=dict[int, int])
    num_ranks: int = 0
    placements: dict[str, int] = field(default_factory=dict[str, int])
    mesh: tuple[tuple[str, int], ...] = ()


def merge_ranks(trees: Mapping[int, Tree], files: MappedFiles) -> Merged:
    """Merges the values that ranks saved. Keys are ranks in ascending order.

    Random number generators and data loaders stay apart, as `rank0`, `rank1`, ... Everything else that differs between
    ranks stays apart too, and is a finding if it counts updates.
    """
    merger = _Merger(files)
    merged = Merged(merger.merge((), trees))
    merged.problems = merger.findings()
    merged.plain, merged.recorded_ranks, merged.num_ranks = merger.plain, merger.recorded, merger.num_ranks
    merged.placements, merged.mesh = merger.placements, merger.mesh
    return merged


class _Merger:
    def __init__(self, files: MappedFiles) -> None:
        self.files = files
        self.plain: list[Plain] = []
        self.recorded: dict[int, int] = {}
        self.num_ranks = 0
        self.placements: dict[str, int] = {}
        self.mesh: tuple[tuple[str, int], ...] = ()
        self.counters: list[tuple[str, dict[int, Any]]] = []
        self.differing: list[str] = []
        self.unplaced: dict[str, list[str]] = {}
        self.conflicts: list[Problem] = []
        self.meshes: dict[int, Meshes] = {}

    def merge(self, path: tuple[str, ...], values: Mapping[int, Any], *, in_model: bool = False) -> Any:
        first = next(iter(values.values()))
        if path and not in_model and _stays_apart(path[-1], first):
            return {f"rank{rank}": value for rank, value in values.items()}
        if all(isinstance(value, dict) for value in values.values()):
            return self.merge_mappings(path, values)
        if all(is_distributed(value) for value in values.values()):
            return self.place(path, values)
        if all(isinstance(value, Stored) for value in values.values()):
            if len(values) == 1:
                return first
            self.plain.append(Plain(path, dict(values)))
            return self.plain[-1]
        lists = all(isinstance(value, list) and len(value) == len(first) for value in values.values())
        if isinstance(first, list) and lists and any(contains_tensor(value) for value in values.values()):
            return [
                self.merge((*path, str(i)), {rank: value[i] for rank, value in values.items()})
                for i in range(len(first))
            ]
        return self.compare(path, values)

    def merge_mappings(self, path: tuple[str, ...], values: Mapping[int, Mapping[Any, Any]]) -> dict[Any, Any]:
        keys = list(dict.fromkeys(key for value in values.values() for key in value))
        in_model = any(map(_is_model, values.values()))
        merged: dict[Any, Any] = {}
        for key in keys:
            held = {rank: value[key] for rank, value in values.items() if key in value}
            merged[key] = self.merge((*path, str(key)), held, in_model=in_model)
        return merged

    def compare(self, path: tuple[str, ...], values: Mapping[int, Any]) -> Any:
        """Returns the one value that all ranks have, or all of them by rank."""
        plain = {rank: to_plain(value, self.files) for rank, value in values.items()}
        first = next(iter(plain.values()))
        if all(_same(first, value) for value in plain.values()):
            return next(iter(values.values()))
        if path and path[-1] in _COUNTERS:
            self.counters.append((".".join(path), plain))
        elif path and "rank" not in path[-1].lower():
            self.differing.append(".".join(path))
        return {f"rank{rank}": value for rank, value in values.items()}

    def place(self, path: tuple[str, ...], values: Mapping[int, Any]) -> Any:
        """Puts the parts of a distributed tensor together."""
        name = ".".join(path)
        parts: list[Part] = []
        for rank, value in values.items():
            try:
                part = read_part(value, rank, self.files, self.meshes.setdefault(rank, {}))
            except GeometryError as error:
                self.unplaced.setdefault(str(error), []).append(f"{name} of rank {rank}")
                continue
            self.note(rank, part)
            if parts and (parts[0].shape, parts[0].dtype) != (part.shape, part.dtype):
                self.conflicts.append(_conflict(name, rank, parts[0], part))
                continue
            parts.append(part)
        if not parts:
            return next(iter(values.values()))
        boxes = [box for part in parts for box in part.boxes]
        return (
            store_boxes(parts[0].shape, parts[0].dtype, boxes)
            if boxes
            else store_nothing(parts[0].shape, parts[0].dtype)
        )

    def note(self, rank: int, part: Part) -> None:
        self.num_ranks = max(self.num_ranks, part.num_ranks)
        self.placements[part.placements] = self.placements.get(part.placements, 0) + 1
        self.mesh = max(self.mesh, part.mesh, key=len)
        if part.rank is not None:
            self.recorded.setdefault(rank, part.rank)

    def findings(self) -> list[Problem]:
        problems = [*self.conflicts]
        for reason, names in self.unplaced.items():
            problems.append(_unplaced(reason, names))
        problems += [_counters_differ(name, values) for name, values in self.counters[:1]]
        if self.differing:
            problems.append(_objects_differ(self.differing))
        return problems


def _stays_apart(name: str, value: Any) -> bool:
    """Whether a value is the generators' or a data loader's state, which every rank has of its own."""
    if isinstance(value, dict) and _is_model(value):
        return False
    return looks_random(name) or (isinstance(value, dict) and is_loader(name, value))


def _is_model(value: Mapping[Any, Any]) -> bool:
    tensors = sum(isinstance(item, Stored) or is_distributed(item) for item in value.values())
    return tensors > 0 and tensors * 2 >= len(value) and not any(looks_random(str(key)) for key in value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or a != a)


def same_content(a: Stored, b: Stored, files: MappedFiles) -> bool:
    """Whether two whole tensors hold the same bytes: by recorded checksum where both have one, else by reading."""
    if (a.shape, a.dtype) != (b.shape, b.dtype) or not (a.whole and b.whole):
        return False
    if a.num_elements == 0:
        return True
    x, y = a.extents[0], b.extents[0]
    if x.crc32 is not None and y.crc32 is not None and x.storage_bytes == y.storage_bytes:
        within = (x.offset_bytes - x.storage_offset_bytes, x.strides) == (
            y.offset_bytes - y.storage_offset_bytes,
            y.strides,
        )
        if within and x.crc32 == y.crc32:
            return True
        if x.num_bytes == x.storage_bytes and within:
            return False
    try:
        left, right = a.view(0, files), b.view(0, files)
    except FormatError:
        return False
    rows = max(1, _CHUNK_BYTES // max(1, a.num_bytes // max(1, a.shape[0]))) if a.shape else 1
    pairs = (
        [(left, right)]
        if not a.shape
        else [(left[i : i + rows], right[i : i + rows]) for i in range(0, a.shape[0], rows)]
    )
    return all(p.tobytes() == q.tobytes() for p, q in pairs)


def replicate(parts: Mapping[int, Stored]) -> Stored:
    """Returns the tensor of which every rank holds the whole: one box per rank, all alike."""
    first = next(iter(parts.values()))
    origin = (0,) * len(first.shape)
    boxes = [(origin, part.shape, part.extents[0]) for part in parts.values() if part.extents]
    return store_boxes(first.shape, first.dtype, boxes)


def substitute(tree: Tree, made: Callable[[Plain], Any]) -> Tree:
    """Returns the tree with every `Plain` replaced by what `made` returns for it."""
    if isinstance(tree, Plain):
        return made(tree)
    if isinstance(tree, dict):
        return {key: substitute(item, made) for key, item in tree.items()}
    if isinstance(tree, list):
        return [substitute(item, made) for item in tree]
    return tree


def check_ranks(
    present: Sequence[int], num_ranks: int, recorded: Mapping[int, int], file_of: Callable[[int], str]
) -> list[Problem]:
    """Checks that every rank's file is there and that each is the rank's that its name says.

    `num_ranks` is how many the files say there were, 0 where they do not say.
    """
    problems: list[Problem] = []
    expected = max(num_ranks, max(present, default=-1) + 1)
    missing = sorted(set(range(expected)) - set(present))
    extra = [rank for rank in present if num_ranks and rank >= num_ranks]
    if extra:
        problems.append(_stale(extra, num_ranks, file_of))
        missing = [rank for rank in missing if rank < num_ranks]
    if missing:
        problems.append(
            Problem(
                "SR-FILE-MISSING",
                f"the files of {len(missing)} of {num_ranks or expected} ranks are not here: rank {_some(missing)}",
                where={"rank": missing[0]},
                hint="gather every rank's file into one directory; nothing else holds their shards",
            )
        )
    swapped = {rank: own for rank, own in recorded.items() if own != rank}
    if swapped:
        rank, own = next(iter(swapped.items()))
        problems.append(
            Problem(
                "SR-RANK-SWAPPED",
                f"{len(swapped)} files hold another rank than their names say: {file_of(rank)} is rank {own}'s",
                where={"file": file_of(rank), "rank": rank},
                expected=rank,
                found=own,
                hint="values are read by the rank recorded inside; a script that goes by names loads shards in the "
                "wrong places without an error. Rename the files",
            )
        )
    return problems


def _some(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:_SHOWN])) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _stale(extra: Sequence[int], num_ranks: int, file_of: Callable[[int], str]) -> Problem:
    return Problem(
        "SR-RANK-STALE",
        f"files of rank {_some(extra)} are here, but {num_ranks} ranks saved this checkpoint",
        where={"file": file_of(extra[0]), "rank": extra[0]},
        expected=num_ranks,
        found=extra[-1] + 1,
        hint="an earlier save with more ranks left them; move them away before anything resumes from here",
    )


def _conflict(name: str, rank: int, first: Part, other: Part) -> Problem:
    return Problem(
        "SR-RANK-SHAPE",
        "ranks disagree about the whole shape or type of a tensor",
        where={"tensor": name, "rank": rank},
        expected=f"{first.dtype.name} {list(first.shape)}",
        found=f"{other.dtype.name} {list(other.shape)}",
        hint="the files come from different saves or models; gather those of one save",
    )


def _unplaced(reason: str, names: Sequence[str]) -> Problem:
    return Problem(
        "SR-COV-PLACEMENT",
        f"{len(names)} shards cannot be placed: {reason}",
        where={"tensor": names[0]},
        hint="the values are there but where they belong is not; save with torch.distributed.checkpoint instead",
    )


def _counters_differ(name: str, values: Mapping[int, Any]) -> Problem:
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    shown = "; ".join(f"{value} on rank {_some(ranks)}" for value, ranks in by_value.items())
    return Problem(
        "SR-RANK-STEP",
        f"ranks count differently: {name} is {shown}",
        where={"key": name, "rank": next(iter(values))},
        hint="files of different updates are mixed; gather those of one save",
    )


def _objects_differ(names: Sequence[str]) -> Problem:
    return Problem(
        "SR-RANK-OBJECT",
        f"{len(names)} values differ between ranks and are kept apart: {_some(names)}",
        severity=Severity.NOTE,
        where={"key": names[0]},
        hint="decide which ranks of the new layout get which",
    )

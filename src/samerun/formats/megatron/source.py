"""An opened torch_dist directory: its index and items, the state common to all ranks, and what the run says of itself.

Up to megatron.core 0.18 the common state is the file `common.pt`; from 0.19 it is the stored object
`common_state/shard_0_1`. `metadata.json` names the backend. Objects are stored in shards,
`<key>/shard_<offset>_<shape>`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.errors import CorruptCheckpoint, FormatError, Problem, Severity
from samerun.formats.base import Array, view_extent
from samerun.formats.dcpfile.index import Index, StoredObject
from samerun.formats.dcpfile.items import Items
from samerun.formats.dcpfile.opened import open_items, read_metadata
from samerun.formats.mcore.run import Run, parse_run
from samerun.formats.torchfile import Archive, TensorRef
from samerun.formats.torchfile.container import read_torch_file
from samerun.stores.local import MappedFiles

_SHARD = re.compile(r"(?P<key>.+)/shard_(?P<at>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)")
_COMMON = "common_state/shard_0_1"
_MOST_JSON_BYTES = 1 << 20
_RESTORE = "restore the file from the source"


@dataclass(frozen=True, slots=True)
class ObjectShard:
    """One shard of a stored object: its key, where it lies in the grid of shards, and the grid."""

    key: str
    at: tuple[int, ...]
    grid: tuple[int, ...]
    item: StoredObject


@dataclass(slots=True, eq=False)
class Source:
    """Everything that opening a directory finds, and the findings of doing so."""

    root: Path
    index: Index
    items: Items
    metadata: tuple[Path, ...]
    files: MappedFiles
    run: Run
    common: dict[Any, Any]
    backend: dict[str, Any]
    shards: dict[str, list[ObjectShard]]
    problems: list[Problem]
    unknown: set[str] = field(default_factory=set[str])
    _values: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def content(self) -> dict[str, Any]:
        """What the checkpoint says about its own encodings (`content_metadata`), nothing before 0.12."""
        found = self.common.get("content_metadata")
        return found if isinstance(found, dict) else {}

    @property
    def has_common_file(self) -> bool:
        """Whether the common state is a file of its own (up to 0.18)."""
        return (self.root / "common.pt").exists()

    def value(self, shard: ObjectShard) -> Any:
        """Returns the plain value of a stored object; None, and a finding, if it cannot be read."""
        name = shard.item.name
        if name not in self._values:
            self._values[name] = self._read(shard)
        return self._values[name]

    def _read(self, shard: ObjectShard) -> Any:
        try:
            row = shard.item.rows[0] if shard.item.rows else -1
            if row < 0 or not self.items.readable(row):
                return None  # reported with its file, or as an item without a place
            decoded = self.items.value(row, shard.item.name)
        except FormatError as error:
            self.problems.extend(error.problems)
            return None
        self.unknown.update(decoded.unknown)
        return unwrap(decoded.value)

    def find(self, key: str) -> list[ObjectShard]:
        """Returns the shards of a stored object, in order of place."""
        return sorted(self.shards.get(key, []), key=lambda shard: shard.at)


def unwrap(value: Any) -> Any:
    """Takes a stored object out of the list of one element that torch_dist wraps it in."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def read_source(root: Path, files: MappedFiles) -> Source:
    """Opens a directory. Reads metadata and the common state; no tensor.

    Raises:
        CorruptCheckpoint: if `.metadata` is missing or cannot be used at all.
    """
    if not (root / ".metadata").exists():
        raise CorruptCheckpoint(_no_metadata(root))
    index, metadata = read_metadata(root, files)
    items, problems = open_items(root, index, metadata, files)
    shards, singles = _shards(index)
    source = Source(root, index, items, metadata, files, Run(), {}, {}, shards, problems)
    for item in singles:
        source.shards.setdefault(item.name, []).append(ObjectShard(item.name, (0,), (1,), item))
    source.backend = _read_backend(root, problems)
    source.common = _read_common(source)
    args = source.common.get("args") or _single(source, "args")
    source.run = parse_run(args, _degrees(shards))
    return source


def _single(source: Source, key: str) -> Any:
    found = source.find(key)
    return source.value(found[0]) if found else None


def _shards(index: Index) -> tuple[dict[str, list[ObjectShard]], list[StoredObject]]:
    found: dict[str, list[ObjectShard]] = {}
    singles: list[StoredObject] = []
    for item in index.objects:
        match = _SHARD.fullmatch(item.name)
        if match is None:
            singles.append(item)
            continue
        at, grid = (tuple(map(int, match[name].split(".")[:8])) for name in ("at", "shape"))
        found.setdefault(match["key"], []).append(ObjectShard(match["key"], at, grid, item))
    return found, singles


def _degrees(shards: Mapping[str, list[ObjectShard]]) -> dict[str, int]:
    """Returns the pipeline and tensor-parallel degrees by which random states are divided: `(pp, tp[, dp])`."""
    states = shards.get("rng_state")
    if not states or len(states[0].grid) < 2:
        return {}
    pp, tp, *rest = states[0].grid
    found = {"pp": pp, "tp": tp, "etp": tp}
    return found | ({"world_size": pp * tp * rest[0]} if rest and 0 < math.prod(states[0].grid) < 1 << 30 else {})


def _read_backend(root: Path, problems: list[Problem]) -> dict[str, Any]:
    path = root / "metadata.json"
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_MOST_JSON_BYTES))
    except OSError:
        if (root / "common.pt").exists():
            problems.append(_json(path, "metadata.json is missing: Megatron does not recognise the directory"))
        return {}
    except (ValueError, RecursionError):
        problems.append(_json(path, "metadata.json cannot be read"))
        return {}
    if not isinstance(found, dict):
        problems.append(_json(path, "metadata.json does not hold a table"))
        return {}
    backend = found.get("sharded_backend")
    if backend != "torch_dist":
        problems.append(_other_backend(path, backend))
    return found


def _read_common(source: Source) -> dict[Any, Any]:
    path = source.root / "common.pt"
    stored = source.shards.get(_COMMON.partition("/")[0])
    if stored:
        found = source.value(stored[0])
        if isinstance(found, dict):
            return found
        source.problems.append(_common(source.root, "the object common_state cannot be read"))
        return {}
    if not path.exists():
        if source.backend:
            source.problems.append(_common(path, "common.pt is missing"))
        return {}
    try:
        opened = read_torch_file(source.files.map(path), path)
        source.unknown.update(opened.decoded.unknown)
        value = _arrays(opened.decoded.value, opened.archive, source.files)
    except FormatError as error:
        source.problems.append(_common(path, f"common.pt cannot be read: {error.problems[0].message}"))
        return {}
    except (OSError, ValueError) as error:
        source.problems.append(_common(path, f"common.pt cannot be read: {error}"))
        return {}
    if not isinstance(value, dict):
        source.problems.append(_common(path, "common.pt does not hold a state dict"))
        return {}
    return value


def _arrays(value: Any, archive: Archive, files: MappedFiles) -> Any:
    if isinstance(value, TensorRef):
        extent = archive.extent(value)
        array: Array = view_extent(files, extent)
        return array.copy() if extent.num_bytes <= extent.storage_bytes else None
    if isinstance(value, dict):
        return {key: _arrays(item, archive, files) for key, item in value.items()}
    return [_arrays(item, archive, files) for item in value] if isinstance(value, list) else value


def _no_metadata(root: Path) -> Problem:
    return Problem(
        "SR-META-MISSING",
        "the directory holds parts of a Megatron distributed checkpoint but no .metadata: the save never finished",
        where={"file": str(root)},
        hint=".metadata is written last; use the checkpoint before this one",
    )


def _json(path: Path, message: str) -> Problem:
    return Problem("SR-MEG-JSON", message, where={"file": str(path)}, hint=_RESTORE)


def _other_backend(path: Path, backend: Any) -> Problem:
    return Problem(
        "SR-MEG-BACKEND",
        f"metadata.json names the backend {backend!r}, but the files are those of torch_dist",
        where={"file": str(path)},
        severity=Severity.ERROR,
        expected="torch_dist",
        found=str(backend),
        hint="megatron.core up to 0.18 refuses this or reads it by another method, 0.19 ignores it; restore the file",
    )


def _common(path: Path, message: str) -> Problem:
    return Problem(
        "SR-MEG-COMMON",
        message,
        where={"file": str(path)},
        hint="arguments, counters, the schedule and hyperparameters are in it; Megatron cannot load without it. "
        "Restore it from the source or use another checkpoint",
    )

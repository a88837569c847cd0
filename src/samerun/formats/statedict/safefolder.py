"""The model of a directory in safetensors or torch.save files: alone, with an index, or one file per saving rank."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.errors import FormatError, Problem, Severity
from samerun.formats.statedict.chunks import check_last_shard
from samerun.formats.statedict.recognise import is_state_dict
from samerun.formats.statedict.safefile import SafeFile, read_safetensors
from samerun.formats.statedict.stored import Stored, store_boxes, store_nothing
from samerun.formats.statedict.tree import open_file
from samerun.stores.local import MappedFiles

INDEX_SUFFIX = ".index.json"
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<ending>safetensors|bin)$")
_RANK_SHARD = re.compile(r"shard-(?P<rank>\d{5})-(?P<file>.+\.safetensors)$")
_MAX_INDEX_BYTES = 1 << 28
_SHOWN = 4


@dataclass(slots=True, eq=False)
class Weights:
    """The tensors of a model by saved name. `ordered` says whether in the order of registration.

    `num_ranks` is how many ranks' shards were put together, 0 where files hold whole tensors. `metadata` is what
    safetensors files carry beside tensors.
    """

    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])
    files: list[Path] = field(default_factory=list[Path])
    problems: list[Problem] = field(default_factory=list[Problem])
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    unknown: set[str] = field(default_factory=set[str])
    ordered: bool = False
    num_ranks: int = 0

    @property
    def aliases(self) -> dict[str, str]:
        """Names that were left out because another name has the tensor, as `safetensors.torch.save_model` records."""
        return {
            alias: owner
            for alias, owner in self.metadata.items()
            if owner in self.tensors and alias not in self.tensors
        }


def find_weights(folder: Path, stem: str = "") -> list[str]:
    """Returns what in a folder could be read as a model, the most telling first: indexes, then sets, then files.

    With a `stem`, only what begins with it. Each is the name of an index or file, or of the first file of a set.
    """
    names = [name for name in sorted(os.listdir(folder)) if name.startswith(stem)]
    found = [name for name in names if name.endswith((f".safetensors{INDEX_SUFFIX}", f".bin{INDEX_SUFFIX}"))]
    indexed = {name.removesuffix(INDEX_SUFFIX).rpartition(".")[0] for name in found}
    seen: set[str] = set()
    for name in names:
        numbered, shard = _NUMBERED.match(name), _RANK_SHARD.match(name)
        family = f"shard {shard['file']}" if shard else numbered["stem"] if numbered else name
        if family in seen or (numbered and not shard and numbered["stem"] in indexed):
            continue
        if shard or numbered or name.endswith(".safetensors"):
            seen.add(family)
            found.append(name)
    return found


def open_weights(folder: Path, name: str, files: MappedFiles) -> Weights:
    """Opens the model that `find_weights` found under `name`, or any file of that kind. Tensors stay on disk.

    Files that are missing or damaged are findings, as long as something can be read.

    Raises:
        CorruptCheckpoint: if a single file, or the index, cannot be used.
    """
    weights = Weights()
    if name.endswith(INDEX_SUFFIX):
        _open_index(folder, name, files, weights)
    elif _RANK_SHARD.match(name):
        _open_rank_shards(folder, name, files, weights)
    elif _NUMBERED.match(name):
        _open_numbered(folder, name, files, weights)
    else:
        weights.tensors |= _open_one(folder / name, files, weights)
    return weights


def _open_one(file: Path, files: MappedFiles, weights: Weights) -> dict[str, Stored]:
    weights.files.append(file)
    if file.suffix == ".safetensors":
        opened = read_safetensors(file, files)
        weights.problems += opened.problems
        weights.metadata |= opened.metadata
        return opened.tensors
    bound = open_file(file, files)
    weights.problems += bound.problems
    weights.unknown.update(bound.unknown)
    weights.ordered = True
    if not is_state_dict(bound.tree):
        return {}
    return {name: item for name, item in bound.tree.items() if isinstance(item, Stored)}


def _try_one(file: Path, files: MappedFiles, weights: Weights) -> dict[str, Stored] | None:
    """Opens one of several files. One that cannot be used is a finding; returns None for it."""
    try:
        return _open_one(file, files, weights)
    except FormatError as error:
        weights.problems += error.problems
    except FileNotFoundError:
        weights.problems.append(_missing(file))
    except OSError as error:
        weights.problems.append(_missing(file, f": {error.strerror}"))
    return None


def _open_index(folder: Path, name: str, files: MappedFiles, weights: Weights) -> None:
    index = _read_index(folder / name)
    weight_map: dict[str, str] = index["weight_map"]
    parts = dict.fromkeys(weight_map.values())
    weights.files.append(folder / name)
    opened: dict[str, dict[str, Stored] | None] = {}
    for part in parts:
        if os.path.basename(part) != part or part in (".", ".."):
            weights.problems.append(_escapes(folder / name, part))
            opened[part] = None
        else:
            opened[part] = _try_one(folder / part, files, weights)
    lacking: list[tuple[str, str]] = []
    for key, part in weight_map.items():
        held = opened[part]
        if held is not None and key in held:
            weights.tensors[key] = held[key]
        elif held is not None:
            lacking.append((key, part))
    lost = [key for key, part in weight_map.items() if opened[part] is None]
    if lacking:
        weights.problems.append(_lacking(folder / name, lacking))
    weights.problems += _check_index(
        folder, name, index, weight_map, opened, weights, complete=not lost and not lacking
    )


def _read_index(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        index = json.loads(file.read_bytes())
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise ValueError("it has no weight_map")
        if odd := [key for key, part in index["weight_map"].items() if not isinstance(part, str)]:
            raise ValueError(f"what it names for {odd[0]!r} is no file: {index['weight_map'][odd[0]]!r}")
    except (OSError, ValueError, RecursionError) as error:
        from samerun.errors import CorruptCheckpoint

        raise CorruptCheckpoint(
            Problem(
                "SR-META-INDEX",
                f"the index cannot be used: {error}",
                where={"file": str(file)},
                hint="restore the index, or remove it from a copy and inspect the files themselves",
            )
        ) from None
    return index


def _check_index(
    folder: Path,
    name: str,
    index: Mapping[str, Any],
    weight_map: Mapping[str, str],
    opened: Mapping[str, dict[str, Stored] | None],
    weights: Weights,
    *,
    complete: bool,
) -> list[Problem]:
    problems: list[Problem] = []
    unlisted = [(key, part) for part, held in opened.items() for key in held or () if weight_map.get(key) != part]
    if unlisted:
        problems.append(_unlisted(folder / name, unlisted))
    stem = name.removesuffix(INDEX_SUFFIX).rpartition(".")[0]
    stale = [
        other
        for other in sorted(os.listdir(folder))
        if other not in opened and (match := _NUMBERED.match(other)) and match["stem"] == stem
    ]
    if stale:
        problems.append(_stale(folder, stale))
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(tensor.num_bytes for tensor in weights.tensors.values())
    if complete and isinstance(total, int) and total != held:
        problems.append(_total(folder / name, total, held))
    return problems


def _open_numbered(folder: Path, name: str, files: MappedFiles, weights: Weights) -> None:
    match = _NUMBERED.match(name)
    if match is None:
        return
    count = int(match["count"])
    for number in range(1, count + 1):
        file = folder / f"{match['stem']}-{number:05d}-of-{count:05d}.{match['ending']}"
        weights.tensors |= _try_one(file, files, weights) or {}


def _open_rank_shards(folder: Path, name: str, files: MappedFiles, weights: Weights) -> None:
    """Puts together what torch's HuggingFaceStorageWriter saved: one file per rank, offsets in each file's metadata."""
    first = _RANK_SHARD.match(name)
    shards: dict[int, SafeFile] = {}
    broken: list[int] = []
    for other in sorted(os.listdir(folder)):
        match = _RANK_SHARD.match(other)
        if match is None or first is None or match["file"] != first["file"]:
            continue
        rank = int(match["rank"]) - 1
        weights.files.append(folder / other)
        try:
            shards[rank] = read_safetensors(folder / other, files)
        except FormatError as error:
            weights.problems += error.problems
            broken.append(rank)
    if not shards:
        raise_first(weights)
    for opened in shards.values():
        weights.problems += opened.problems
        weights.metadata |= {k: v for k, v in opened.metadata.items() if not k.startswith("DCP_")}
    weights.num_ranks = max([*shards, *broken]) + 1
    weights.tensors = _join_shards(shards, weights)
    missing = sorted(set(range(weights.num_ranks)) - shards.keys() - set(broken))
    if missing:
        weights.problems.append(_missing_shards(folder, missing))
    elif not broken:
        weights.problems += check_last_shard(weights.tensors.values(), weights.num_ranks, "shard files")


def raise_first(weights: Weights) -> None:
    """Raises what was found when nothing could be read at all."""
    from samerun.errors import CorruptCheckpoint

    raise CorruptCheckpoint(weights.problems)


def _join_shards(shards: Mapping[int, SafeFile], weights: Weights) -> dict[str, Stored]:
    boxes: dict[str, list[tuple[tuple[int, ...], Stored]]] = {}
    nowhere: list[str] = []
    for opened in shards.values():
        places = _places(opened)
        for name, tensor in opened.tensors.items():
            offsets = places.get(name)
            if offsets is None or len(offsets) != len(tensor.shape):
                nowhere.append(name)
                continue
            boxes.setdefault(name, []).append((offsets, tensor))
    if nowhere:
        weights.problems.append(_nowhere(nowhere))
    return {name: _join(parts) for name, parts in boxes.items()}


def _places(opened: SafeFile) -> dict[str, tuple[int, ...]]:
    try:
        info = json.loads(opened.metadata.get("DCP_SHARDING_INFO", "{}"))
    except (ValueError, RecursionError):
        return {}
    places: dict[str, tuple[int, ...]] = {}
    for name, entry in info.items() if isinstance(info, dict) else ():
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if isinstance(offsets, list) and all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets):
            places[str(name)] = tuple(offsets)
    return places


def _join(parts: list[tuple[tuple[int, ...], Stored]]) -> Stored:
    """Returns a tensor as large as its outermost shard: nothing in the files says more."""
    ends = [[first + size for first, size in zip(offsets, tensor.shape, strict=True)] for offsets, tensor in parts]
    shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    dtype = parts[0][1].dtype
    boxes = [(offsets, tensor.shape, tensor.extents[0]) for offsets, tensor in parts if tensor.extents]
    return store_boxes(shape, dtype, boxes) if boxes else store_nothing(shape, dtype)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _missing(file: Path, why: str = "") -> Problem:
    return Problem(
        "SR-FILE-MISSING",
        f"a file of the model is not there{why}",
        where={"file": str(file)},
        hint="restore the file from the source; nothing else holds its tensors",
    )


def _missing_shards(folder: Path, missing: list[int]) -> Problem:
    names = [f"shard-{rank + 1:05d}" for rank in missing]
    return Problem(
        "SR-FILE-MISSING",
        f"{len(missing)} shard files are not here: {_some(names)}",
        where={"file": str(folder), "rank": missing[0]},
        hint="torch's HuggingFaceStorageReader does not notice: it loads what is there and leaves the rest as it was. "
        "Gather every rank's file",
    )


def _escapes(index: Path, part: str) -> Problem:
    return Problem(
        "SR-FILE-ESCAPE",
        "the index points outside its own directory",
        where={"file": str(index), "names": part},
        hint="samerun does not follow it; put the files beside the index",
    )


def _lacking(index: Path, lacking: list[tuple[str, str]]) -> Problem:
    shown = _some([f"{key} in {part}" for key, part in lacking])
    return Problem(
        "SR-FILE-INDEX",
        f"{len(lacking)} tensors are not in the files where the index says they are: {shown}",
        where={"file": str(index), "tensor": lacking[0][0]},
        hint="index and files are from different saves; restore both from the source",
    )


def _unlisted(index: Path, unlisted: list[tuple[str, str]]) -> Problem:
    shown = _some([f"{key} in {part}" for key, part in unlisted])
    return Problem(
        "SR-ST-UNLISTED",
        f"{len(unlisted)} tensors in the files are not in the index and no reader loads them: {shown}",
        severity=Severity.WARNING,
        where={"file": str(index), "tensor": unlisted[0][0]},
        hint="index and files may be from different saves",
    )


def _stale(folder: Path, stale: list[str]) -> Problem:
    return Problem(
        "SR-FILE-STALE",
        f"{len(stale)} files belong to no tensor of this checkpoint: {_some(stale)}",
        severity=Severity.WARNING,
        where={"file": str(folder / stale[0])},
        hint="an earlier save with another number of files wrote here before; nothing reads these files",
    )


def _total(index: Path, total: int, held: int) -> Problem:
    return Problem(
        "SR-ST-TOTAL",
        "the tensors do not add up to the size that the index states",
        severity=Severity.WARNING,
        where={"file": str(index)},
        expected=f"{total} bytes",
        found=f"{held} bytes",
        hint="right if tied tensors were counted twice; otherwise index and files are from different saves",
    )


def _nowhere(names: list[str]) -> Problem:
    return Problem(
        "SR-COV-PLACEMENT",
        f"{len(names)} shards do not say where they belong: {_some(sorted(set(names)))}",
        where={"tensor": names[0]},
        hint="DCP_SHARDING_INFO in the file's metadata should say it; restore the files from the source",
    )

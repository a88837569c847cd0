"""Compares a checkpoint with the digests that the job wrote beside it: makes `intact` decidable, and names files.

`samerun.train.write_digests` writes `samerun-digests.json`. It holds what the job held, not what was read back, so a
file left from another save, a lost write or a flipped bit all show.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samerun.core.digest import to_hex
from samerun.core.state import TensorEntry, TensorKey
from samerun.errors import FormatError, Problem, Severity, UsageError
from samerun.formats.base import Checkpoint
from samerun.verify.state.digest import digest_array, digest_tensor
from samerun.verify.state.match import Pair, is_counter, match_tensors

SCHEMA = "samerun/digests/1"
_NAME = "samerun-digests.json"
_MAX_BYTES = 1 << 30
_SHOWN = 4


def sidecar_path(checkpoint: Path) -> Path:
    """Returns where the digests of a checkpoint lie: inside a directory, beside a file."""
    return checkpoint / _NAME if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.{_NAME}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sidecar:
    """The digests of a job. `tensors` and `counters` are by the job's keys."""

    path: Path
    update: int | None
    tensors: Mapping[str, Mapping[str, Any]]
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SidecarCheck:
    """What comparing gave. `intact` is None where the digests do not cover the checkpoint, or are of another save."""

    intact: bool | None
    problems: tuple[Problem, ...] = ()


def read_sidecar(checkpoint: Path) -> Sidecar | Problem | None:
    """Returns the digests beside a checkpoint, None if there are none, a finding if they cannot be used."""
    path = sidecar_path(checkpoint)
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            return _broken(path, "it is larger than any job's digests")
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return _broken(path, f"{type(error).__name__}")
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        return _broken(path, f"its schema is not {SCHEMA}")
    tensors, counters, update = body.get("tensors"), body.get("counters", {}), body.get("update")
    if not isinstance(tensors, dict) or not isinstance(counters, dict) or not all(map(_is_row, tensors.items())):
        return _broken(path, "its rows are malformed")
    numbers = {key: float(value) for key, value in counters.items() if isinstance(value, int | float) and _is_key(key)}
    return Sidecar(path=path, update=update if type(update) is int else None, tensors=tensors, counters=numbers)


def _is_key(key: str) -> bool:
    try:
        TensorKey.parse(key)
    except ValueError:
        return False
    return True


def _is_row(item: tuple[str, Any]) -> bool:
    key, row = item
    if not isinstance(row, dict) or not _is_key(key) or not isinstance(row.get("digest"), str):
        return False
    aliases, shape = row.get("aliases", []), row.get("shape")
    return (
        isinstance(aliases, list)
        and all(isinstance(name, str) for name in aliases)
        and isinstance(shape, list)
        and all(type(size) is int for size in shape)
        and isinstance(row.get("dtype"), str)
    )


def _broken(path: Path, why: str) -> Problem:
    return Problem(
        "SR-SIDECAR-BROKEN",
        f"the digests beside the checkpoint cannot be used: {why}",
        severity=Severity.WARNING,
        where={"file": str(path)},
        hint="write_digests replaces the file as a whole; remove it if it was edited",
    )


def check_sidecar(checkpoint: Checkpoint, sidecar: Sidecar, digests: Mapping[str, str]) -> SidecarCheck:
    """Compares every tensor with what the job held. `digests` are the checkpoint's, by its own keys. Reads bytes."""
    match = match_tensors(checkpoint.state, sidecar.tensors)
    differing: list[Pair] = []
    undecided = 0
    for pair in match.pairs:
        row = sidecar.tensors[pair.key]
        equal = _equal(checkpoint, pair, row, digests)
        undecided += equal is None
        if equal is False:
            differing.append(pair)
    counters = _check_counters(checkpoint, sidecar)
    update = checkpoint.state.progress.update
    stale = sidecar.update is not None and update is not None and sidecar.update != update
    files, agreeing = _name_files(checkpoint, sidecar, differing)
    if stale and len(differing) > len(match.pairs) // 2 and not agreeing:
        return SidecarCheck(None, (_stale(sidecar, update),))
    problems = [
        *counters,
        *_check_keys(match.unexpected, sidecar),
        *files,
    ]
    if differing:
        problems.append(_values(sidecar, differing, len(match.pairs)))
    if problems:
        return SidecarCheck(False, tuple(problems))
    covered = not match.missing and not undecided and not stale and bool(match.pairs)
    return SidecarCheck(True if covered else None)


def _equal(checkpoint: Checkpoint, pair: Pair, row: Mapping[str, Any], digests: Mapping[str, str]) -> bool | None:
    """Whether the saved tensor is the job's; None where another type was saved, or it cannot be read."""
    for saved in (pair.saved, *pair.copies):
        entry = checkpoint.state.tensors[saved]
        if row.get("replicas_differ") or list(entry.shape) != row["shape"] or entry.dtype.name != row["dtype"]:
            return None
        try:
            found = digests.get(saved) if saved == pair.key else digest_tensor(checkpoint, saved, as_key=pair.key)
        except FormatError:
            found = None
        if found is None:
            return None
        if found != row["digest"]:
            return False
    return True


def _check_counters(checkpoint: Checkpoint, sidecar: Sidecar) -> list[Problem]:
    wrong: list[tuple[str, float, float]] = []
    for key, expected in sidecar.counters.items():
        entry = checkpoint.state.tensors.get(key)
        if entry is None or not is_counter(entry.key) or entry.num_elements != 1:
            continue
        try:
            found = float(checkpoint.read(key).astype("float64").reshape(-1)[0])
        except FormatError:
            continue
        if found != expected:
            wrong.append((key, expected, found))
    if not wrong:
        return []
    key, expected, found = wrong[0]
    return [
        Problem(
            "SR-SIDECAR-COUNTER",
            f"{len(wrong)} of {len(sidecar.counters)} step counters are not those that the job held when it saved",
            where={"tensor": key},
            expected=expected,
            found=found,
            hint="a part of the checkpoint is from another save",
        )
    ]


def _check_keys(unexpected: tuple[str, ...], sidecar: Sidecar) -> list[Problem]:
    lost = [key for key in unexpected if not is_counter(TensorKey.parse(key))]
    if not lost:
        return []
    return [
        Problem(
            "SR-SIDECAR-MISSING",
            f"{len(lost)} of {len(sidecar.tensors)} tensors that the job held are not in the checkpoint: "
            f"{', '.join(lost[:_SHOWN])}",
            where={"tensor": lost[0]},
            hint="they were not saved, or are saved under other names; a resume starts them anew",
        )
    ]


def _name_files(checkpoint: Checkpoint, sidecar: Sidecar, differing: list[Pair]) -> tuple[list[Problem], int]:
    """Names the files whose pieces are not the job's shards, where the digests list shards cut in the same way.

    Also returns how many pieces of the differing tensors are the job's.
    """
    bad: Counter[str] = Counter()
    good: Counter[str] = Counter()
    for pair in differing:
        boxes = _boxes(sidecar.tensors[pair.key])
        entry = checkpoint.state.tensors[pair.saved]
        for piece in range(len(entry.tiling)):
            outcome = _piece_equal(checkpoint, pair, entry, piece, boxes)
            if outcome is not None:
                file, equal = outcome
                (good if equal else bad)[file] += 1
    problems = [
        Problem(
            "SR-SIDECAR-FILE",
            f"{count} of {count + good[file]} pieces in this file are not what the job held when it saved",
            where={"file": file},
            hint="the file is from another save of the run, or was damaged; use another checkpoint",
        )
        for file, count in bad.items()
    ]
    return problems, good.total()


def _boxes(row: Mapping[str, Any]) -> dict[tuple[Any, ...], str]:
    boxes: dict[tuple[Any, ...], str] = {}
    pieces = row.get("pieces")
    for item in pieces if isinstance(pieces, list) else ():
        if isinstance(item, list) and len(item) == 3 and isinstance(item[0], list) and isinstance(item[1], list):
            boxes[(*map(str, item[0]), "/", *map(str, item[1]))] = str(item[2])
    return boxes


def _piece_equal(
    checkpoint: Checkpoint, pair: Pair, entry: TensorEntry, piece: int, boxes: Mapping[tuple[Any, ...], str]
) -> tuple[str, bool] | None:
    offsets, sizes = entry.tiling.offsets[piece].tolist(), entry.tiling.sizes[piece].tolist()
    expected = boxes.get((*map(str, offsets), "/", *map(str, sizes)))
    if expected is None:
        return None
    try:
        array = checkpoint.read_piece(pair.saved, piece)
        file = str(checkpoint.locate(pair.saved, piece).file).partition("@")[0]
    except (FormatError, UsageError):
        return None
    return file, to_hex(digest_array(pair.key, array, entry.dtype, entry.shape, offsets)) == expected


def _values(sidecar: Sidecar, differing: list[Pair], total: int) -> Problem:
    shown = ", ".join(pair.key for pair in differing[:_SHOWN])
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    at = f" at update {sidecar.update}" if sidecar.update is not None else ""
    return Problem(
        "SR-SIDECAR-VALUE",
        f"{len(differing)} of {total} tensors are not what the job held when it saved{at}: {shown}{more}",
        where={"tensor": differing[0].saved},
        hint="a file is left from another save, or bytes were lost or changed; use another checkpoint",
    )


def _stale(sidecar: Sidecar, update: int | None) -> Problem:
    return Problem(
        "SR-SIDECAR-STALE",
        "the digests beside the checkpoint are of another save than its files",
        severity=Severity.WARNING,
        where={"file": str(sidecar.path)},
        expected=update,
        found=sidecar.update,
        hint="call write_digests after every save; whether the files are intact is not decided",
    )

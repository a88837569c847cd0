"""Compares a checkpoint with the proof that `samerun convert` left with it: the digest of every tensor that it wrote.

The digests are the source's, and were found again when the destination was read back; what changed since then shows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samerun.core.digest import whole_digest
from samerun.core.dtype import DTYPES
from samerun.core.state import TensorEntry, TensorKey
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import Checkpoint, numpy_dtype
from samerun.verify.state.digest import digest_array, digest_tensor
from samerun.verify.state.match import is_counter
from samerun.verify.state.sidecar import SidecarCheck

_NAME = "samerun-proof.json"
_SCHEMA = "samerun/convert-proof/1"
_MAX_BYTES = 1 << 30
_SHOWN = 4
_MOST_DIMENSIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proof:
    """What a conversion proved. `tensors` are by the source's keys; `format` and `update` are the destination's."""

    path: Path
    format: str | None
    update: int | None
    tensors: Mapping[str, Mapping[str, Any]]


def proof_path(checkpoint: Path) -> Path:
    """Returns where a destination's proof lies: inside a directory, beside a file."""
    return checkpoint / _NAME if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.{_NAME}")


def read_proof(checkpoint: Path) -> Proof | Problem | None:
    """Returns the proof with a checkpoint, None if there is none, a finding if it cannot be used."""
    path = proof_path(checkpoint)
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            return _broken(path, "it is larger than any proof")
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return _broken(path, type(error).__name__)
    if not isinstance(body, dict) or body.get("schema") != _SCHEMA:
        return _broken(path, f"its schema is not {_SCHEMA}")
    tensors, destination = body.get("tensors"), body.get("destination")
    if not isinstance(tensors, dict) or not isinstance(destination, dict) or not all(map(_is_row, tensors.items())):
        return _broken(path, "its rows are malformed")
    update, format = destination.get("update"), destination.get("format")
    return Proof(
        path=path,
        format=format if isinstance(format, str) else None,
        update=update if type(update) is int else None,
        tensors=tensors,
    )


def _is_row(item: tuple[str, Any]) -> bool:
    key, row = item
    if not isinstance(row, dict) or not isinstance(row.get("digest"), str) or row.get("dtype") not in DTYPES:
        return False
    try:
        TensorKey.parse(key)
    except ValueError:
        return False
    shape = row.get("shape")
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) and _has_keys(row)


def _has_keys(row: Mapping[str, Any]) -> bool:
    copies = row.get("copies", [])
    names = [row.get("destination_key", ""), *(copies if isinstance(copies, list) else [None])]
    return all(isinstance(name, str) for name in names)


def check_proof(checkpoint: Checkpoint, proof: Proof, digests: Mapping[str, str]) -> SidecarCheck:
    """Compares every tensor with what was proved. `digests` are the checkpoint's, by its own keys. Reads bytes.

    `intact` is None where the proof is of another checkpoint, or does not cover this one: tensors that a writer
    derived from others have no digest of their own.
    """
    lost = [key for key, row in proof.tensors.items() if not _saved(key, row) <= checkpoint.state.tensors.keys()]
    pairs = [
        (key, row, saved)
        for key, row in proof.tensors.items()
        for saved in sorted(_saved(key, row) & checkpoint.state.tensors.keys())
    ]
    equal = [_equal(checkpoint, key, row, saved, digests) for key, row, saved in pairs]
    differing = [saved for (_, _, saved), same in zip(pairs, equal, strict=True) if same is False]
    update = checkpoint.state.progress.update
    another = proof.update is not None and update is not None and proof.update != update
    if len(lost) > len(proof.tensors) // 2 or (another and len(differing) > len(pairs) // 2):
        return SidecarCheck(None, (_foreign(proof, len(lost), update),))
    problems = [_missing(proof, lost)] if lost else []
    if differing:
        problems.append(_value(checkpoint, differing, len(pairs)))
    if problems:
        return SidecarCheck(False, tuple(problems))
    covered = {saved for _, _, saved in pairs} >= checkpoint.state.tensors.keys()
    return SidecarCheck(True if pairs and covered and all(equal) and not another else None)


def _saved(key: str, row: Mapping[str, Any]) -> set[str]:
    """Returns the destination's keys of one tensor of the source: tied tensors may be there under several."""
    return {str(row.get("destination_key", key)), *map(str, row.get("copies", []))}


def _equal(
    checkpoint: Checkpoint, key: str, row: Mapping[str, Any], saved: str, digests: Mapping[str, str]
) -> bool | None:
    """Whether a tensor is what was proved; None if it cannot be read, which is a finding of its own."""
    entry = checkpoint.state.tensors[saved]
    try:
        if [entry.dtype.name, *entry.shape] == [row["dtype"], *row["shape"]]:
            found = digests.get(saved) if saved == key else digest_tensor(checkpoint, saved, as_key=key)
        elif is_counter(entry.key) and entry.num_elements == 1:
            found = _digest_counter(checkpoint, key, row, entry)
        else:
            return False
    except FormatError:
        return None
    return None if found is None else found == row["digest"]


def _digest_counter(checkpoint: Checkpoint, key: str, row: Mapping[str, Any], entry: TensorEntry) -> str | None:
    """Digests a step counter in the shape and type that the source kept it in: formats differ in both."""
    dtype, shape = DTYPES[row["dtype"]], tuple(row["shape"])
    if any(size != 1 for size in shape) or len(shape) > _MOST_DIMENSIONS:
        return None
    with np.errstate(all="ignore"):
        value = checkpoint.read(str(entry.key)).astype(numpy_dtype(dtype)).reshape(shape)
    return whole_digest(digest_array(key, value, dtype, shape, (0,) * len(shape)), key, dtype, shape)


def _broken(path: Path, why: str) -> Problem:
    return Problem(
        "SR-PROOF-BROKEN",
        f"the proof of the conversion cannot be used: {why}",
        severity=Severity.WARNING,
        where={"file": str(path)},
        hint="restore it from the conversion, or convert again; without it, whether bytes changed is not decided",
    )


def _foreign(proof: Proof, lost: int, update: int | None) -> Problem:
    return Problem(
        "SR-PROOF-FOREIGN",
        "the proof of a conversion that lies here is of another checkpoint"
        + (f": {lost} of {len(proof.tensors)} tensors that it lists are not in this one" if lost else ""),
        severity=Severity.WARNING,
        where={"file": str(proof.path)},
        expected=None if update == proof.update else f"update {update}",
        found=None if update == proof.update else f"update {proof.update}",
        hint="something was saved here after the conversion, or the file was copied; remove the proof",
    )


def _missing(proof: Proof, lost: list[str]) -> Problem:
    return Problem(
        "SR-PROOF-MISSING",
        f"{len(lost)} of {len(proof.tensors)} tensors that the conversion wrote are not here: {_some(lost)}",
        where={"file": str(proof.path), "tensor": lost[0]},
        hint="a file was removed or replaced after the conversion; convert again",
    )


def _value(checkpoint: Checkpoint, differing: list[str], total: int) -> Problem:
    where = {"tensor": differing[0]}
    with contextlib.suppress(FormatError, IndexError):
        where["file"] = str(checkpoint.locate(differing[0], 0).file)
    return Problem(
        "SR-PROOF-VALUE",
        f"{len(differing)} of {total} tensors are not what the conversion wrote and proved: {_some(differing)}",
        where=where,
        hint="bytes changed since, or a file was replaced; convert again, the source was not touched",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

"""The weights alone, where that is all that the user wants: what a model is evaluated or served with, and no run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from samerun.convert.view import StateView
from samerun.core.state import LogicalState, RecordedProgress, Role
from samerun.errors import CorruptCheckpoint, Problem, Severity, UndecidedError, UsageError
from samerun.formats.base import Checkpoint, PayloadCheck
from samerun.formats.torchfile.archive import checksum_problem
from samerun.stores.crc32 import crc32
from samerun.stores.local import MappedFiles

WITH_WEIGHTS = ("dcp", "torch", "safetensors", "huggingface")  # formats that a model is loaded from without a run
WHY = "only the weights were asked for"
_WEIGHTS = (Role.PARAM, Role.BUFFER)
_SECTIONS = ("groups", "scheduler", "rng", "data", "objects")


def keep_weights(source: Checkpoint, to: str) -> tuple[Checkpoint, dict[str, str], Problem]:
    """Returns the checkpoint without anything but parameters and buffers, what was left out, and what to say of it.

    What was left out is named by key, or by section of the state.

    Raises:
        UsageError: if the destination is a run's and nothing else, or the source has no weights.
        UndecidedError: if there are fp32 masters: they or the rounded weights may be what is wanted.
    """
    if to not in WITH_WEIGHTS:
        raise UsageError(_refused(f"`{to}` holds a run, not weights alone", f"formats: {', '.join(WITH_WEIGHTS)}"))
    state = source.state
    kept = {key: entry for key, entry in state.tensors.items() if entry.key.role in _WEIGHTS}
    if not kept:
        raise UsageError(_refused("the source has no weights", "`samerun inspect` shows what it has"))
    if masters := [key for key, entry in state.tensors.items() if entry.key.role is Role.MASTER]:
        raise UndecidedError(_which(masters, state))
    dropped = dict.fromkeys((key for key in state.tensors if key not in kept), WHY)
    dropped |= dict.fromkeys((name for name in _SECTIONS if getattr(state, name)), WHY)
    if state.progress != RecordedProgress():
        dropped["progress"] = WHY
    bare = LogicalState(
        format=state.format,
        tensors=kept,
        topology=state.topology,
        written_by=state.written_by,
        problems=state.problems,
    )
    return StateView(source, bare), dropped, _left_out(state, len(kept), dropped)


def check_read(source: Checkpoint) -> PayloadCheck | None:
    """Compares the storages that a checkpoint's tensors lie in with the checksums recorded for them, and no others.

    None if some of them are unpacked by the reader, which alone can check them.
    """
    problems: list[Problem] = []
    seen: dict[tuple[Path, int], bool] = {}
    files = MappedFiles()
    try:
        for key, entry in source.state.tensors.items():
            for piece in range(len(entry.tiling)):
                try:
                    extent = source.locate(key, piece)
                except CorruptCheckpoint:
                    continue  # values that lie in no file, or a finding already
                recorded = extent.crc32 is not None
                place = (extent.file, extent.storage_offset_bytes if recorded else extent.offset_bytes)
                if place in seen:
                    continue
                seen[place] = recorded
                stop = extent.storage_offset_bytes + extent.storage_bytes
                if extent.crc32 is not None:
                    found = crc32(files.range(extent.file, extent.storage_offset_bytes, stop))
                    if found != extent.crc32:
                        problems.append(checksum_problem(extent.file, key, extent.crc32, found))
    except FileNotFoundError:
        return None
    finally:
        files.close()
    checked = sum(seen.values())
    return PayloadCheck(checked, len(seen), False if problems else None, tuple(problems))


def _left_out(state: LogicalState, kept: int, dropped: Mapping[str, str]) -> Problem:
    tensors = sum(key in state.tensors for key in dropped)
    rest = "".join(f", {key}" for key in dropped if key not in state.tensors)
    return Problem(
        "SR-CONVERT-WEIGHTS",
        f"{kept} parameters and buffers are written; left out are {tensors} other tensors{rest}",
        severity=Severity.WARNING,
        hint="this is what --weights-only asked for. No run resumes from it; the proof names all that is left out. "
        "Of the source, only what is written was compared with recorded checksums",
    )


def _refused(message: str, hint: str) -> Problem:
    return Problem("SR-USAGE-OPTION", f"--weights-only: {message}", hint=hint)


def _which(masters: list[str], state: LogicalState) -> Problem:
    return Problem(
        "SR-WRITE-MASTERS",
        f"there are {len(masters)} {state.tensors[masters[0]].dtype.name} masters, and the weights rounded from them",
        where={"tensor": masters[0]},
        hint="--masters params writes the masters as the weights, --masters drop the rounded weights; `slots` is for "
        "an optimizer",
    )

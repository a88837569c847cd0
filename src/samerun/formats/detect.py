"""Opens whatever lies at a path: says what it is and why, follows trackers, and never guesses between several."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from samerun.errors import CorruptCheckpoint, FormatError, Problem, UnsupportedVersion, UsageError
from samerun.formats.base import Checkpoint
from samerun.formats.dcp.reader import metadata_files, open_dcp

FORMATS = ("dcp",)
TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
_LOOKED_FOR = ".metadata or __N.metadata (DCP), a tracker file (latest, latest_checkpointed_iteration.txt)"
_DEPTH = 2
_MAX_ENTRIES = 10_000
_MAX_TRACKER_BYTES = 4_096

# What other formats leave behind, and what to call it: to say what a directory looks like when it is not read.
_RESEMBLES = (
    (re.compile(r"^(?:bf16_)?zero_pp_rank_\d+_"), "a DeepSpeed ZeRO checkpoint"),
    (re.compile(r"^mp_rank_\d+"), "a DeepSpeed or Megatron-LM checkpoint"),
    (re.compile(r"^common\.pt$"), "a Megatron-LM distributed checkpoint"),
    (re.compile(r"^trainer_state\.json$"), "a Hugging Face Trainer checkpoint"),
    (re.compile(r"\.ckpt$"), "a Lightning checkpoint"),
    (re.compile(r"\.safetensors$"), "safetensors files"),
    (re.compile(r"\.(?:pt|pth|bin)$"), "torch.save files"),
)


def open_checkpoint(path: str | os.PathLike[str], format: str | None = None) -> Checkpoint:
    """Opens a checkpoint, read-only and lazily.

    A directory that holds one checkpoint somewhere below it, or a tracker that names one, leads to that one.

    Raises:
        UsageError: if nothing is there, or several checkpoints are and no tracker says which.
        FormatError: if it is no checkpoint that can be read; the message says what was looked for.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(_unknown_format(format))
    root = Path(path)
    if not os.path.lexists(root):
        raise UsageError(_nothing_there(root))
    if root.name == ".metadata" and root.is_file():
        root = root.parent
    return open_dcp(_locate(root))


def _locate(root: Path) -> Path:
    """Returns the one checkpoint directory that a path means."""
    if not root.is_dir():
        raise UnsupportedVersion(_unsupported(root, _resemblance([root.name])))
    if _is_checkpoint(root):
        _refuse_megatron(root)
        return root
    for name in TRACKERS:
        if os.path.lexists(root / name):
            return _locate_tracked(root, name)
    found = sorted(_search(root, _DEPTH), key=_natural)
    if len(found) == 1:
        return _locate(found[0])
    if found:
        raise UsageError(_several(root, found))
    raise _no_checkpoint(root)


def _is_checkpoint(path: Path) -> bool:
    try:
        return bool(metadata_files(path))
    except OSError:
        return False


def _refuse_megatron(root: Path) -> None:
    """Megatron's distributed checkpoints are DCP directories with an encoding of their own on top."""
    if (root / "common.pt").exists() and (root / "metadata.json").exists():
        raise UnsupportedVersion(_unsupported(root, "a Megatron-LM distributed checkpoint (metadata.json, common.pt)"))


def _locate_tracked(root: Path, tracker: str) -> Path:
    text = _read_tracker(root / tracker)
    name = f"iter_{int(text):07d}" if tracker.endswith(".txt") and text.isascii() and text.isdigit() else text
    plain = re.fullmatch(r"[\w.=+-]{1,200}", name) and name not in (".", "..")
    target = root / name
    if plain and target.is_dir() and _is_checkpoint(target):
        _refuse_megatron(target)
        return target
    others = sorted((path for path in _search(root, _DEPTH)), key=_natural)
    raise CorruptCheckpoint(_broken_tracker(root / tracker, name if plain else "", others))


def _read_tracker(path: Path) -> str:
    if not stat.S_ISREG(os.stat(path).st_mode):
        return ""
    with open(path, "rb") as file:
        return file.read(_MAX_TRACKER_BYTES).decode("utf-8", "replace").strip()


def _search(root: Path, depth: int) -> Iterable[Path]:
    """Finds checkpoint directories below `root`, not following links."""
    budget = _MAX_ENTRIES
    level = [root]
    for _ in range(depth):
        below: list[Path] = []
        for folder in level:
            for entry in _folders(folder):
                budget -= 1
                if budget < 0:
                    return
                below.append(entry)
        for path in below:
            if _is_checkpoint(path):
                yield path
        level = [path for path in below if not _is_checkpoint(path)]


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _resemblance(names: Iterable[str]) -> str:
    listed = list(names)
    for pattern, what in _RESEMBLES:
        example = next((name for name in listed if pattern.search(name)), None)
        if example is not None:
            return f"{what} ({example})"
    return ""


def _no_checkpoint(root: Path) -> FormatError:
    names = sorted(os.listdir(root))
    data = [name for name in names if name.endswith(".distcp")]
    if data:
        return CorruptCheckpoint(_unfinished(root, data, names))
    return UnsupportedVersion(_unsupported(root, _resemblance(names)))


def _unfinished(root: Path, data: list[str], names: list[str]) -> Problem:
    rest = next((name for name in names if name.startswith(".metadata")), None)
    return Problem(
        "SR-META-MISSING",
        f"{len(data)} DCP data files are here but no .metadata: the save never finished"
        + (f" ({rest} was being written)" if rest else ""),
        where={"file": str(root)},
        hint="DCP writes .metadata last; use the checkpoint before this one",
    )


def _unsupported(root: Path, resemblance: str) -> Problem:
    looks = f"it looks like {resemblance}" if resemblance else "nothing in it is known"
    return Problem(
        "SR-PATH-UNKNOWN",
        f"no checkpoint that samerun reads: {looks}",
        where={"file": str(root)},
        hint=f"looked for {_LOOKED_FOR}, here and two levels below",
    )


def _nothing_there(root: Path) -> Problem:
    import difflib

    names = sorted(os.listdir(root.parent)) if root.parent.is_dir() else []
    close = difflib.get_close_matches(root.name, names, n=3)
    return Problem(
        "SR-PATH-NONE",
        "there is nothing at this path",
        where={"file": str(root)},
        hint=f"beside it: {', '.join(close)}" if close else "check the path",
    )


def _several(root: Path, found: list[Path]) -> Problem:
    shown = ", ".join(str(path.relative_to(root)) for path in found[:20])
    return Problem(
        "SR-PATH-SEVERAL",
        f"{len(found)} checkpoints are here and no tracker says which is meant: {shown}"
        + (f" and {len(found) - 20} more" if len(found) > 20 else ""),
        where={"file": str(root)},
        hint="give the path of one of them",
    )


def _broken_tracker(tracker: Path, name: str, others: list[Path]) -> Problem:
    what = f"{name}, which is no checkpoint" if name else "something that is not a plain name"
    complete = ", ".join(str(path.relative_to(tracker.parent)) for path in others[-5:])
    return Problem(
        "SR-PATH-TRACKER",
        f"the tracker names {what}: that save never finished or was removed",
        where={"file": str(tracker)},
        hint=f"checkpoints beside it: {complete}" if complete else "there is no other checkpoint beside it",
    )


def _unknown_format(format: str) -> Problem:
    return Problem(
        "SR-PATH-FORMAT",
        f"no format is called {format!r}",
        hint=f"formats that can be read: {', '.join(FORMATS)}",
    )

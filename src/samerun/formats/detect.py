"""Opens whatever lies at a path: says what it is and why, follows trackers, and never guesses between several."""

from __future__ import annotations

import atexit
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from samerun.errors import CorruptCheckpoint, FormatError, Problem, UnsupportedVersion, UsageError
from samerun.formats.parts import check_part
from samerun.stores.destination import incomplete_marker
from samerun.stores.remote import RemoteView, is_url, not_whole, original_name

if TYPE_CHECKING:
    from samerun.formats.base import Checkpoint


@dataclass(frozen=True, slots=True)
class Reader:
    """One format. `recognise` returns why a directory or file looks like its checkpoint, None if it does not.

    `tracker` is a tracker file that names checkpoints of this format only.
    """

    name: str
    recognise: Callable[[Path], str | None]
    open: Callable[[Path], Checkpoint]
    tracker: str | None = None


def _recognise_dcp(path: Path) -> str | None:
    from samerun.formats.dcpfile.detect import metadata_files
    from samerun.formats.megatron.detect import looks_like as looks_like_megatron

    found = metadata_files(path)
    return f"it holds {found[0].name}" if found and looks_like_megatron(path) is None else None


def _open_dcp(path: Path) -> Checkpoint:
    from samerun.formats.dcp.reader import open_dcp

    return open_dcp(path)


def _recognise_zero(path: Path) -> str | None:
    from samerun.formats.zero.directory import looks_like

    return looks_like(path)


def _open_zero(path: Path) -> Checkpoint:
    from samerun.formats.zero.reader import open_zero

    return open_zero(path)


def _recognise_universal(path: Path) -> str | None:
    from samerun.formats.universal.source import looks_like

    return looks_like(path)


def _open_universal(path: Path) -> Checkpoint:
    from samerun.formats.universal.reader import open_universal

    return open_universal(path)


def _reader(name: str, *, has_inner: bool = False, package: str = "", tracker: str | None = None) -> Reader:
    """Returns the reader of a format whose package has `detect.looks_like` and `reader.open_<name>`.

    Both are imported when first needed. With `has_inner` its checkpoints may hold others, which this module opens.
    `package` is the package's name where it is not the format's.
    """
    package = package or name

    def recognise(path: Path) -> str | None:
        return import_module(f"samerun.formats.{package}.detect").looks_like(path)

    def open(path: Path) -> Checkpoint:
        function = getattr(import_module(f"samerun.formats.{package}.reader"), f"open_{package}")
        return function(path, open_inner) if has_inner else function(path)

    return Reader(name, recognise, open, tracker)


def open_inner(path: Path) -> Checkpoint:
    """Opens a checkpoint that lies inside another one's directory, or is its sharded part.

    Raises:
        UnsupportedVersion: if it is none of a format that occurs inside others.
    """
    for reader in READERS:
        if reader.name in _INNER_FORMATS and _recognises(reader, path):
            return reader.open(path)
    raise UnsupportedVersion(_unsupported(path, _resemblance(entry.name for entry in path.iterdir())))


_MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"

# In this order: formats that hold others, or whose files others would recognise too, come first.
READERS = (
    _reader("lightning", has_inner=True),
    _reader("huggingface", has_inner=True),
    _reader("accelerate", has_inner=True),
    _reader("megatron", tracker=_MEGATRON_TRACKER),
    _reader("megatron-legacy", package="megatron_legacy", tracker=_MEGATRON_TRACKER),
    Reader("dcp", _recognise_dcp, _open_dcp),
    Reader("zero", _recognise_zero, _open_zero),
    Reader("universal", _recognise_universal, _open_universal, "latest_universal"),
    _reader("fsdp1"),
    _reader("ranklocal"),
    _reader("safetensors"),
    _reader("torch"),
)
_INNER_FORMATS = ("dcp", "zero", "universal", "fsdp1", "ranklocal")
FORMATS = tuple(reader.name for reader in READERS)
TRACKERS = ("latest", _MEGATRON_TRACKER, "latest_universal")
_LOOKED_FOR = (
    ".metadata or __N.metadata (DCP), mp_rank_*_model_states.pt and zero_pp_rank_*_optim_states.pt (DeepSpeed ZeRO), "
    "zero/<parameter>/fp32.pt (DeepSpeed universal), trainer_state.json or config.json with a model (Hugging Face), "
    "random_states_N.pkl (Accelerate), files that differ in a rank only, .safetensors, files of torch.save, a tracker "
    f"file ({', '.join(TRACKERS)})"
)
_DEPTH = 2
_MAX_ENTRIES = 10_000
_UNFINISHED = ".samerun-partial-"  # of a conversion that was interrupted
_MAX_TRACKER_BYTES = 4_096
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar", ".safetensors")

# What other formats leave behind, and what to call it: to say what a directory looks like when it is not read.
_RESEMBLES = (
    (re.compile(r"^\.metadata$"), "a torch.distributed.checkpoint directory"),
    (re.compile(r"^(?:bf16_)?zero_pp_rank_\d+_"), "a DeepSpeed ZeRO checkpoint"),
    (re.compile(r"^mp_rank_\d+"), "a DeepSpeed or Megatron-LM checkpoint"),
    (re.compile(r"^common\.pt$"), "a Megatron-LM distributed checkpoint"),
    (re.compile(r"^trainer_state\.json$"), "a Hugging Face Trainer checkpoint"),
    (re.compile(r"\.ckpt$"), "a Lightning checkpoint"),
    (re.compile(r"\.safetensors$"), "safetensors files"),
    (re.compile(r"\.(?:pt|pth|bin)$"), "torch.save files"),
)


def open_checkpoint(path: str | os.PathLike[str], format: str | None = None, *, unfinished: bool = False) -> Checkpoint:
    """Opens a checkpoint, read-only and lazily. A path may be a URL that fsspec understands.

    A directory that holds one checkpoint somewhere below it, or a tracker that names one, leads to that one.
    `unfinished` is for the conversion that reads back what it writes into a store.

    Raises:
        UsageError: if nothing is there, or several checkpoints are and no tracker says which.
        FormatError: if it is no checkpoint that can be read; the message says what was looked for.
        CorruptCheckpoint: if a conversion that writes it has not ended.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(_unknown_format(format))
    if not os.fspath(path):
        raise UsageError(_no_path())
    if is_url(path):
        return _open_remote(str(path), format, unfinished=unfinished)
    return _open_local(Path(path), format, unfinished=unfinished)


def recognise(path: Path) -> str | None:
    """Returns which format a directory or file looks like and why (`dcp: it holds .metadata`), None for none."""
    for reader in READERS:
        if why := _recognises(reader, path):
            return f"{reader.name}: {why}"
    return None


def find_checkpoints(root: Path) -> list[Path]:
    """Returns every checkpoint at a path or up to two levels below, in natural order; links are not followed.

    Unlike `open_checkpoint` it does not choose: a tracker is not followed, several are all returned.
    """
    if not root.is_dir():
        return [root] if root.is_file() and _is_checkpoint(root, READERS) else []
    if _is_checkpoint(root, READERS):
        return [root]
    return sorted({*_search(root, _DEPTH, READERS), *_single_files(root, READERS)}, key=_natural)


def _open_remote(url: str, format: str | None, *, unfinished: bool) -> Checkpoint:
    """Opens what lies at a URL; closing the checkpoint removes what was fetched of it."""
    view = RemoteView(url)
    try:
        checkpoint = _open_local(view.path, format, unfinished=unfinished)
    except BaseException:
        view.close()
        raise
    close = checkpoint.close

    def close_both() -> None:
        close()
        view.close()

    checkpoint.close = close_both
    atexit.register(view.close)
    return checkpoint


def _open_local(root: Path, format: str | None, *, unfinished: bool) -> Checkpoint:
    if not os.path.lexists(root):
        raise UsageError(_nothing_there(root))
    if root.name == ".metadata" and root.is_file():
        root = root.parent
    readers = tuple(reader for reader in READERS if format in (None, reader.name))
    if not unfinished:
        _require_whole(root)
    found = _locate(root, readers)
    if not unfinished and found != root:
        _require_whole(found)
    part = check_part(found) if found.is_file() else None
    for reader in readers:
        why = _recognises(reader, found)
        if why:
            checkpoint = _open_with(reader, found, part)
            known = {"recognised": why, **checkpoint.state.written_by}
            problems = (*checkpoint.state.problems, *((part,) if part else ()))
            checkpoint.state = replace(checkpoint.state, written_by=known, problems=problems)
            return checkpoint
    raise _no_checkpoint(found)


def _open_with(reader: Reader, path: Path, part: Problem | None) -> Checkpoint:
    """Opens with a reader. A part of a checkpoint that cannot be read alone is called one, not damaged."""
    try:
        return reader.open(path)
    except CorruptCheckpoint:
        if part is None:
            raise
        raise UsageError(part) from None


def _require_whole(path: Path) -> None:
    """Raises CorruptCheckpoint for what a conversion into a store has begun and not ended, wherever it lies now."""
    if (marker := incomplete_marker(path)) is not None:
        raise CorruptCheckpoint(not_whole(original_name(path), marker.name))


def _locate(root: Path, readers: tuple[Reader, ...]) -> Path:
    """Returns the one checkpoint directory or file that a path means, for one of these readers."""
    if not root.is_dir():
        if root.is_file() and _is_checkpoint(root, readers):
            return root
        if root.is_file() and (part := check_part(root)) is not None:
            raise UsageError(part)
        raise _no_checkpoint_file(root)
    if _is_checkpoint(root, readers):
        return root
    own = [reader.tracker for reader in readers if reader.tracker is not None and len(readers) == 1]
    for name in own or TRACKERS:
        if os.path.lexists(root / name):
            return _locate_tracked(root, name, readers)
    found = sorted(_search(root, _DEPTH, readers), key=_natural) or _single_files(root, readers)
    if len(found) == 1:
        return _locate(found[0], readers)
    if found:
        raise UsageError(_several(root, found))
    raise _no_checkpoint(root)


def _is_checkpoint(path: Path, readers: tuple[Reader, ...]) -> bool:
    return any(_recognises(reader, path) for reader in readers)


def _recognises(reader: Reader, path: Path) -> str | None:
    try:
        return reader.recognise(path)
    except OSError:
        return None


def _single_files(root: Path, readers: tuple[Reader, ...]) -> list[Path]:
    """Finds files in `root` that are checkpoints by themselves."""
    names = sorted(os.listdir(root))[:_MAX_ENTRIES]
    files = [root / name for name in names if name.endswith(_SUFFIXES)]
    return sorted((file for file in files if file.is_file() and _is_checkpoint(file, readers)), key=_natural)


def _locate_tracked(root: Path, tracker: str, readers: tuple[Reader, ...]) -> Path:
    text = _read_tracker(root / tracker)
    name = f"iter_{int(text):07d}" if tracker.endswith(".txt") and text.isascii() and text.isdigit() else text
    plain = re.fullmatch(r"[\w.=+,:@# -]{1,200}", name) and name not in (".", "..")
    target = root / name
    if plain and target.is_dir() and _is_checkpoint(target, readers):
        return target
    others = sorted((path for path in _search(root, _DEPTH, readers)), key=_natural)
    raise CorruptCheckpoint(_broken_tracker(root / tracker, name if plain else "", others))


def _read_tracker(path: Path) -> str:
    if not stat.S_ISREG(os.stat(path).st_mode):
        return ""
    with open(path, "rb") as file:
        return file.read(_MAX_TRACKER_BYTES).decode("utf-8", "replace").strip()


def _search(root: Path, depth: int, readers: tuple[Reader, ...]) -> Iterable[Path]:
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
            if _is_checkpoint(path, readers):
                yield path
        level = [path for path in below if not _is_checkpoint(path, readers)]


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and _UNFINISHED not in entry.name
            ]
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
    if data and ".metadata" not in names:
        return CorruptCheckpoint(_unfinished(root, data, names))
    files = [root / name for name in names if name.endswith(_SUFFIXES)]
    empty = [file for file in files if file.is_file() and not file.stat().st_size]
    if empty and len(empty) == len(files):
        return CorruptCheckpoint(_empty(empty))
    return UnsupportedVersion(_unsupported(root, _resemblance(names)))


def _no_checkpoint_file(file: Path) -> FormatError:
    if not file.is_file():
        return UnsupportedVersion(_unsupported(file, ""))
    if not file.stat().st_size:
        return CorruptCheckpoint(_empty([file]))
    resemblance = _resemblance([file.name])
    return UnsupportedVersion(_misnamed(file, resemblance) if resemblance else _unsupported(file, ""))


def _empty(files: list[Path]) -> Problem:
    more = f", and {len(files) - 1} more beside it" if len(files) > 1 else ""
    return Problem(
        "SR-FILE-EMPTY",
        f"the file is empty{more}: whatever wrote it failed before the first byte",
        where={"file": str(files[0])},
        hint="the save did not finish, or the disk was full; use the checkpoint before this one",
    )


def _misnamed(file: Path, resemblance: str) -> Problem:
    with open(file, "rb") as stream:
        head = stream.read(8)
    return Problem(
        "SR-PATH-UNKNOWN",
        f"no checkpoint that samerun reads: by its name it should be {resemblance}, but it begins with {head!r}",
        where={"file": str(file)},
        hint="torch.save files begin with PK or 0x80, safetensors files with the length of their header; check what "
        "wrote it, and whether it is a pointer of Git LFS or a page of an error",
    )


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
    looks = f"by a name in it, it should hold {resemblance}" if resemblance else "nothing in it is known"
    return Problem(
        "SR-PATH-UNKNOWN",
        f"no checkpoint that samerun reads: {looks}",
        where={"file": str(root)},
        hint=f"looked for {_LOOKED_FOR}, here and two levels below",
    )


def _no_path() -> Problem:
    hint = "a variable of the shell that is not set gives this; the directory one is in is called ."
    return Problem("SR-PATH-NONE", "the path is empty", where={"file": ""}, hint=hint)


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
    what = "names something that is not a plain name"
    if name:
        what = f"names {name}, which is no checkpoint"
    elif not tracker.stat().st_size:
        what = "is empty"
    complete = ", ".join(str(path.relative_to(tracker.parent)) for path in others[-5:])
    return Problem(
        "SR-PATH-TRACKER",
        f"the tracker {what}: that save never finished or was removed",
        where={"file": str(tracker)},
        hint=f"checkpoints beside it: {complete}" if complete else "there is no other checkpoint beside it",
    )


def _unknown_format(format: str) -> Problem:
    return Problem(
        "SR-PATH-FORMAT",
        f"no format is called {format!r}",
        hint=f"formats that can be read: {', '.join(FORMATS)}",
    )

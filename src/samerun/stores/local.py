"""Local files: mapped read-only, fingerprinted to prove that nothing changed, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from samerun.errors import CorruptCheckpoint, Problem
from samerun.stores.guard import watch_map
from samerun.stores.remote import Buffer, RemoteFile, RemoteView, content_key, find_remote, find_view

SMALL_FILE_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
_MAX_MAPPED_FILES = 256
_MAX_LENT_BYTES = 64 << 20


def open_regular(path: Path) -> int:
    """Opens a regular file read-only and returns its descriptor; never blocks on a pipe or a device.

    Raises:
        CorruptCheckpoint: if the path is not a regular file.
        OSError: if it cannot be opened.
    """
    if find_remote(path) is not None:
        raise OSError(errno.EREMOTEIO, "an object of a store has no descriptor", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise CorruptCheckpoint(
        Problem(
            "SR-FILE-SPECIAL",
            "this is not an ordinary file",
            where={"file": str(path)},
            hint="a checkpoint holds ordinary files only; copy it again from where it was written",
        )
    )


class MappedFiles:
    """Read-only maps of files, opened on demand, the least recently used given up beyond a bound.

    A view into a map keeps that map alive, so giving one up never invalidates an array that was handed out.
    """

    def __init__(self, limit: int = _MAX_MAPPED_FILES) -> None:
        self._limit = limit
        self._maps: OrderedDict[Path, mmap.mmap | bytes] = OrderedDict()
        self._makers: dict[Path, Callable[[], bytes]] = {}
        self._lent: OrderedDict[Path, bytes] = OrderedDict()

    def lend(self, path: Path, make: Callable[[], bytes]) -> None:
        """Lets `map` return what `make` returns under a name that is no file's: bytes unpacked from one.

        They are made again when they were given up meanwhile; about 64 MiB are kept, and always the last ones.
        """
        self._makers.setdefault(path, make)

    def _made(self, path: Path) -> bytes:
        found = self._lent.pop(path, None)
        if found is None:
            found = self._makers[path]()
        self._lent[path] = found
        while len(self._lent) > 1 and sum(map(len, self._lent.values())) > _MAX_LENT_BYTES:
            self._lent.popitem(last=False)
        return found

    def range(self, path: Path, start: int, stop: int) -> memoryview:
        """Returns bytes `start` to `stop` of a file (up to its end) as a read-only buffer; of an object only those."""
        buffer = self.map(path)
        if isinstance(buffer, RemoteFile):
            return memoryview(buffer.view(start, min(stop, len(buffer))))
        return memoryview(buffer)[start:stop]

    def map(self, path: Path) -> Buffer:
        """Returns the whole file as a read-only buffer (an empty file as empty bytes).

        An object of a store can be sliced and searched only; `range` gives a part of it as a buffer.
        """
        if path in self._makers:
            return self._made(path)
        if (remote := find_remote(path)) is not None:
            return remote
        found = self._maps.get(path)
        if found is not None:
            self._maps.move_to_end(path)
            return found
        mapped = _map_file(path)
        self._maps[path] = mapped
        if len(self._maps) > self._limit:
            self._maps.popitem(last=False)
        return mapped

    def close(self) -> None:
        """Forgets every map; memory is returned once no array views it."""
        self._maps.clear()
        self._makers.clear()
        self._lent.clear()


def _map_file(path: Path) -> mmap.mmap | bytes:
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size == 0:
            return b""
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        watch_map(mapped, path)
        return mapped
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """What is remembered of one file. `content` hashes all of a small file, head and tail of a big one."""

    size_bytes: int
    modified_ns: int
    content: str


@dataclass(frozen=True, slots=True)
class TreeFingerprint:
    """Every file below a path, by its path relative to it (a single file is under its own name)."""

    root: str
    files: Mapping[str, FileFingerprint]

    @property
    def digest(self) -> str:
        """Returns `sha256:...` over names, sizes and contents; times are left out so that a copy compares equal."""
        body = hashlib.sha256()
        for name in sorted(self.files):
            found = self.files[name]
            body.update(f"{name}\0{found.size_bytes}\0{found.content}\n".encode("utf-8", "surrogateescape"))
        return f"sha256:{body.hexdigest()}"


def fingerprint_tree(path: str | os.PathLike[str]) -> TreeFingerprint:
    """Fingerprints a file, or every file below a directory, without following links out of it.

    Raises:
        OSError: if the path does not exist or cannot be read.
    """
    root = Path(path)
    if (view := find_view(root.absolute())) is not None:
        return _fingerprint_view(view)
    names = [root.name] if root.is_file() else sorted(_walk(root))
    base = root.parent if root.is_file() else root
    return TreeFingerprint(str(root), {name: _fingerprint_file(base / name) for name in names})


def _fingerprint_view(view: RemoteView) -> TreeFingerprint:
    """Asks the store again: what it says of every object's version stands for the content."""
    entries = view.entries()
    files = {name: FileFingerprint(entry.size_bytes, 0, content_key(entry)) for name, entry in entries.items()}
    return TreeFingerprint(view.url, files)


def _walk(root: Path) -> Iterator[str]:
    if not root.is_dir():
        raise FileNotFoundError(2, "no such file or directory", str(root))
    for folder, _, files in os.walk(root, followlinks=False):
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), root)


def _fingerprint_file(path: Path) -> FileFingerprint:
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        target = os.readlink(path) if stat.S_ISLNK(found.st_mode) else f"mode {found.st_mode:o}"
        return FileFingerprint(found.st_size, found.st_mtime_ns, hashlib.sha256(target.encode()).hexdigest())
    body = hashlib.sha256()
    with open(path, "rb") as file:
        if found.st_size <= SMALL_FILE_BYTES:
            body.update(file.read())
        else:
            body.update(file.read(SAMPLE_BYTES))
            file.seek(-SAMPLE_BYTES, os.SEEK_END)
            body.update(file.read())
    return FileFingerprint(found.st_size, found.st_mtime_ns, body.hexdigest())


def compare_trees(before: TreeFingerprint, after: TreeFingerprint) -> list[Problem]:
    """Returns one finding per file that appeared, disappeared or changed between two fingerprints of one path."""
    problems: list[Problem] = []
    for name in sorted({*before.files, *after.files}):
        old, new = before.files.get(name), after.files.get(name)
        if old != new:
            problems.append(_changed(name, before.root, old, new))
    return problems


def _changed(name: str, root: str, old: FileFingerprint | None, new: FileFingerprint | None) -> Problem:
    if old is None:
        what = "a file appeared"
    elif new is None:
        what = "a file disappeared"
    elif old.size_bytes != new.size_bytes:
        what = f"a file changed its size from {old.size_bytes} to {new.size_bytes} bytes"
    elif old.content != new.content:
        what = "a file changed its content"
    else:
        what = "a file was written again"
    return Problem(
        "SR-FILE-CHANGED",
        f"{what} while it had to stay as it was",
        where={"file": os.path.join(root, name) if name != os.path.basename(root) else root},
        hint="a disposable job may not write into the checkpoint it was started from: find what saved there",
    )


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Writes a file under a temporary name beside it, flushes it to disk, and renames it into place.

    Raises:
        OSError: if it cannot be written, with `path` as its file name; the old file, if there was one, is then still
            there.
    """
    import tempfile

    target = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(target)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise type(error)(error.errno, error.strerror, str(target)) from error
        raise

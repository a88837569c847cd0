"""Object stores and whatever else fsspec reaches: a checkpoint at a URL, read by ranges as if it lay here.

A view of a URL is a temporary directory with one file for every object. Objects up to `SMALL_FILE_BYTES`, and those
whose names say that they are text, are fetched whole. Of any other only a placeholder lies there, with its size, its
head and its tail; everything else of it is read by range when it is wanted. Placeholders are never read as if they were
the object: `MappedFiles` gives the object itself, and `open_regular` refuses them. Small reads go through a cache of
blocks; large ones into an unlinked temporary file that lives as long as the array made from it, so that memory stays
bounded whatever the size of a tensor.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from samerun.errors import CorruptCheckpoint, ExecutionError, Problem, UsageError

INCOMPLETE_NAME = "samerun-incomplete.json"  # of a destination in a store: it is not whole
SMALL_FILE_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
BLOCK_BYTES = 256 << 10
REQUEST_BYTES = 8 << 20
_MAX_BLOCKS = 128
_TEXT = (".json", ".jsonl", ".txt", ".yaml", ".yml", ".toml")
_MAX_OBJECTS = 100_000
_MAX_SMALL_BYTES = 1 << 30
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_VERSION_KEYS = ("ETag", "etag", "md5", "md5Hash", "crc32c", "VersionId", "generation", "ino")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "created")


def is_url(text: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL that fsspec may understand.

    >>> is_url("s3://bucket/step-100"), is_url("memory://ckpt"), is_url("/data/ckpt"), is_url("ckpt")
    (True, True, False, False)
    """
    return isinstance(text, str) and _URL.match(text) is not None


class RemoteFile:
    """One object, read by range: slices, `find` and `rfind` are those of bytes. Safe to use from several threads."""

    def __init__(self, url: str, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self.url, self._size, self._fetch = url, size, fetch
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self.read(0, self._size)

    def __getitem__(self, place: slice) -> bytes:
        start, stop, step = place.indices(self._size)
        if step != 1:
            raise ValueError("bytes of an object are read in order")
        return self.read(start, stop)

    def find(self, sub: bytes, start: int = 0, stop: int | None = None) -> int:
        """Returns where `sub` first lies, -1 if nowhere."""
        end = self._size if stop is None else min(stop, self._size)
        at = start
        while at < end:
            if (found := self.read(at, min(at + BLOCK_BYTES + len(sub) - 1, end)).find(sub)) >= 0:
                return at + found
            at += BLOCK_BYTES
        return -1

    def rfind(self, sub: bytes, start: int = 0, stop: int | None = None) -> int:
        """Returns where `sub` last lies, -1 if nowhere."""
        last = end = self._size if stop is None else min(stop, self._size)
        while end > start:
            first = max(start, end - BLOCK_BYTES)
            if (found := self.read(first, min(end + len(sub) - 1, last)).rfind(sub)) >= 0:
                return first + found
            end = first
        return -1

    def read(self, start: int, stop: int) -> bytes:
        """Returns bytes `start` to `stop` (half-open; up to the end of the object).

        Raises:
            CorruptCheckpoint: if the store gives fewer.
            ExecutionError: if they cannot be fetched.
        """
        stop = min(stop, self._size)
        if stop <= start:
            return b""
        if stop - start > BLOCK_BYTES:
            return self._request(start, stop)
        parts = [self._block(number) for number in range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)]
        first = start - start // BLOCK_BYTES * BLOCK_BYTES
        return b"".join(parts)[first : first + stop - start]

    def _block(self, number: int) -> bytes:
        with self._lock:
            if (found := self._blocks.get(number)) is not None:
                self._blocks.move_to_end(number)
                return found
        made = self._request(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self._size))
        with self._lock:
            self._blocks[number] = made
            while len(self._blocks) > _MAX_BLOCKS:
                self._blocks.popitem(last=False)
        return made

    def _request(self, start: int, stop: int) -> bytes:
        try:
            found = self._fetch(start, stop)
        except FileNotFoundError:
            raise CorruptCheckpoint(_gone(self.url)) from None
        except (OSError, ValueError) as error:
            raise ExecutionError(_unreadable(self.url, start, error)) from error
        if len(found) != stop - start:
            raise CorruptCheckpoint(_short(self.url, stop, start + len(found)))
        return found

    def view(self, start: int, stop: int) -> bytes | mmap.mmap:
        """Returns bytes `start` to `stop` as a buffer: in memory if they are few, else in a file that nobody sees."""
        if stop - start <= REQUEST_BYTES:
            return self.read(start, stop)
        with tempfile.TemporaryFile(prefix="samerun-range-") as file:
            for at in range(start, stop, REQUEST_BYTES):
                file.write(self._request(at, min(at + REQUEST_BYTES, stop)))
            file.flush()
            return mmap.mmap(file.fileno(), stop - start, access=mmap.ACCESS_READ)


Buffer = mmap.mmap | bytes | RemoteFile


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """What a store says of one object: its size, when it changed, and what names this version of it."""

    size_bytes: int
    modified: str
    version: str


class RemoteView:
    """A URL as a directory. `path` is where readers find it; it disappears when the view is closed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store, self._root, self._is_file = _connect(url)
        self._folder = Path(tempfile.mkdtemp(prefix="samerun-view-")).resolve()
        self.path = self._folder / (self._root.rstrip("/").rpartition("/")[2] or "root")
        self._files: list[Path] = []
        try:
            with _translated(url):
                self._fill()
        except BaseException:
            self.close()
            raise
        _views[self.path] = self

    def entries(self) -> dict[str, RemoteEntry]:
        """Asks the store what is there now, by path relative to the URL (a single object under its own name)."""
        self._store.invalidate_cache()
        if self._is_file:
            return {self.path.name: _entry(self._store.info(self._root))}
        found: Mapping[str, Any] = self._store.find(self._root, detail=True)
        if len(found) > _MAX_OBJECTS:
            raise UsageError(_too_much(self.url, f"{len(found)} objects"))
        prefix = self._root.strip("/")
        names = {name.strip("/")[len(prefix) :].strip("/"): info for name, info in found.items()}
        return {name: _entry(info) for name, info in names.items() if name and not name.endswith("/")}

    def _fill(self) -> None:
        entries = self.entries()
        if not entries:
            raise FileNotFoundError(2, "nothing is there", self.url)
        if unsafe := [name for name in entries if {"", ".", ".."} & set(name.split("/")) or "\0" in name]:
            raise UsageError(_strange(self.url, unsafe[0]))
        small = [name for name, entry in entries.items() if _is_small(name, entry.size_bytes)]
        if (total := sum(entries[name].size_bytes for name in small)) > _MAX_SMALL_BYTES:
            raise UsageError(_too_much(self.url, f"{total} bytes in small objects"))
        for name, entry in entries.items():
            self._place(name, entry.size_bytes)
        if self._is_file:
            self._place_marker()

    def _place_marker(self) -> None:
        """Puts what says that a single object is not whole beside it, as it lies in the store."""
        with suppress(FileNotFoundError):
            content = self._store.cat_file(f"{self._root}.{INCOMPLETE_NAME}")
            self.path.with_name(f"{self.path.name}.{INCOMPLETE_NAME}").write_bytes(content)

    def _place(self, name: str, size: int) -> None:
        remote = f"{self._root.rstrip('/')}/{name}" if not self._is_file else self._root
        local = self.path if self._is_file else self.path / name
        local.parent.mkdir(parents=True, exist_ok=True)
        if _is_small(name, size):
            local.write_bytes(self._fetch(remote, 0, size) if size else b"")
            return
        with open(local, "xb") as file:
            file.write(self._fetch(remote, 0, min(HEAD_BYTES, size)))
            tail = max(0, size - HEAD_BYTES)
            file.seek(tail)
            file.write(self._fetch(remote, tail, size))
        self._files.append(local)
        url = self.url if self._is_file else f"{self.url.rstrip('/')}/{name}"
        _files[local] = RemoteFile(url, size, lambda start, stop: self._fetch(remote, start, stop))

    def _fetch(self, remote: str, start: int, stop: int) -> bytes:
        return self._store.cat_file(remote, start=start, end=stop)

    def close(self) -> None:
        """Removes the directory."""
        _views.pop(self.path, None)
        for file in self._files:
            _files.pop(file, None)
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_small(name: str, size: int) -> bool:
    return size <= SMALL_FILE_BYTES or name.endswith(_TEXT)


_views: dict[Path, RemoteView] = {}
_files: dict[Path, RemoteFile] = {}


def find_remote(path: str | os.PathLike[str]) -> RemoteFile | None:
    """Returns the object that a placeholder stands for, None for an ordinary file."""
    return _files.get(Path(path)) if _files else None


def find_view(path: Path) -> RemoteView | None:
    """Returns the view that a path is in, None if it is in none."""
    return next((view for root, view in _views.items() if path == root or root in path.parents), None)


def original_name(path: str | os.PathLike[str]) -> str:
    """Returns the URL of what lies in a view; any other path as it is."""
    place = Path(path)
    view = find_view(place)
    if view is None:
        return str(path)
    rest = "" if place == view.path else f"/{place.relative_to(view.path)}"
    return f"{view.url.rstrip('/')}{rest}"


def content_key(entry: RemoteEntry) -> str:
    """Returns what stands for an object's content in a fingerprint: what the store says that its version is."""
    return hashlib.sha256(f"{entry.size_bytes}\0{entry.modified}\0{entry.version}".encode()).hexdigest()


def _entry(info: Mapping[str, Any]) -> RemoteEntry:
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "")
    modified = next((str(info[key]) for key in _TIME_KEYS if info.get(key) is not None), "")
    return RemoteEntry(int(info["size"]), modified, version)


def connect(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it.

    Raises:
        UsageError: if there is no driver for it, or it cannot be set up.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UsageError(_no_driver(url, "fsspec is not installed")) from None
    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(_no_driver(url, str(error))) from error


def _connect(url: str) -> tuple[Any, str, bool]:
    store, root = connect(url)
    with _translated(url):
        store.invalidate_cache()  # drivers remember listings, and another process may write there
        if not store.exists(root):
            if store.exists(f"{root}.{INCOMPLETE_NAME}"):
                raise CorruptCheckpoint(not_whole(url, INCOMPLETE_NAME))
            raise FileNotFoundError(2, "nothing is there", url)
        return store, root, bool(store.isfile(root))


@contextmanager
def _translated(url: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UsageError(
            Problem("SR-PATH-NONE", "there is nothing at this path", where={"file": url}, hint="check the path")
        ) from None
    except OSError as error:
        raise UsageError(_no_driver(url, str(error) or type(error).__name__)) from error


def not_whole(place: str, marker: str) -> Problem:
    """Returns the finding for what a conversion into a store has begun and not ended."""
    return Problem(
        "SR-REMOTE-INCOMPLETE",
        f"this destination of a conversion is not whole: {marker} lies there",
        where={"file": place},
        hint="the conversion still runs, or was killed: the same `samerun convert` command goes on with it. If it was "
        "copied from the store meanwhile, copy it again after that",
    )


def _no_driver(url: str, why: str) -> Problem:
    return Problem(
        "SR-REMOTE-OPEN",
        f"the store cannot be reached: {why}",
        where={"file": url},
        hint="pip install 'samerun[remote]' and the driver of this store (s3fs, gcsfs, adlfs, ...); credentials and "
        "endpoints are the driver's, from its environment variables",
    )


def _unreadable(url: str, at: int, error: Exception) -> Problem:
    return Problem(
        "SR-REMOTE-READ",
        f"the store did not give the bytes from {at} on: {error}",
        where={"file": url},
        hint="the network or the store failed; run the same command again",
    )


def _short(url: str, wanted: int, found: int) -> Problem:
    return Problem(
        "SR-FILE-TRUNCATED",
        "an object ends before the values that were to be read",
        where={"file": url},
        expected=f"at least {wanted} bytes",
        found=f"{found} bytes",
        hint="it was replaced while it was read, or the store does not honour ranges",
    )


def _gone(url: str) -> Problem:
    return Problem(
        "SR-FILE-CHANGED",
        "an object disappeared while it was read",
        where={"file": url},
        hint="something removed or replaced the checkpoint meanwhile",
    )


def _too_much(url: str, what: str) -> Problem:
    return Problem(
        "SR-REMOTE-LARGE",
        f"too much lies below this URL to be looked through: {what}",
        where={"file": url},
        hint="give the URL of one checkpoint, not of a whole run or bucket",
    )


def _strange(url: str, name: str) -> Problem:
    return Problem(
        "SR-REMOTE-NAME",
        f"an object's name cannot be that of a file: {name!r}",
        where={"file": url},
        hint="no framework writes such names; copy the checkpoint without it",
    )

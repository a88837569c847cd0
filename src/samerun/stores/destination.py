"""A destination in an object store: objects that appear one by one, under a marker that goes last.

A store cannot rename. So the first object of a destination says that it is not whole (`samerun-incomplete.json`; for a
single object `<name>.samerun-incomplete.json` beside it), and is removed when everything was read back. Whoever opens a
checkpoint looks for it. `docs/adr/0006` says why, and what a kill leaves.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samerun.errors import ExecutionError, Problem, UsageError
from samerun.stores.remote import INCOMPLETE_NAME, connect

INCOMPLETE_SCHEMA = "samerun/convert-incomplete/1"
PART_BYTES = 5 << 20  # S3 takes no smaller part than this, but for the last
_MOST_PARTS = 9_000  # of an object; S3 takes 10,000
_MIB = 1 << 20


def incomplete_marker(path: Path) -> Path | None:
    """Returns the file that says that a checkpoint is not whole: in the directory, or beside the file. None if none."""
    path = path.absolute()  # `.` has no name of its own
    places = (path / INCOMPLETE_NAME, path.parent / f"{path.name}.{INCOMPLETE_NAME}")
    return next((place for place in places if place.is_file()), None)


def part_bytes(size: int) -> int:
    """Returns how large the parts of an object of so many bytes are.

    >>> part_bytes(1 << 30), part_bytes(1 << 40)
    (5242880, 122683392)
    """
    return max(PART_BYTES, -(-size // (_MOST_PARTS * _MIB)) * _MIB)


class StoredPlace:
    """Where a destination is to lie in a store: a prefix, or with `single_file` one object.

    Args:
        url: as the user gave it.

    Raises:
        UsageError: if the store cannot be reached, or the URL is no name for a destination.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store, self._root = connect(self.url)
        self._root = self._root.rstrip("/")
        self.single_file = False
        if getattr(self._store, "local_file", False):
            raise UsageError(_refused(url, "this URL is a path on this machine", "give the path itself"))
        bucket, _, key = self._root.strip("/").partition("/")
        self._has_folders = self._root.startswith("/")
        if not bucket or (not key and not self._has_folders):
            raise UsageError(_refused(url, "a bucket is no name for a destination", "give a prefix in it"))
        with _store_speaks(url):
            if not self._has_folders and not self._store.exists(bucket):
                raise UsageError(_refused(url, f"there is no bucket {bucket!r}", "samerun makes no buckets"))

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last component of the URL."""
        return self._root.rpartition("/")[2]

    def beside(self, name: str) -> str:
        """Returns the URL of the marker or the proof: in the destination, or beside it where that is one object."""
        return f"{self.url}.{name}" if self.single_file else f"{self.url}/{name}"

    def is_within(self, url: str) -> bool:
        """Whether this place lies in what is at another URL, or that in this."""
        store, root = connect(url)
        mine, other = f"{self._root}/", f"{root.rstrip('/')}/"
        return store == self._store and (mine.startswith(other) or other.startswith(mine))

    # --- objects --------------------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Returns the size of every object here, by its name below the prefix; a single object is `""`.

        Marker and proof are among them under their own names.
        """
        own = (INCOMPLETE_NAME, "samerun-proof.json")
        with _store_speaks(self.url):
            self._store.invalidate_cache()
            found: dict[str, Any] = {}
            with suppress(FileNotFoundError):
                found = self._store.find(self._root, detail=True)
            if self.single_file:
                for name in own:
                    with suppress(FileNotFoundError):
                        found[f"{self._root}/{name}"] = self._store.info(f"{self._root}.{name}")
        prefix = self._root.strip("/")
        names = {path.strip("/")[len(prefix) :].strip("/"): int(info["size"] or 0) for path, info in found.items()}
        return {name: size for name, size in names.items() if size or not name.endswith("/")}

    def read_marker(self) -> Mapping[str, Any] | None:
        """Returns what the marker says; None if there is none, an empty one if it is not ours."""
        with _store_speaks(self.url):
            try:
                content = self._store.cat_file(self._at(INCOMPLETE_NAME))
            except FileNotFoundError:
                return None
        with suppress(ValueError):
            body = json.loads(content)
            if isinstance(body, dict) and body.get("schema") == INCOMPLETE_SCHEMA:
                return body
        return {}

    def write_own(self, name: str, body: Mapping[str, Any]) -> None:
        """Writes the marker or the proof."""
        with _store_speaks(self.url):
            if self._has_folders:
                self._store.makedirs(self._store._parent(self._at(name)), exist_ok=True)
            self._store.pipe_file(self._at(name), (json.dumps(body, indent=1, default=str) + "\n").encode())

    def upload(self, name: str, size: int, parts: Iterable[bytes | bytearray]) -> None:
        """Writes one object, part by part, in order. It appears when all of it has arrived.

        Raises:
            ExecutionError: if the store does not take it; what it took of it is thrown away.
            Exception: whatever `parts` raises, likewise.
        """
        path = self._object(name)
        with _store_speaks(self.url):
            if self._has_folders:
                self._store.makedirs(self._store._parent(path), exist_ok=True)
            file = self._store.open(path, "wb", block_size=part_bytes(size))
        try:
            for part in parts:
                with _store_speaks(self.url):
                    file.write(part)
            with _store_speaks(self.url):
                file.close()
        except BaseException:
            _abandon(file)
            raise

    def remove(self, names: Collection[str]) -> None:
        """Removes objects, and uploads to their names that were never finished."""
        self.abandon_uploads(names)
        with _store_speaks(self.url):
            for name in names:
                with suppress(FileNotFoundError):
                    self._store.rm_file(self._object(name))
            self._store.invalidate_cache()

    def remove_own(self, name: str) -> None:
        """Removes the marker or the proof, and the folder if it was the last in one."""
        with _store_speaks(self.url), suppress(FileNotFoundError):
            self._store.rm_file(self._at(name))
        if self._has_folders and not self.single_file:
            with suppress(OSError):  # something is in it
                self._store.rmdir(self._root)

    def abandon_uploads(self, names: Collection[str]) -> None:
        """Ends uploads of several parts that a killed process left open: nobody sees them, but they are paid for."""
        pending, end = (getattr(self._store, name, None) for name in ("list_multipart_uploads", "abort_mpu"))
        if pending is None or end is None:
            return
        bucket = self._root.partition("/")[0]
        keys = {self._object(name).partition("/")[2] for name in names}
        with _store_speaks(self.url):
            for upload in pending(bucket):
                if upload["Key"] in keys:
                    end(bucket, upload["Key"], upload["UploadId"])

    def _object(self, name: str) -> str:
        return self._root if self.single_file else f"{self._root}/{name}"

    def _at(self, name: str) -> str:
        return f"{self._root}.{name}" if self.single_file else f"{self._root}/{name}"


def _abandon(file: Any) -> None:
    """Throws away what was written of an object. Closing it, which its destructor does too, would make it appear."""
    with suppress(Exception):  # the driver's own trouble is no news beside the error that led here
        file.discard()
    with suppress(AttributeError):
        file.closed = True


@contextmanager
def _store_speaks(url: str) -> Generator[None]:
    """Turns whatever a driver raises into an ExecutionError: each passes on exceptions of its own library."""
    try:
        yield
    except (FileNotFoundError, UsageError, ExecutionError):
        raise
    except Exception as error:
        raise ExecutionError(
            Problem(
                "SR-REMOTE-WRITE",
                f"the store did not do what was asked: {error or type(error).__name__}",
                where={"file": url},
                hint="no reader of samerun takes what lies there for whole. The same command goes on where it was, "
                "once the store answers and lets you write",
            )
        ) from error


def _refused(url: str, message: str, hint: str) -> Problem:
    return Problem("SR-REMOTE-DEST", message, where={"file": url}, hint=hint)

"""What has been done of a conversion, line by line, so that a killed one goes on where it was.

Each line is the CRC32 of its text in hexadecimal, a space, and a JSON document. A line that was cut off, and everything
behind a line that does not agree with its checksum, counts as not written. What a line says was done is in the page
cache, or on the disk: after a restart of the machine (another boot id) only the disk counts, so a journal of an earlier
boot is not used. Nothing depends on the journal being right: what was written is read back before it is committed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

SCHEMA = "samerun/convert-journal/1"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Segment = tuple[int, int, int, int]  # file number, first byte, number of bytes, CRC32


def boot_id() -> str:
    """Returns what names this run of the machine; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(slots=True)
class Done:
    """What a journal says: its header, the units that were written with their checksums, and the stage reached.

    `num_bytes` is how much of the file can be trusted; what comes behind is cut off before anything is appended.
    """

    header: Mapping[str, Any] = field(default_factory=dict[str, Any])
    units: dict[int, list[Segment]] = field(default_factory=dict[int, list[Segment]])
    stage: str = ""
    num_bytes: int = 0


def read_journal(file: Path) -> Done:
    """Reads a journal as far as it can be trusted. Raises OSError if there is none."""
    done = Done()
    for line in file.read_bytes().split(b"\n")[:-1]:
        entry = _parse(line)
        if entry is None:
            break
        done.num_bytes += len(line) + 1
        if "unit" in entry:
            done.units[int(entry["unit"])] = [(int(a), int(b), int(c), int(d)) for a, b, c, d in entry["crc"]]
        elif "stage" in entry:
            done.stage = str(entry["stage"])
        else:
            done.header = entry
    return done


def _parse(line: bytes) -> dict[str, Any] | None:
    checksum, space, text = line.partition(b" ")
    try:
        if not space or int(checksum, 16) != zlib.crc32(text):
            return None
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


class Journal:
    """An open journal; lines are appended whole. Safe to use from several threads."""

    def __init__(self, file: Path, keep_bytes: int = 0) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._held = [self._file]
        self._lock = Lock()
        os.ftruncate(self._file, keep_bytes)

    def start(self, header: Mapping[str, Any]) -> None:
        """Writes who the journal is for, as its first line."""
        self._append({"schema": SCHEMA, **header})
        os.fsync(self._file)

    def unit(self, number: int, segments: list[Segment]) -> None:
        """Notes that a unit's bytes were written, with the checksums of those that one is wanted of."""
        self._append({"unit": number, "crc": segments})

    def stage(self, name: str) -> None:
        """Notes that a stage was reached, on the disk."""
        self._append({"stage": name})
        os.fsync(self._file)

    def _append(self, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()
        line = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
        with self._lock:
            while line:  # a write that was cut short leaves a broken line: continue it
                line = line[os.write(self._file, line) :]

    def hold(self, descriptor: int) -> None:
        """Keeps another descriptor open (a lock) for as long as the journal is."""
        self._held.append(descriptor)

    def close(self) -> None:
        """Closes the file and what was held with it."""
        while self._held:
            os.close(self._held.pop())

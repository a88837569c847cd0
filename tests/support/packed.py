"""Golden checkpoints that are kept packed, since what frameworks write around small tensors is mostly air."""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path


def pack(folder: Path, archive: Path) -> None:
    """Packs a directory; the same files give the same bytes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as written:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
                entry.size = path.stat().st_size
                written.addfile(entry, io.BytesIO(path.read_bytes()))
    archive.write_bytes(lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def unpack(archive: Path, to: Path) -> Path:
    """Unpacks an archive of `pack` into a folder that may exist, and returns the directory that was packed."""
    with tarfile.open(archive, "r:xz") as packed:
        packed.extractall(to, filter="data")
    return to / archive.name.removesuffix(".tar.xz")


def packed_in(folder: Path) -> list[str]:
    """Returns the names of what lies packed in a folder."""
    return sorted(path.name.removesuffix(".tar.xz") for path in folder.glob("*.tar.xz"))

"""Items written through a stream extension: undoes zstd where a module for it is there, refuses everything else.

torch 2.7 and later can compress items (`torch.distributed.checkpoint._extension`, descriptor `stream.zstd/1`).
An item is then one zstd frame around the same small archive; its length in the metadata is that of the frame.
"""

from __future__ import annotations

import importlib
import io
import re
from types import ModuleType
from typing import Any

_ZSTD = re.compile(r"stream\.zstd(?:@[\w.-]+)?/1(?:\.\d+)*")
_MODULES = ("compression.zstd", "zstandard", "pyzstd")  # the standard library's from Python 3.14 on
_SLACK_BYTES = 1 << 20
_MAX_OBJECT_BYTES = 256 << 20


def is_zstd(transforms: tuple[str, ...]) -> bool:
    """Whether an item went through zstd and nothing else."""
    return len(transforms) == 1 and _ZSTD.fullmatch(transforms[0]) is not None


def find_zstd() -> ModuleType | None:
    """Returns the first module for zstd that is installed, None if none is."""
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def largest_item_bytes(value_bytes: int | None) -> int:
    """Returns the most bytes that the archive of a tensor with these many bytes can take; of an object without."""
    return _MAX_OBJECT_BYTES if value_bytes is None else value_bytes + _SLACK_BYTES


def unpack(module: ModuleType, packed: bytes | memoryview, most_bytes: int) -> bytes | None:
    """Returns the bytes inside one zstd frame, None if they are more than `most_bytes` or the frame is damaged."""
    source = io.BytesIO(packed)
    stream: Any = (
        module.ZstdDecompressor().stream_reader(source) if module.__name__ == "zstandard" else module.ZstdFile(source)
    )
    try:
        with stream:
            found = _read(stream, most_bytes + 1)
    except (OSError, EOFError, ValueError, MemoryError, getattr(module, "ZstdError", OSError)):
        return None
    return found if len(found) <= most_bytes else None


def _read(stream: Any, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = most_bytes
    while left > 0 and (part := stream.read(min(left, _SLACK_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)

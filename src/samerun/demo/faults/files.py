"""Faults of the checkpoint's files, as when they are copied to the new machines."""

from __future__ import annotations

import shutil
from pathlib import Path

from samerun.demo.faults.catalog import Kind, in_files


@in_files("shard-missing", Kind.FILES, "SR-FILE-MISSING")
def lose_shard(checkpoint: Path) -> str:
    """One rank's shard was never copied."""
    shard = _shards(checkpoint)[-1]
    shutil.move(shard, checkpoint.parent / f"lost-{shard.name}")
    return f"{shard.name} taken away"


@in_files("shard-truncated", Kind.FILES, "SR-FILE-TRUNCATED")
def truncate_shard(checkpoint: Path) -> str:
    """The copy of a shard ended one byte early."""
    shard = _shards(checkpoint)[-1]
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1)
    return f"{shard.name} cut from {size} to {size - 1} bytes"


@in_files("shards-swapped", Kind.FILES, "SR-FILE-MISMATCH", "SR-FILE-TRUNCATED", "SR-FILE-ITEM")
def swap_shards(checkpoint: Path) -> str:
    """Two ranks' shards changed names."""
    first, second = _shards(checkpoint)[:2]
    aside = checkpoint / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return f"{first.name} and {second.name} exchanged"


@in_files("shard-stale", Kind.FILES, "SR-SIDECAR-FILE", "SR-SIDECAR-VALUE", "SR-FILE-GENERATION")
def bring_back_a_shard(checkpoint: Path) -> str:
    """One rank's shard is the one of an earlier save."""
    earlier = next(
        path for path in sorted(checkpoint.parents[3].glob("checkpoints/step-*")) if path.name != checkpoint.name
    )
    shard = _shards(earlier)[0]
    shutil.copy2(shard, checkpoint / shard.name)
    return f"{shard.name} is that of {earlier.name}"


@in_files("shard-corrupt", Kind.FILES, "SR-FILE-CRC")
def flip_bit(checkpoint: Path) -> str:
    """One bit of one tensor changed on disk; torch loads it without a word."""
    from samerun.formats.detect import open_checkpoint

    opened = open_checkpoint(checkpoint)
    key, entry = max(opened.state.tensors.items(), key=lambda item: (item[1].key.role == "param", item[1].num_bytes))
    extent = opened.locate(key, len(entry.tiling) - 1)
    opened.close()
    offset = extent.offset_bytes + extent.num_bytes // 2
    with extent.file.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
    return f"one bit of {key} flipped, at byte {offset} of {extent.file.name}"


@in_files("metadata-missing", Kind.FILES, "SR-META-MISSING")
def lose_metadata(checkpoint: Path) -> str:
    """The save ended before its metadata was written."""
    shutil.move(checkpoint / ".metadata", checkpoint.parent / "lost-metadata")
    return ".metadata taken away"


def _shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.distcp"))

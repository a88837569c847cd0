"""FullyShardedDataParallel (FSDP1) state saved per rank: sharded, or local with its flat parameters."""

from samerun.formats.fsdp1.reader import open_fsdp1

__all__ = ["open_fsdp1"]

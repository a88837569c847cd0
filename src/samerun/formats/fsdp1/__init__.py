"""FullyShardedDataParallel (FSDP1) state saved per rank: sharded, or local with its flat parameters."""

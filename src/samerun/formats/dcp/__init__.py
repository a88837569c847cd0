"""torch.distributed.checkpoint directories: `.metadata` (or `__N.metadata`) and `.distcp` files."""

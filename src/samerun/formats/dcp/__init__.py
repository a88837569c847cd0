"""torch.distributed.checkpoint directories: `.metadata` (or `__N.metadata`) and `.distcp` files."""

from samerun.formats.dcp.reader import DcpCheckpoint, open_dcp

__all__ = ["DcpCheckpoint", "open_dcp"]

"""Lightning checkpoints: `.ckpt` files, and directories that its sharded strategies write."""

from samerun.formats.lightning.reader import open_lightning

__all__ = ["open_lightning"]

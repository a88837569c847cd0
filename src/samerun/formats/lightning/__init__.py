"""Lightning checkpoints: `.ckpt` files, and directories that its sharded strategies write."""

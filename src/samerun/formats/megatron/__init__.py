"""Megatron-LM distributed checkpoints (torch_dist): DCP directories with encodings of their own on top."""

"""Megatron-LM checkpoints of one torch.save file per model-parallel rank (`--ckpt-format torch`)."""

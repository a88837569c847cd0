"""What DeepSpeed's native and universal checkpoints have in common: file names, state files, parallel layouts."""

"""DeepSpeed's universal checkpoints: one folder per parameter, one file per slot, and copies of the model files."""

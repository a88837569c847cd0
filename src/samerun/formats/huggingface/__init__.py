"""Hugging Face checkpoints: those of Trainer, and exports of `save_pretrained`."""

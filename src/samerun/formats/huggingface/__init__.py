"""Hugging Face checkpoints: those of Trainer, and exports of `save_pretrained`."""

from samerun.formats.huggingface.reader import open_huggingface

__all__ = ["open_huggingface"]

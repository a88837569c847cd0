"""What all formats built on saved state dicts share: from nested values with tensors in files to logical state.

Not a format itself. The readers of single torch.save files, of one file per rank, of Hugging Face, Accelerate and
Lightning checkpoints each gather a `SavedState`; `assemble` makes logical state of it, the same way for all.
"""

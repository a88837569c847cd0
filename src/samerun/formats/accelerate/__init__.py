"""Directories that Accelerate's `save_state` wrote."""

from samerun.formats.accelerate.reader import open_accelerate

__all__ = ["open_accelerate"]

"""safetensors files: one, several with an index, one per saving rank, or samerun's own export."""

from samerun.formats.safetensors.reader import open_safetensors

__all__ = ["open_safetensors"]

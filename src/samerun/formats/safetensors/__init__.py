"""safetensors files: one, several with an index, one per saving rank, or samerun's own export."""

"""Directories that Accelerate's `save_state` wrote."""

"""Checks: the structure of a checkpoint, its load, its updates, and the verdict."""

"""Checkpoint formats: one package each, none importing another. `detect.open_checkpoint` chooses."""

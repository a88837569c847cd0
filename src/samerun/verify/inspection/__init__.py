"""Whether a checkpoint is whole, and what a resume from it has and lacks."""

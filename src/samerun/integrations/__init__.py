"""Thin bridges from trainers to `samerun.train.Recorder`. Each module imports its own framework; this one imports none."""

"""Thin bridges from trainers to `samerun.train.Recorder`, each of which imports its framework."""

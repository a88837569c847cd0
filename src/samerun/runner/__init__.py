"""Runs the stages of a migration: launches the user's own job, keeps what it recorded, stops at the first failure."""

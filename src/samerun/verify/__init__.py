"""Checks: a job, a load, an evaluation, updates and samples against what they must be; and the verdict."""

"""Hostile checkpoints: each idea as a function that builds it, with what it does elsewhere and what stops it here.

`python -m attacks` from the repository root prints the table in README.md. `tests/attacks` runs every one of them in a
process with little memory and little time.
"""

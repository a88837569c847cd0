"""samerun: move a training run onto another GPU count or parallel layout, and prove that it is the same run.

Importing this package imports neither torch nor NumPy. The parts that a trainer imports live in `samerun.train`.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]

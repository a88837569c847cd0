"""Lines of traces made by hand."""

from __future__ import annotations

from typing import Any


def empty_state(update: int, **changes: Any) -> dict[str, Any]:
    """Returns the "state" line of a job that holds nothing."""
    objects = ("tensors", "counters", "objects", "rng")
    lists = ("groups", "optimizers", "learning_rates", "broken_ties", "disagreements")
    plain = {"when": "loaded", "update": update, "world_size": 1, "layout": None, "state": "00" * 8}
    plain |= {"scheduler": None, "config": None}
    return {**plain, **{name: {} for name in objects}, **{name: [] for name in lists}, **changes}

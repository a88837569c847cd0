"""Averages that were saved in the model's place: mmengine's EMAHook swaps the two when it saves (mmengine 0.10.7).

`state_dict` then holds the averages, so that they can be deployed, and `ema_state_dict` the weights that are trained,
under `module.` and beside a count `steps`. `Runner.resume` swaps them back; nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samerun.errors import Problem, Severity

MODEL, AVERAGE = "state_dict", "ema_state_dict"
_PREFIX = "module."


def swap_back(tree: Any) -> tuple[Any, Problem | None]:
    """Returns a saved state with weights and averages where their names say, and a note if they were not."""
    if not isinstance(tree, dict):
        return tree, None
    meta, model, average = (tree.get(name) for name in ("meta", MODEL, AVERAGE))
    ours = isinstance(meta, Mapping) and "mmengine_version" in meta
    if not ours or not isinstance(model, Mapping) or not isinstance(average, Mapping):
        return tree, None
    trained = {str(name).removeprefix(_PREFIX): item for name, item in average.items() if str(name).startswith(_PREFIX)}
    if not trained.keys() <= model.keys():
        return tree, None
    counts = {f"{AVERAGE}.{name}": item for name, item in average.items() if not str(name).startswith(_PREFIX)}
    sorted_out = {
        **{name: item for name, item in tree.items() if name != AVERAGE},
        MODEL: {name: trained.get(name, item) for name, item in model.items()},
        AVERAGE: {name: model[name] for name in trained},
        **counts,
    }
    return sorted_out, Problem(
        "SR-EMA-SWAPPED",
        "mmengine saved the average as `state_dict` and the trained weights as `ema_state_dict`; they are read as that",
        severity=Severity.NOTE,
        where={"key": AVERAGE},
        expected=f"the average in {AVERAGE}",
        found=f"the average in {MODEL}",
        hint="mmengine's own resume swaps them back. Whatever else loads `state_dict` goes on from the average, with "
        "the moments of the trained weights",
    )

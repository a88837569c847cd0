"""The fixed-example evaluation of a job, and the proof that it changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samerun.train.values import array, numbers

if TYPE_CHECKING:
    from torch import nn

LARGEST_LOGITS = 1 << 22  # elements kept of an evaluation's logits


def evaluate_fixed(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    objects: Mapping[str, Any],
    function: Callable[[], Mapping[str, Any]],
    *,
    folder: Path | None,
    number: int,
) -> dict[str, Any]:
    """Runs `function` in evaluation mode without gradients; returns the "eval" line without its update. Collective.

    Args:
        model: the model, or this rank's pipeline stages.
        optimizer: one or several optimizers.
        objects: whatever else must be the same afterwards.
        function: as for `Recorder.evaluate`.
        folder: where logits are kept, on the one rank that keeps them; None on the others.
        number: counts the evaluations of this job, from 0.
    """
    from samerun.train.activations import watch_modules
    from samerun.train.purity import evaluating, fingerprint

    before = fingerprint(model, optimizer, objects)
    with evaluating(model), watch_modules(model) as outputs:
        result = function()
    after = fingerprint(model, optimizer, objects)
    losses = numbers(result["losses"])
    tensors, rng = before.changed_tensors(after), before.changed_rng(after)
    logits = result.get("logits")
    return {
        "num_examples": len(losses),
        "losses": losses,
        "logits": None if logits is None else _keep_logits(logits, folder, number),
        "state_unchanged": not tensors,
        "rng_unchanged": not rng,
        "changed": [*tensors, *rng],
        "modules": outputs.rows() if folder is not None else None,
        "details": outputs.details() if folder is not None else None,
    }


def _keep_logits(logits: Any, folder: Path | None, number: int) -> dict[str, Any] | None:
    import numpy as np

    values = array(logits)
    if folder is None:
        return None
    stride = max(1, -(-values.size // LARGEST_LOGITS))
    kept = np.ascontiguousarray(values.reshape(-1)[::stride]) if stride > 1 else values
    name = f"eval-{number:03d}-logits.npy"
    np.save(folder / name, kept)
    return {"file": name, "shape": list(values.shape), "stored_elements": int(kept.size), "stride": stride}

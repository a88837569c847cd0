"""What the recorder's lines say: the header of a trace, and an update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samerun.core.idset import ids_digest
from samerun.core.mesh import Layout
from samerun.errors import Problem, UsageError
from samerun.trace import SCHEMA
from samerun.train.values import number

if TYPE_CHECKING:
    from torch import nn

    from samerun.train.steps import StepFacts


def misuse(message: str, hint: str, **where: Any) -> UsageError:
    """Returns the error for a recorder that is called in a way that makes no sense (SR-REC-USE)."""
    return UsageError(Problem("SR-REC-USE", message, where=where, hint=hint))


def read_layout(layout: Layout | Mapping[str, int] | str | None) -> Layout | None:
    """Returns the layout that a script declares. Raises UsageError (SR-REC-USE) for one that makes no sense."""
    if layout is None or isinstance(layout, Layout):
        return layout
    try:
        return Layout.parse(layout) if isinstance(layout, str) else Layout.from_dict(layout)
    except ValueError as error:
        raise UsageError(
            Problem(
                "SR-REC-USE",
                f"attach was given an unusable layout: {error}",
                hint="name ranks along each axis, such as tp=2,dp_shard=4",
                found=repr(layout),
            )
        ) from None


def header_line(
    model: nn.Module | Sequence[nn.Module],
    *,
    stage: str | None,
    place: tuple[int, int],
    declared: Layout | None,
    batch: Mapping[str, Any] | None,
    sampler: Any,
) -> dict[str, Any]:
    """Returns the header of this rank's trace. `place` is (rank, world size)."""
    from samerun.train.environment import dealt_batch, environment, observed_coordinate, observed_layout, versions

    layout = observed_layout(model, declared)
    return {
        "schema": SCHEMA,
        "stage": stage,
        "rank": place[0],
        "world_size": place[1],
        "coordinate": observed_coordinate(model, layout),
        "layout": layout,
        "declared_layout": declared.to_dict(short=True) if declared else None,
        "batch": dict(batch) if batch is not None else dealt_batch(sampler),
        "versions": versions(),
        "environment": environment(model),
    }


def update_line(
    update: int,
    facts: StepFacts,
    *,
    loss: Any,
    grad_norm: Any,
    sample_ids: Sequence[int | str],
    samples: int | None,
    tokens: int | None,
    keep_ids: bool,
    seconds: float,
    inputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns one update as this rank records it; arguments as for `Recorder.record`."""
    loss_value = None if loss is None else number(loss)
    norm = facts.grad_norm if grad_norm is None else number(grad_norm)
    ids = [item if isinstance(item, str) else int(item) for item in sample_ids]
    body = {
        "update": int(update),
        "loss": loss_value,
        "grad_norm": norm,
        "step_norm": facts.step_norm,
        "update_norm": facts.update_norm,
        "lr": list(facts.lr),
        "loss_scale": facts.loss_scale,
        "skipped": facts.steps == 0,
        "samples": len(ids) if samples is None else int(samples),
        "tokens": None if tokens is None else int(tokens),
        "sample_ids": ids if keep_ids else [],
        "ids_digest": ids_digest(ids),
        "finite": all(value is None or math.isfinite(value) for value in (loss_value, norm, facts.update_norm)),
        "deltas": facts.deltas,
        "steps": facts.steps,
        "seconds": round(seconds, 4),
    }
    if inputs is not None:
        body["inputs"] = dict(inputs)
    if facts.moved is None:
        return body
    body |= {"moved": facts.moved, "gradients": before_clipping(facts.gradients, norm)}
    return {**body, "moved_direction": facts.moved_direction, "gradients_direction": facts.gradients_direction}


def before_clipping(gradients: Mapping[str, float] | None, norm: float | None) -> dict[str, float] | None:
    """Returns each gradient's norm as it was before the whole gradient, then of L2 norm `norm`, was clipped.

    Clipping by the global norm shortens every gradient by one factor, which is what the whole one now lacks. What is
    not shorter was not clipped.
    """
    if gradients is None:
        return None
    whole = math.hypot(*gradients.values())
    usable = norm is not None and math.isfinite(norm) and 0 < whole < norm
    factor = norm / whole if norm is not None and usable else 1.0
    return {name: value * factor for name, value in gradients.items()}

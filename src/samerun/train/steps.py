"""What an optimizer step really did, seen through the optimizer's own public hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samerun.train.norms import ParameterNorms, add_over_ranks
from samerun.train.settings import learning_rates

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One update as the optimizer made it. Norms are None where they were not measured.

    `lr` is what the step used, per group. `steps` counts optimizer steps since the last update: 0 if a loss scaler
    skipped it. `grad_norm` is what was told before the step, or that of the gradients which the step used;
    `step_norm` is always the latter, after any clipping. `gradients` are the norms by parameter, in the first measured
    update: before clipping if they were measured then, else as the step used them. None where an optimizer keeps the
    gradients itself. `moved_direction` and `gradients_direction` say there which way each change and gradient points:
    its projections (`samerun.train.sketch`) over its norm.
    """

    lr: tuple[float, ...]
    loss_scale: float | None
    steps: int
    grad_norm: float | None
    update_norm: float | None
    deltas: dict[str, float]
    moved: dict[str, float] | None
    gradients: dict[str, float] | None
    step_norm: float | None = None
    moved_direction: dict[str, list[float]] | None = None
    gradients_direction: dict[str, list[float]] | None = None


class StepWatch:
    """Watches the steps of one or several optimizers.

    Args:
        optimizers: torch optimizers.
        scaler: gradient scaler, if any.
        norms: the parameters.
        detail: says, before each step, whether to measure norms.
        ends: called after the step that ends an update: every optimizer has then stepped.
    """

    def __init__(
        self,
        optimizers: list[Any],
        scaler: Any,
        norms: ParameterNorms,
        detail: Callable[[], bool],
        ends: Callable[[], None],
    ) -> None:
        self._optimizers = optimizers
        self._scaler = scaler
        self._detail = detail
        self._ends = ends
        self.restart(norms)
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]

    def restart(self, norms: ParameterNorms) -> None:
        """Watches these parameters from now on, and forgets steps made before, such as an empty one before loading."""
        self._norms = norms
        self._watched = norms.watched()
        self._all_next = True
        self.reset()

    def reset(self) -> None:
        """Forgets steps made since the last update."""
        self._steps = 0
        self._before: dict[str, torch.Tensor] | None = None
        self._gradient: torch.Tensor | None = None
        self._used: torch.Tensor | None = None
        self._sketch: torch.Tensor | None = None
        self._quiet: dict[str, torch.Tensor] = {}
        self._told_norm: float | None = None
        # What a step made now would use. The scheduler and the scaler may have moved on when the update is recorded.
        self._lr = tuple(learning_rates(self._optimizers))
        self._loss_scale = None if self._scaler is None else float(self._scaler.get_scale())
        self._num_skipped = _num_skipped(self._scaler)

    @property
    def skipped(self) -> bool:
        """Whether the scaler met infinities and skipped the update: no step came, and the loss scale fell.

        A scaler that does not lower its scale at once says how many it skipped, as `num_skipped`.
        """
        if self._loss_scale is None or self._steps:
            return False
        return float(self._scaler.get_scale()) < self._loss_scale or _num_skipped(self._scaler) > self._num_skipped

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def note_gradient(self, norm: float | None) -> None:
        """Takes the norm of the update's gradient as told, or, for None, as it is now where norms are measured."""
        import torch

        self._told_norm = norm
        if norm is None and self._detail():
            with torch.no_grad():
                self._gradient = self._norms.squared_gradient()

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        import torch

        computes = len(arguments) > 1 or named.get("closure") is not None  # the gradient, within the step
        self._lr = tuple(learning_rates(self._optimizers))
        if self._before is None and self._detail():
            names = self._norms.names if self._all_next else self._norms.trainable
            with torch.no_grad():
                self._before = self._norms.copy(names)
                if not computes:
                    self._measure_used()
                    assert self._used is not None
                    names = self._norms.names if self._all_next else self._watched
                    self._quiet = self._norms.quiet(names, add_over_ranks(self._used.clone()))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        import torch

        self._steps += 1
        if self._before is not None and self._used is None:
            with torch.no_grad():
                self._measure_used()
        if self._steps == len(self._optimizers):
            self._ends()

    def _measure_used(self) -> None:
        """Measures the gradient as the step uses it. Clipping by the global norm leaves its direction as it was."""
        self._used = self._norms.squared_gradient()
        self._sketch = self._norms.sketch_gradients() if self._all_next else None

    def _gradient_norm(self, squared: float) -> float | None:
        """Returns the norm that was told, that which an optimizer tells, or that of the parameters' gradients."""
        if self._told_norm is not None:
            return self._told_norm
        for optimizer in self._optimizers:
            norm = optimizer.global_grad_norm() if hasattr(optimizer, "global_grad_norm") else None
            if norm is not None or _keeps_gradients(optimizer):
                return norm
        return math.sqrt(squared)

    def take(self) -> StepFacts:
        """Returns what happened since the last call. Collective whenever norms were measured."""
        import torch

        grad_norm = update_norm = step_norm = None
        deltas: dict[str, float] = {}
        moved = gradients = moved_direction = gradients_direction = None
        if self._before is not None and self._used is not None:
            first = self._all_next
            with torch.no_grad():
                changes, loud, sketches = self._norms.squared_change(self._before, self._quiet, sketched=first)
            before = self._used if self._gradient is None else self._gradient
            parts = [changes, loud, before, self._used.sum().reshape(1), sketches, self._sketch]
            squares, changed, gradient, used, *turned = _added([part for part in parts if part is not None])
            grad_norm, update_norm = self._gradient_norm(math.fsum(gradient)), math.sqrt(math.fsum(squares))
            deltas = self._norms.norms(changed, self._watched)
            keeps_gradients = any(map(_keeps_gradients, self._optimizers))
            step_norm = None if keeps_gradients else math.sqrt(used[0])
            if first:
                moved_direction = self._norms.directions(turned[0])
                moved = self._norms.norms(changed, self._norms.names)
                if not keeps_gradients:
                    gradients_direction = self._norms.directions(turned[1])
                    gradients = self._norms.norms(gradient, self._norms.trainable)
                self._all_next = False
        else:
            grad_norm = self._told_norm
        facts = StepFacts(
            lr=self._lr,
            loss_scale=self._loss_scale,
            steps=self._steps,
            grad_norm=grad_norm,
            update_norm=update_norm,
            deltas=deltas,
            moved=moved,
            gradients=gradients,
            step_norm=step_norm,
            moved_direction=moved_direction,
            gradients_direction=gradients_direction,
        )
        self.reset()
        return facts


def _added(parts: Sequence[torch.Tensor]) -> list[list[float]]:
    """Returns each of these vectors added over ranks, in one all-reduce. Collective."""
    import torch

    every, first = add_over_ranks(torch.cat(list(parts))), 0
    found: list[list[float]] = []
    for part in parts:
        found.append(every[first : first + len(part)])
        first += len(part)
    return found


def _keeps_gradients(optimizer: Any) -> bool:
    """Whether an optimizer takes the gradients off the parameters, so that nothing can be measured there."""
    return bool(getattr(optimizer, "keeps_gradients", False))


def _num_skipped(scaler: Any) -> int:
    return int(getattr(scaler, "num_skipped", 0))

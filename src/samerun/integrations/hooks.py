"""The hooks around an optimizer's step, for optimizers that are no `torch.optim.Optimizer` and have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Hook = Callable[..., Any]


class StepHooks:
    """Keeps hooks as `torch.optim.Optimizer` does; whoever makes the step calls them."""

    def __init__(self) -> None:
        self._before: dict[int, Hook] = {}
        self._after: dict[int, Hook] = {}

    def register_step_pre_hook(self, hook: Hook) -> Handle:
        """Calls `hook` before each update."""
        return Handle(self._before, hook)

    def register_step_post_hook(self, hook: Hook) -> Handle:
        """Calls `hook` after each update that was applied."""
        return Handle(self._after, hook)

    def step_begins(self) -> None:
        """Calls the hooks before an update."""
        for hook in list(self._before.values()):
            hook(self, (), {})

    def step_ended(self) -> None:
        """Calls the hooks after an update."""
        for hook in list(self._after.values()):
            hook(self, (), {})


class Handle:
    """Takes a hook off."""

    def __init__(self, hooks: dict[int, Hook], hook: Hook) -> None:
        self._hooks, self._key = hooks, id(self)
        hooks[self._key] = hook

    def remove(self) -> None:
        """Takes the hook off, once."""
        self._hooks.pop(self._key, None)

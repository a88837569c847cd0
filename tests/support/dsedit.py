"""Edits of state files that DeepSpeed wrote, where DeepSpeed is not installed: its classes are kept as they came.

A class that the pickle names stands in by an empty one of the same name, which gives back what it was made from.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class _Kept:
    def __init__(self, *args: Any) -> None:
        self.made_from = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        state = vars(self).get("state")
        return (type(self), vars(self).get("made_from", ())) + (() if state is None else (state,))


class _Pickle(ModuleType):
    """What torch asks of a pickle module."""

    def __init__(self) -> None:
        super().__init__("kept")
        self.Unpickler = _Unpickler
        self.load = pickle.load


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _stand_in(module, name) if module.split(".")[0] == "deepspeed" else super().find_class(module, name)


def _stand_in(module: str, name: str) -> type:
    held = sys.modules.setdefault(module, ModuleType(module))
    if not hasattr(held, name):
        setattr(held, name, type(name, (_Kept,), {"__module__": module, "__qualname__": name}))
    return getattr(held, name)


@contextlib.contextmanager
def _own_deepspeed() -> Iterator[None]:
    """Keeps stand-ins out of the way of tests that use the real one."""
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "deepspeed"}
    for name in ("deepspeed", "deepspeed.runtime"):
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update(real)


def edit_real(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Loads a state file, changes it, and writes it back."""
    with _own_deepspeed():
        value = torch.load(path, weights_only=False, pickle_module=_Pickle())
        change(value)
        torch.save(value, path)

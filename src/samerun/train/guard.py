"""A job that samerun launched is disposable: what it saves would be taken for the real run's.

While the guard is up, `torch.save` to a file and every way of `torch.distributed.checkpoint` to write a checkpoint
refuse, and say what a script does instead. Saving into memory stays possible; reading is not touched.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from typing import Any

from samerun.errors import Problem, UsageError


class SaveRefused(UsageError):
    """A disposable job tried to save (SR-REC-SAVE)."""


def _refuse(what: str, stage: str, path: Any) -> SaveRefused:
    return SaveRefused(
        Problem(
            "SR-REC-SAVE",
            f"{what} was called in a job that samerun started only to look at the run",
            where={"stage": stage, "file": str(path)} if path is not None else {"stage": stage},
            hint="save only `if recorder.may_save:`; it is false in such a job and true in every other one",
        )
    )


class SaveGuard:
    """Replaces the functions that save, on this rank, until `remove` is called."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._replaced: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Puts the guard up. Modules that have already imported a save function by name are covered too, because the
        writer that all of `torch.distributed.checkpoint` goes through refuses as well."""
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import filesystem, state_dict_saver

        self._replace(torch, "save", self._guard_torch_save(torch.save))
        for module in (dcp, state_dict_saver):
            for name in ("save", "async_save", "save_state_dict", "_save_state_dict"):
                if hasattr(module, name):
                    self._replace(module, name, self._refusing(f"torch.distributed.checkpoint.{name}"))
        writer: Any = getattr(filesystem, "_FileSystemWriter", filesystem.FileSystemWriter)
        self._replace(writer, "reset", self._refusing("torch.distributed.checkpoint's file writer"))

    def remove(self) -> None:
        """Takes the guard down."""
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))
        setattr(owner, name, wraps(original)(new))

    def _refusing(self, what: str) -> Callable[..., Any]:
        stage = self._stage

        def refuse(*arguments: Any, **named: Any) -> None:
            raise _refuse(what, stage, named.get("checkpoint_id"))

        return refuse

    def _guard_torch_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        stage = self._stage

        def save(obj: Any, f: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(f, io.BytesIO):
                return original(obj, f, *arguments, **named)
            raise _refuse("torch.save", stage, getattr(f, "name", f))

        return save

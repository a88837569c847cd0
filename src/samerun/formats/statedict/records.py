"""Values that are tensors to the framework and none that can be read here: other element types, packed subclasses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samerun.errors import Problem
from samerun.formats.statedict.tree import contains_tensor
from samerun.formats.torchfile.values import PICKLED_TENSOR, Inert

_META = "torch._utils._rebuild_meta_tensor_no_storage"
_REBUILT = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "tensor of torch.")
_SHOWN = 3


def unread_tensor(value: Any) -> str | None:
    """Returns what kind of tensor a record stands for, None for a value that is no tensor, or one that is read.

    A record that holds tensors is one too: that is how subclasses which pack several (quantised ones) are saved.
    """
    if not isinstance(value, Inert):
        return None
    if value.name == _META:
        return "a tensor on the meta device, saved without values"
    if value.name == PICKLED_TENSOR or value.name.startswith(_REBUILT):
        return value.name.removeprefix("torch._utils.")
    return value.name if contains_tensor(value) else None


def check_read(unread: Mapping[str, str], file: str) -> list[Problem]:
    """Returns a finding for each kind of tensor that the model or an optimizer has and that is not read."""
    kinds: dict[str, list[str]] = {}
    for name, kind in unread.items():
        kinds.setdefault(kind, []).append(name)
    return [_unread(kind, names, file) for kind, names in kinds.items()]


def _unread(kind: str, names: list[str], file: str) -> Problem:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return Problem(
        "SR-COV-RECORD",
        f"{len(names)} tensors are of a kind that is not read ({kind}): {shown}",
        where={"tensor": names[0], "file": file},
        hint="no comparison, digest or conversion has their values; save plain tensors, or resume with what wrote it",
    )

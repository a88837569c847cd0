"""What becomes of fp32 masters where a destination has no place for them: the user's choice.

torch.optim has no masters. A PyTorch job under mixed precision (FSDP2's `MixedPrecisionPolicy`, autocast) keeps its
parameters themselves in fp32, so there the masters are the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from samerun.core.dtype import DType
from samerun.core.state import LogicalState, Role, TensorEntry, TensorKey
from samerun.errors import Problem, Severity, UsageError
from samerun.formats.base import Array, Checkpoint, Extent

CHOICES = ("params", "slots", "drop")
WITHOUT_MASTERS = ("dcp", "torch", "huggingface", "safetensors")  # formats that have no place of their own for them


def settle_masters(source: Checkpoint, choice: str, to: str) -> tuple[Checkpoint, tuple[Problem, ...]]:
    """Returns the checkpoint with its masters where the user wants them, and what there is to say about it.

    `params`: each master is the parameter, in its own type, and the rounded weight is left out. `drop`: the weights
    stay and the masters are left out. `slots`: masters are slots of the optimizer, which a job has to fetch.

    Raises:
        UsageError: if the destination has a place for masters, or the source has none.
    """
    masters = {entry.key.fqn: entry for entry in source.state.tensors.values() if entry.key.role is Role.MASTER}
    if choice not in CHOICES or to not in WITHOUT_MASTERS or not masters:
        raise UsageError(_refused(choice, to, has_masters=bool(masters)))
    if choice == "slots":
        return source, ()
    tensors: dict[str, TensorEntry] = {}
    replaced: dict[str, str] = {}
    kinds: set[DType] = set()
    for key, entry in source.state.tensors.items():
        fqn = entry.key.fqn
        if entry.key.role is Role.MASTER:
            if choice == "params" and f"param:{fqn}" not in source.state.tensors:
                tensors[f"param:{fqn}"] = replace(entry, key=TensorKey(Role.PARAM, fqn))
                replaced[f"param:{fqn}"] = key
            continue
        if choice == "params" and entry.key.role is Role.PARAM and fqn in masters and masters[fqn].dtype != entry.dtype:
            kinds.add(entry.dtype)
            master = masters[fqn]
            replaced[key] = str(master.key)
            tensors[key] = replace(entry, dtype=master.dtype, tiling=master.tiling)
        else:
            tensors[key] = entry
    state = replace(source.state, tensors=tensors)
    return _Renamed(source, state, replaced), (_settled(choice, len(masters), kinds),)


class _Renamed:
    """A checkpoint in which some tensors are others of its own. See `samerun.formats.base.Checkpoint`."""

    def __init__(self, inner: Checkpoint, state: LogicalState, names: dict[str, str]) -> None:
        self.path: Path = inner.path
        self.state = state
        self._inner, self._names = inner, names
        self.close: Callable[[], None] = inner.close

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where the bytes of one piece lie."""
        return self._inner.locate(self._names.get(key, key), piece)

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece."""
        return self._inner.read_piece(self._names.get(key, key), piece)

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor."""
        return self._inner.read(self._names.get(key, key), offsets, sizes)


def _settled(choice: str, count: int, kinds: set[DType]) -> Problem:
    rounded = ", ".join(sorted(kind.name for kind in kinds))
    message = (
        f"{count} masters are the parameters of the destination; the {rounded or 'same'} weights are left out"
        if choice == "params"
        else f"{count} masters are left out: the next updates start from the rounded weights"
    )
    return Problem(
        "SR-CONVERT-MASTERS",
        message,
        severity=Severity.NOTE if choice == "params" else Severity.WARNING,
        hint="this is what --masters asked for",
        where={"masters": choice},
    )


def _refused(choice: str, to: str, *, has_masters: bool) -> Problem:
    if choice not in CHOICES:
        message, hint = f"--masters {choice!r} is none of {', '.join(CHOICES)}", "see samerun convert --help"
    elif to not in WITHOUT_MASTERS:
        message, hint = f"`{to}` has a place for masters, and they go there", "leave --masters out"
    else:
        message, hint = "the source has no masters", "leave --masters out" if not has_masters else ""
    return Problem("SR-USAGE-OPTION", message, hint=hint)

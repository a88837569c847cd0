"""A checkpoint seen under other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samerun.core.rename import NameMap
from samerun.core.state import LogicalState, ParamGroup, TensorEntry, TensorKey
from samerun.errors import Problem, UsageError
from samerun.formats.base import Array, Checkpoint, Extent


class RenamedCheckpoint:
    """A checkpoint whose tensors, ties and groups go by other names. See `samerun.formats.base.Checkpoint`.

    Raises:
        UsageError: if two tensors would get one name.
    """

    def __init__(self, inner: Checkpoint, names: NameMap) -> None:
        self.path: Path = inner.path
        self._inner = inner
        self._old: dict[str, str] = {}
        tensors: dict[str, TensorEntry] = {}
        for key, entry in inner.state.tensors.items():
            new = names.rename(key)
            if new in tensors:
                raise UsageError(
                    Problem(
                        "SR-USAGE-MAP",
                        f"two tensors would be called {new}",
                        where={"tensor": key},
                        hint=f"the other one is {self._old[new]}",
                    )
                )
            self._old[new] = key
            aliases = tuple(_rename(names, alias) for alias in entry.aliases)
            tensors[new] = replace(entry, key=TensorKey.parse(new), aliases=aliases)
        groups = tuple(_rename_group(names, group) for group in inner.state.groups)
        self.state: LogicalState = replace(inner.state, tensors=tensors, groups=groups)

    def locate(self, key: str, piece: int) -> Extent:
        """Returns where one piece lies. See `Checkpoint.locate`."""
        return self._inner.locate(self._old.get(key, key), piece)

    def read_piece(self, key: str, piece: int) -> Array:
        """Returns one piece. See `Checkpoint.read_piece`."""
        return self._inner.read_piece(self._old.get(key, key), piece)

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Array:
        """Returns a box of a tensor. See `Checkpoint.read`."""
        return self._inner.read(self._old.get(key, key), offsets, sizes)

    def close(self) -> None:
        """Releases the files of the checkpoint below."""
        self._inner.close()


def _rename(names: NameMap, fqn: str) -> str:
    return names.rename(f"param:{fqn}").partition(":")[2]


def _rename_group(names: NameMap, group: ParamGroup) -> ParamGroup:
    named: Any = group.hyperparameters.get("param_names")
    hyperparameters: Mapping[str, Any] = group.hyperparameters
    if isinstance(named, list):
        hyperparameters = {**hyperparameters, "param_names": [_rename(names, str(name)) for name in named]}
    return ParamGroup(tuple(_rename(names, fqn) for fqn in group.params), hyperparameters)

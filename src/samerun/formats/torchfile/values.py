"""What a pickle becomes where it is no plain number, text, list or mapping: a tensor, or a record of a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samerun.core.dtype import DType


@dataclass(frozen=True, slots=True)
class Inert:
    """A value of a class that samerun does not know: its name and whatever it was built from, as plain data."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: tuple[Any, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the record as a mapping that JSON can hold if its parts can."""
        return {"class": self.name, "args": list(self.args), "state": self.state, "items": list(self.items)}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor inside a torch.save file: which storage, and which view of it. Offsets and strides in elements."""

    storage: str
    dtype: DType
    offset_elements: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_elements: int


BACKWARD = "a value that this one lies in"
"""The name of the record that stands for a value inside itself: configurations and objects know their parents."""

PICKLED_TENSOR = "tensor saved by pickle and not by torch.save"
"""The name of the record of a tensor whose storage lies inside a pickle: pickle.dump does that, torch.save does not."""

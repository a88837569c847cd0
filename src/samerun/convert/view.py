"""A checkpoint beside another state: the same tensors, or some of them, with other objects."""

from __future__ import annotations

from samerun.core.state import LogicalState
from samerun.formats.base import Checkpoint


class StateView:
    """A checkpoint whose state is another one. Every tensor of that state must be one of the checkpoint's."""

    def __init__(self, inner: Checkpoint, state: LogicalState) -> None:
        self.path, self.state = inner.path, state
        self.locate, self.read, self.read_piece, self.close = inner.locate, inner.read, inner.read_piece, inner.close

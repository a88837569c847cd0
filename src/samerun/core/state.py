"""Logical state: what a checkpoint holds, whoever wrote it and however it was cut up.

Named tensors with a global shape, dtype and role; parameter groups; progress; objects. How each tensor is physically
arranged is kept apart: it is tiled by pieces, and a piece's box (offsets and sizes in the global tensor) lives here
while where its bytes lie is the reader's business (`samerun.formats.base.Checkpoint.locate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samerun.core.dtype import DType
from samerun.core.mesh import Layout
from samerun.errors import Problem

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Role(StrEnum):
    """What a tensor is to the run."""

    PARAM = "param"
    BUFFER = "buffer"
    OPTIM = "optim"
    MASTER = "master"
    EMA = "ema"


def normalize_fqn(name: str) -> str:
    """Takes wrapper prefixes off a fully qualified name wherever they stand at the start of a component.

    >>> normalize_fqn("module._orig_mod.layers.0._checkpoint_wrapped_module.w")
    'layers.0.w'
    """
    parts = name.split(".")
    wrappers = {wrapper.rstrip(".") for wrapper in WRAPPERS}
    kept = [part for part in parts[:-1] if part not in wrappers]
    return ".".join([*kept, parts[-1]])


@dataclass(frozen=True, slots=True, order=True)
class TensorKey:
    """`<role>[.<slot>]:<fqn>`, the name under which every format's tensors meet.

    >>> str(TensorKey(Role.OPTIM, "layers.0.w", slot="exp_avg"))
    'optim.exp_avg:layers.0.w'
    """

    role: Role
    fqn: str
    slot: str | None = None

    def __post_init__(self) -> None:
        if (self.role is Role.OPTIM) != (self.slot is not None):
            raise ValueError(f"optimizer tensors and only they have a slot: {self.role} {self.fqn} {self.slot!r}")

    def __str__(self) -> str:
        return f"{self.role}.{self.slot}:{self.fqn}" if self.slot else f"{self.role}:{self.fqn}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form back. Raises ValueError if it is none."""
        head, colon, fqn = text.partition(":")
        role, _, slot = head.partition(".")
        if not colon:
            raise ValueError(f"a tensor key looks like param:layers.0.w, not {text!r}")
        return cls(Role(role), fqn, slot or None)


@dataclass(frozen=True, slots=True, eq=False)
class Tiling:
    """The boxes of a tensor's pieces, as columns: row i of `offsets` and `sizes` is piece i.

    Shapes: both `(pieces, ndim)` int64. Elements, not bytes. A scalar tensor has `ndim` 0 and one row per piece.
    """

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.offsets.ndim != 2 or self.offsets.shape != self.sizes.shape:
            raise ValueError(f"offsets {self.offsets.shape} and sizes {self.sizes.shape} must be equal and 2-d")

    def __len__(self) -> int:
        return self.offsets.shape[0]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """Returns the tiling of a tensor that lies in one piece."""
        return cls(np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64).reshape(1, len(shape)))


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """One tensor of the logical state.

    `shape` is global, in elements. `original` is the name as the checkpoint has it. `aliases` are other FQNs that
    share this tensor's values (tied weights). `role_inferred` is set where the format does not say whether a model
    tensor is a parameter or a buffer and the reader had to conclude it; a job that has the model knows better.
    `name_inferred` is set for optimizer state kept by position whose name is the likeliest of several that fit.
    """

    key: TensorKey
    shape: tuple[int, ...]
    dtype: DType
    tiling: Tiling
    original: str
    aliases: tuple[str, ...] = ()
    role_inferred: bool = False
    name_inferred: bool = False

    @property
    def num_elements(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Global number of bytes, counted once whatever the number of replicas."""
        return self.num_elements * self.dtype.num_bytes


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """An optimizer's parameter group: FQNs in saved order and every hyperparameter that was saved with it."""

    params: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProgress:
    """How far the run was, as far as the checkpoint tells. `update` counts completed optimizer steps."""

    update: int | None = None
    samples: int | None = None
    tokens: int | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a pipeline, where the format keeps its layers apart.

    `layers` has by layer number what a layer's own file holds: FQNs by the names that they have inside the layer.
    `stages` has by stage the FQNs that it trained, in the order of its own optimizer; tied weights are in several.
    """

    layers: Mapping[int, Mapping[str, str]]
    stages: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Which ranks wrote the checkpoint. `inferred` says how it is known when the format does not record it."""

    world_size: int | None = None
    layout: Layout | None = None
    inferred: str | None = None
    pipeline: Pipeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogicalState:
    """Everything that a checkpoint holds, free of how it was written.

    `tensors` is keyed by the text form of `TensorKey`. `objects` holds whatever is neither tensor nor group, by its
    original flat name, as plain data (numbers, strings, lists, mappings, `numpy.ndarray` for small tensors in
    objects, or `samerun.formats.torchfile.Inert` records).
    """

    format: str
    tensors: Mapping[str, TensorEntry]
    groups: tuple[ParamGroup, ...] = ()
    progress: RecordedProgress = field(default_factory=RecordedProgress)
    scheduler: Mapping[str, Any] | None = None
    rng: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    topology: Topology = field(default_factory=Topology)
    written_by: Mapping[str, str] = field(default_factory=dict[str, str])
    problems: tuple[Problem, ...] = ()

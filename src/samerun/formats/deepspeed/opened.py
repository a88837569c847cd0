"""What both DeepSpeed formats open: model files, pipeline layers, experts, and the degrees of parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from samerun.core.mesh import Layout
from samerun.core.state import Pipeline, Topology
from samerun.formats.deepspeed.model import ModelStates
from samerun.formats.deepspeed.names import FileName
from samerun.formats.deepspeed.states import StateFile, as_count, as_dict
from samerun.stores.local import MappedFiles


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of parallelism. `dp` counts the ranks that share an optimizer; `mp` is `tp` times `pp`."""

    dp: int
    mp: int
    tp: int
    pp: int
    ep: int = 1
    cp: int = 1

    def position(self, mp: int) -> tuple[int, int]:
        """Returns the pipeline stage and the tensor-parallel rank of a model-parallel rank (pipeline outermost)."""
        return divmod(mp, self.tp)


class Opened(Protocol):
    """Opened model files, by (model-parallel rank, data-parallel rank or None where one file serves all of them)."""

    @property
    def models(self) -> Mapping[tuple[int, int | None], ModelStates]:
        """Model files of this save, lowest ranks first."""
        ...

    @property
    def layers(self) -> Mapping[FileName, StateFile]:
        """Files of pipeline layers."""
        ...

    @property
    def experts(self) -> Mapping[FileName, StateFile]:
        """Files of single experts."""
        ...

    @property
    def degrees(self) -> Degrees:
        """Degrees of parallelism of the save."""
        ...

    @property
    def files(self) -> MappedFiles:
        """Maps of the opened files."""
        ...

    @property
    def config(self) -> dict[Any, Any]:
        """The DeepSpeed configuration of the run."""
        ...


def model_degrees(model: ModelStates | None, mp_ranks: int, pipeline: int | None) -> tuple[int, int, int]:
    """Returns the model-, tensor- and pipeline-parallel degrees that a model file records.

    `mp_ranks` is how many model-parallel ranks have files, `pipeline` the number of stages that the files suggest; both
    count only where the file itself says nothing (before DeepSpeed 0.15).
    """
    dims = as_dict(model.value.get("checkpoint_parallel_dimensions")) if model else {}
    mp = (model.count("mp_world_size") if model else None) or max(1, mp_ranks)
    pp = as_count(dims.get("pp_degree")) or pipeline or 1
    tp = as_count(dims.get("tp_degree")) or max(1, mp // pp)
    if tp * pp != mp:
        tp, pp = (mp // pp, pp) if mp % pp == 0 else (mp, 1)
    return mp, tp, pp


def sequence_degree(model: ModelStates | None, dp: int) -> int:
    """Returns over how many of the data-parallel ranks sequences are split (Ulysses)."""
    cp = as_count(model.config.get("sequence_parallel_size")) if model else None
    return cp if cp and dp % cp == 0 else 1


def topology(degrees: Degrees, *, sharded: bool, pipeline: Pipeline | None = None) -> Topology:
    """Returns the layout of the ranks that wrote the files. `sharded` is False for stage 0, which replicates."""
    replicas = degrees.dp // degrees.cp
    shard, replicate = (replicas, 1) if sharded else (1, replicas)
    ep = degrees.ep if (shard * degrees.cp * degrees.tp) % degrees.ep == 0 else 1
    layout = Layout(pp=degrees.pp, dp_replicate=replicate, dp_shard=shard, cp=degrees.cp, tp=degrees.tp, ep=ep)
    return Topology(world_size=layout.world_size, layout=layout, pipeline=pipeline)

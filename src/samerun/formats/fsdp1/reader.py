"""Opens FSDP1 state saved by each rank for itself as logical state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from samerun.core.mesh import Layout
from samerun.core.state import Topology
from samerun.formats.statedict.assemble import assemble
from samerun.formats.statedict.checkpoint import StateDictCheckpoint
from samerun.formats.statedict.localranks import place_ranks
from samerun.formats.statedict.ranks import merge_ranks
from samerun.formats.statedict.rankset import open_rank_set
from samerun.formats.statedict.saved import SavedState, sort_tree
from samerun.stores.local import MappedFiles


def open_fsdp1(path: Path) -> StateDictCheckpoint:
    """Opens a directory with one file per rank, or one rank's file alone. Tensors stay on disk.

    Raises:
        UsageError: if the directory holds several sets of rank files.
        CorruptCheckpoint: if no rank's file can be decoded. Anything less is a finding of the state.
    """
    files = MappedFiles()
    saved = SavedState()
    ranks = open_rank_set(path, files, saved)
    merged = merge_ranks(ranks.trees, files)
    saved.problems += merged.problems
    parameters = place_ranks(merged, list(ranks.trees), files, saved)
    saved.problems += ranks.check(merged.num_ranks)
    world = merged.num_ranks or ranks.num_ranks or len(ranks.trees)
    saved.topology = Topology(world_size=world, layout=Layout(dp_shard=world))
    saved.written_by["framework"] = "torch.distributed.fsdp.FullyShardedDataParallel"
    sort_tree(merged.tree, saved)
    if parameters is not None:
        saved.models = [
            replace(model, buffers=frozenset(name for name in model.tensors if name not in parameters))
            for model in saved.models
        ]
    return assemble(path, "fsdp1", saved, files, per_rank=True)

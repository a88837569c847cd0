"""Opens FSDP1 state saved by each rank for itself as logical state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samerun.core.mesh import Layout
from samerun.core.state import Topology
from samerun.errors import Problem, Severity
from samerun.formats.fsdp1.flat import has_flat, place_local
from samerun.formats.statedict.assemble import assemble
from samerun.formats.statedict.checkpoint import StateDictCheckpoint
from samerun.formats.statedict.ranks import Merged, Plain, merge_ranks, replicate, same_content, substitute
from samerun.formats.statedict.rankset import RankSet, open_rank_set
from samerun.formats.statedict.saved import SavedState, sort_tree
from samerun.formats.statedict.stored import Stored
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
    parameters = _place(merged, ranks, files, saved)
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


def _place(merged: Merged, ranks: RankSet, files: MappedFiles, saved: SavedState) -> frozenset[str] | None:
    """Replaces ordinary tensors by what they are. Returns the names of parameters where the files tell them."""
    if not any(map(has_flat, ranks.trees.values())):
        saved.problems += _check_replicas(merged.plain, files)
        merged.tree = substitute(merged.tree, lambda plain: replicate(plain.parts))
        return None
    local = place_local(merged.tree, merged.plain, list(ranks.trees))
    saved.problems += [*local.problems, *_check_replicas(local.replicas, files)]
    merged.tree = substitute(local.tree, lambda plain: local.tensors[plain.path])
    return local.parameters


def _first(plain: Plain) -> Stored:
    return next(iter(plain.parts.values()))


def _check_replicas(plains: Sequence[Plain], files: MappedFiles) -> list[Problem]:
    unequal = [plain for plain in plains if not _equal(plain, files)]
    if not unequal:
        return []
    names = [".".join(plain.path) for plain in unequal]
    steps = any(plain.path[-1] == "step" for plain in unequal)
    return [
        Problem(
            "SR-RANK-STEP" if steps else "SR-RANK-REPLICA",
            f"{len(names)} tensors that every rank saved whole differ between ranks: {', '.join(names[:4])}",
            severity=Severity.ERROR if steps else Severity.WARNING,
            where={"tensor": names[0]},
            hint="files of different updates are mixed; gather those of one save"
            if steps
            else "statistics that each rank keeps for itself may differ; parameters may not",
        )
    ]


def _equal(plain: Plain, files: MappedFiles) -> bool:
    first = _first(plain)
    return all(same_content(first, part, files) for part in list(plain.parts.values())[1:])

"""Opens a directory of rank files as logical state."""

from __future__ import annotations

from pathlib import Path

from samerun.core.mesh import Layout
from samerun.core.state import Topology
from samerun.errors import Problem, Severity
from samerun.formats.ranklocal.geometry import Inferred, infer_geometry
from samerun.formats.statedict.assemble import assemble
from samerun.formats.statedict.checkpoint import StateDictCheckpoint
from samerun.formats.statedict.chunks import check_last_shard
from samerun.formats.statedict.ranks import Merged, Plain, merge_ranks, replicate, same_content, substitute
from samerun.formats.statedict.rankset import RankSet, open_rank_set
from samerun.formats.statedict.saved import SavedState, sort_tree
from samerun.formats.statedict.stored import Stored
from samerun.stores.local import MappedFiles

_AXES = {
    "dp": "dp_shard", "fsdp": "dp_shard", "dp_shard": "dp_shard", "shard": "dp_shard", "dp_replicate": "dp_replicate",
    "replicate": "dp_replicate", "ddp": "dp_replicate", "tp": "tp", "pp": "pp", "cp": "cp",
}  # fmt: skip


def open_ranklocal(path: Path) -> StateDictCheckpoint:
    """Opens a directory with one file per rank, or one rank's file alone. Tensors stay on disk.

    Raises:
        UsageError: if the directory holds several such sets.
        CorruptCheckpoint: if no rank's file can be decoded. Anything less is a finding of the state.
    """
    files = MappedFiles()
    saved = SavedState()
    ranks = open_rank_set(path, files, saved)
    merged = merge_ranks(ranks.trees, files)
    saved.problems += merged.problems
    inferred = _place_plain(merged, list(ranks.trees), files, saved)
    saved.problems += ranks.check(merged.num_ranks)
    saved.topology = _topology(merged, inferred, ranks)
    sort_tree(merged.tree, saved)
    return assemble(path, "ranklocal", saved, files, per_rank=True)


def _place_plain(merged: Merged, ranks: list[int], files: MappedFiles, saved: SavedState) -> Inferred | None:
    """Replaces tensors that all ranks saved as ordinary ones: replicas where others say their place, else inferred."""
    if merged.num_ranks or len(ranks) < 2:
        unequal = [plain for plain in merged.plain if not _equal(plain, files)]
        if unequal:
            saved.problems.append(_unequal_replicas(unequal))
        merged.tree = substitute(merged.tree, lambda plain: replicate(plain.parts))
        return None
    inferred = infer_geometry(merged.plain, ranks, files)
    saved.problems += inferred.problems
    if inferred.num_shards > 1:
        saved.problems += check_last_shard(inferred.tensors.values(), inferred.num_shards, "ranks")
    merged.tree = substitute(merged.tree, lambda plain: inferred.tensors[plain.path])
    return inferred


def _equal(plain: Plain, files: MappedFiles) -> bool:
    first = next(iter(plain.parts.values()))
    return all(same_content(first, part, files) for part in list(plain.parts.values())[1:])


def _unequal_replicas(plains: list[Plain]) -> Problem:
    names = [".".join(plain.path) for plain in plains]
    trained = any(_first(plain).dtype.kind == "float" and _first(plain).shape for plain in plains)
    steps = any(plain.path[-1] == "step" for plain in plains)
    return Problem(
        "SR-RANK-STEP" if steps else "SR-RANK-REPLICA",
        f"{len(names)} tensors that every rank saved whole differ between ranks: {', '.join(names[:4])}",
        severity=Severity.ERROR if trained or steps else Severity.WARNING,
        where={"tensor": names[0]},
        hint="files of different updates are mixed; gather those of one save"
        if steps
        else "statistics that each rank keeps for itself may differ; parameters may not",
    )


def _first(plain: Plain) -> Stored:
    return next(iter(plain.parts.values()))


def _topology(merged: Merged, inferred: Inferred | None, ranks: RankSet) -> Topology:
    if merged.num_ranks:
        return Topology(world_size=merged.num_ranks, layout=_layout(merged.mesh, merged.num_ranks))
    world = ranks.num_ranks or max(ranks.trees) + 1
    if world < 2:
        return Topology()
    layout = None
    if inferred is not None and world % inferred.num_shards == 0:
        layout = Layout(dp_replicate=world // inferred.num_shards, dp_shard=inferred.num_shards)
    return Topology(world_size=world, layout=layout, inferred="from the number of rank files and from what they share")


def _layout(mesh: tuple[tuple[str, int], ...], num_ranks: int) -> Layout | None:
    """Returns the layout that a mesh's own names give, None if they give none of as many ranks."""
    axes: dict[str, int] = {}
    for name, size in mesh:
        axis = _AXES.get(name)
        if axis is None:
            return None
        axes[axis] = axes.get(axis, 1) * size
    layout = Layout.from_dict(axes)
    return layout if layout.world_size == num_ranks else None

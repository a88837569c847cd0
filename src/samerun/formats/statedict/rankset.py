"""Opening the files of all ranks: which belong together, which cannot be read, and whose each one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samerun.errors import CorruptCheckpoint, FormatError, Problem, Severity, UsageError
from samerun.formats.statedict.geometry import GeometryError, find_distributed, read_part
from samerun.formats.statedict.rankfiles import RankFiles, find_rank_files, match_rank
from samerun.formats.statedict.ranks import check_ranks
from samerun.formats.statedict.saved import SavedState
from samerun.formats.statedict.tree import Tree, open_file
from samerun.stores.local import MappedFiles


@dataclass(slots=True, eq=False)
class RankSet:
    """The values that ranks saved, by rank: the one recorded inside a file where there is one, else its name's.

    `num_ranks` is how many saved, as names or values beside the model say; 0 where nothing says it.
    """

    rank_files: RankFiles
    trees: dict[int, Tree]
    num_ranks: int = 0
    swapped: dict[int, int] = field(default_factory=dict[int, int])

    def check(self, num_ranks: int) -> list[Problem]:
        """Returns the findings about files that are missing, left over or swapped; `num_ranks` as tensors say it."""
        names = {rank: str(file) for rank, file in self.rank_files.files.items()}
        recorded = {rank: self.swapped.get(rank, rank) for rank in names}
        return check_ranks(list(names), num_ranks or self.num_ranks, recorded, lambda rank: names.get(rank, str(rank)))


def open_rank_set(path: Path, files: MappedFiles, saved: SavedState) -> RankSet:
    """Opens a directory with one file per rank, or one rank's file alone. Findings go to `saved`.

    Raises:
        UsageError: if the directory holds several such sets, or none.
        CorruptCheckpoint: if no rank's file can be decoded.
    """
    rank_files, rest = choose_rank_files(path)
    if rest:
        saved.problems.append(_left_out(path, rank_files, rest))
    return open_rank_files(rank_files, files, saved)


def open_rank_files(rank_files: RankFiles, files: MappedFiles, saved: SavedState) -> RankSet:
    """Opens one set of rank files. Findings go to `saved`.

    Raises:
        CorruptCheckpoint: if no rank's file can be decoded.
    """
    trees = _open_all(rank_files, files, saved)
    own = {rank: _recorded_rank(tree, rank, files) for rank, tree in trees.items()}
    swapped = {rank: other for rank, other in own.items() if other is not None and other != rank}
    if len({other if other is not None else rank for rank, other in own.items()}) < len(trees):
        swapped = {}  # two files claim the same rank: names decide, and the tiling shows what is missing
    by_rank = dict(sorted((swapped.get(rank, rank), tree) for rank, tree in trees.items()))
    sizes = [tree.get("world_size") for tree in trees.values() if isinstance(tree, dict)]
    recorded = next((size for size in sizes if type(size) is int and size > 0), 0)
    return RankSet(rank_files, by_rank, rank_files.world_size or recorded, swapped)


def choose_rank_files(path: Path) -> tuple[RankFiles, tuple[RankFiles, ...]]:
    """Returns the set of rank files that a path means, and the sets in the same directory that it does not.

    Raises:
        UsageError: if there is none, or several of the same size.
    """
    if path.is_file():
        match = match_rank(path.name)
        return RankFiles(path.name, {match[1] if match else 0: path}), ()
    sets = find_rank_files(path)
    if not sets:
        raise UsageError(Problem("SR-PATH-UNKNOWN", "no files of ranks are here", where={"file": str(path)}))
    rivals = [found.pattern for found in sets if len(found.files) == len(sets[0].files)]
    if len(rivals) > 1:
        raise UsageError(
            Problem(
                "SR-PATH-SEVERAL",
                f"{len(rivals)} sets of rank files are here: {', '.join(rivals)}",
                where={"file": str(path)},
                hint="move each set into a directory of its own, or give the path of one file",
            )
        )
    return sets[0], sets[1:]


def _open_all(rank_files: RankFiles, files: MappedFiles, saved: SavedState) -> dict[int, Tree]:
    trees: dict[int, Tree] = {}
    failed: list[Problem] = []
    for rank, file in rank_files.files.items():
        saved.files.append(file)
        try:
            bound = open_file(file, files)
        except FormatError as error:
            failed += error.problems
            continue
        except OSError as error:
            failed.append(_unreachable(file, error))
            continue
        trees[rank] = bound.tree
        saved.unknown.update(bound.unknown)
        saved.problems += bound.problems
        saved.written_by["format"] = f"torch.save ({bound.container}), one file per rank"
    if not trees:
        raise CorruptCheckpoint(failed)
    saved.problems += failed
    return trees


def _recorded_rank(tree: Tree, rank: int, files: MappedFiles) -> int | None:
    """Returns the rank that a file says it is: in its first distributed tensor, or as `rank` beside the model."""
    found = find_distributed(tree)
    if found is not None:
        try:
            return read_part(found, rank, files, {}).rank
        except GeometryError:
            return None
    own = tree.get("rank") if isinstance(tree, Mapping) else None
    return own if type(own) is int and own >= 0 else None


def _unreachable(file: Path, error: OSError) -> Problem:
    return Problem(
        "SR-FILE-MISSING",
        f"a rank's file cannot be read: {error.strerror}",
        where={"file": str(file)},
        hint="restore the file from the source; nothing else holds this rank's shards",
    )


def _left_out(path: Path, chosen: RankFiles, rest: tuple[RankFiles, ...]) -> Problem:
    names = [file.name for found in rest for file in found.files.values()]
    return Problem(
        "SR-RANK-LEFT",
        f"{len(names)} files of ranks do not belong to {chosen.pattern} and are left out: {', '.join(names[:4])}",
        severity=Severity.NOTE,
        where={"file": str(path / names[0])},
        hint="open them by their own path if they are what you mean",
    )

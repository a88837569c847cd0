"""An opened directory of one file per model-parallel rank: which ranks there are, and what their files hold.

Folders are `mp_rank_TT[_PPP][_EEE]`. A single suffix may be the pipeline or the expert rank: saved arguments decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samerun.errors import FormatError, Problem, Severity
from samerun.formats.deepspeed.states import StateFile, as_dict, missing_file, plain_value, read_state_file
from samerun.formats.mcore.ranks import coordinate
from samerun.formats.mcore.run import Run, is_whole, parse_run
from samerun.formats.megatron_legacy.detect import MODEL_FILE, OPTIMIZER_FILE, rank_folders
from samerun.stores.local import MappedFiles


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A model-parallel rank: pipeline, tensor, expert."""

    pp: int
    tp: int
    ep: int


@dataclass(frozen=True, slots=True, eq=False)
class RankFiles:
    """The opened files of one rank; `flat` is the distributed optimizer's, where there is one."""

    folder: Path
    state: StateFile
    flat: StateFile | None

    @property
    def value(self) -> dict[Any, Any]:
        """The saved state dict."""
        return as_dict(self.state.value)

    def files(self) -> Iterator[StateFile]:
        """Yields the files."""
        yield self.state
        if self.flat is not None:
            yield self.flat


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Everything that opening a directory finds. `ranks` are in order of place."""

    root: Path
    run: Run
    ranks: Mapping[Place, RankFiles]
    files: MappedFiles
    problems: tuple[Problem, ...]

    @property
    def first(self) -> RankFiles | None:
        """The lowest rank that could be opened."""
        return next(iter(self.ranks.values()), None)

    def plain(self, rank: RankFiles, name: str) -> Any:
        """Returns a small part of a rank's state as plain data."""
        return plain_value(rank.value.get(name), rank.state, self.files)

    def opened(self) -> list[StateFile]:
        """Returns every file that could be opened."""
        return [file for rank in self.ranks.values() for file in rank.files()]


def read_source(root: Path, files: MappedFiles) -> Source:
    """Opens every rank's files. What is missing, damaged or of another save is a finding, and the rest is read."""
    problems: list[Problem] = []
    opened: dict[tuple[int, ...], RankFiles] = {}
    unreadable: list[tuple[int, ...]] = []
    for name, numbers in sorted(rank_folders(root).items(), key=lambda item: item[1]):
        found = _open_rank(root / name, files, problems)
        if found is not None:
            opened[numbers] = found
        else:
            unreadable.append(numbers)
    run = _run_of(opened, files)
    placed = {_place(numbers, run): rank for numbers, rank in opened.items()}
    expected = [Place(pp, tp, ep) for pp in range(run.pp) for tp in range(run.tp) for ep in range(run.ep)]
    there = placed.keys() | {_place(numbers, run) for numbers in unreadable}
    problems += [_missing(root, place, run, len(expected)) for place in expected if place not in there]
    problems += [_stale(placed[place]) for place in sorted(set(placed) - set(expected))]
    ranks = {place: placed[place] for place in expected if place in placed}
    problems += _check_ranks(ranks, run, files)
    return Source(root, run, ranks, files, tuple(problems))


def _open_rank(folder: Path, files: MappedFiles, problems: list[Problem]) -> RankFiles | None:
    try:
        state = read_state_file(folder / MODEL_FILE, files)
    except FormatError as error:
        problems.extend(error.problems)
        return None
    if not isinstance(state.value, dict):
        problems.append(_no_state(folder / MODEL_FILE))
        return None
    flat = None
    if (folder / OPTIMIZER_FILE).exists():
        try:
            flat = read_state_file(folder / OPTIMIZER_FILE, files)
        except FormatError as error:
            problems.extend(error.problems)
    return RankFiles(folder, state, flat)


def _run_of(opened: Mapping[tuple[int, ...], RankFiles], files: MappedFiles) -> Run:
    for rank in opened.values():
        args = rank.value.get("args")
        if isinstance(args, dict) and args:
            return parse_run(plain_value(args, rank.state, files))
    if not opened:
        return parse_run(None)
    suffixes = [numbers[1] for numbers in opened if len(numbers) > 1]
    tp = max(numbers[0] for numbers in opened) + 1
    return parse_run(None, {"tp": tp, "pp": max(suffixes, default=0) + 1})


def _place(numbers: tuple[int, ...], run: Run) -> Place:
    tp, *rest = numbers
    if len(rest) == 2:
        return Place(rest[0], tp, rest[1])
    if not rest:
        return Place(0, tp, 0)
    return Place(0, tp, rest[0]) if run.pp == 1 and run.ep > 1 else Place(rest[0], tp, 0)


def folder_name(place: Place, run: Run) -> str:
    """Returns the folder that Megatron gives a rank.

    >>> folder_name(Place(1, 0, 0), Run(pp=2))
    'mp_rank_00_001'
    """
    name = f"mp_rank_{place.tp:02d}"
    name += f"_{place.pp:03d}" if run.pp > 1 else ""
    return name + (f"_{place.ep:03d}" if run.ep > 1 else "")


def _check_ranks(ranks: Mapping[Place, RankFiles], run: Run, files: MappedFiles) -> list[Problem]:
    """Checks that files agree about the run and the iteration, and were written by the rank they are named after."""
    problems: list[Problem] = []
    first: tuple[Any, ...] | None = None
    for place, rank in ranks.items():
        args = as_dict(rank.value.get("args"))
        mine = parse_run(plain_value(args, rank.state, files)) if args else run
        says = (rank.value.get("iteration"), mine.tp, mine.pp, mine.ep, mine.vpp, mine.world_size)
        first = says if first is None else first
        if says != first:
            problems.append(_disagrees(rank, first, says))
        writer = args.get("rank")
        if mine.world_size and writer is not None and is_whole(writer) and writer < mine.world_size:
            at = coordinate(mine, writer)
            if (at.pp, at.tp) != (place.pp, place.tp) or (mine.ep > 1 and at.ep != place.ep):
                problems.append(_swapped(rank, writer, folder_name(Place(at.pp, at.tp, at.ep), mine)))
    return problems


def _missing(root: Path, place: Place, run: Run, expected: int) -> Problem:
    name = folder_name(place, run)
    return missing_file(root / name / MODEL_FILE, f"a rank's file is not here; the run had {expected} of them")


def _stale(rank: RankFiles) -> Problem:
    return Problem(
        "SR-FILE-STALE",
        "the folder belongs to no rank of the run that wrote the others",
        severity=Severity.WARNING,
        where={"file": str(rank.folder)},
        hint="an earlier save with more ranks wrote here before; Megatron does not read it",
    )


def _no_state(path: Path) -> Problem:
    return Problem(
        "SR-MEG-COMMON",
        "the file does not hold a state dict",
        where={"file": str(path)},
        hint="restore the file from the source",
    )


def _disagrees(rank: RankFiles, expected: tuple[Any, ...], found: tuple[Any, ...]) -> Problem:
    names = ("iteration", "tp", "pp", "ep", "vpp", "world size")
    odd = [f"{name} {b}, not {a}" for name, a, b in zip(names, expected, found, strict=True) if a != b]
    return Problem(
        "SR-MEG-RANKS",
        f"a rank's file is of another save or run than the first rank's: {', '.join(odd)}",
        where={"file": str(rank.state.path)},
        expected=list(expected),
        found=list(found),
        hint="Megatron loads it without a word; restore all files from one save",
    )


def _swapped(rank: RankFiles, writer: int, name: str) -> Problem:
    return Problem(
        "SR-MEG-SWAPPED",
        f"the file was written by rank {writer}, whose folder is {name}",
        where={"file": str(rank.state.path)},
        expected=name,
        found=rank.folder.name,
        hint="files were renamed or copied into each other's place; shapes are the same, so Megatron loads them",
    )

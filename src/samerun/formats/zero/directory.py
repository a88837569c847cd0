"""The files of one checkpoint directory: which there are, which belong together, which are missing or left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from samerun.errors import Problem, Severity
from samerun.formats.deepspeed.names import FileName, Kind, optim_name, parse_name
from samerun.formats.deepspeed.states import list_names


@dataclass(frozen=True, slots=True)
class Directory:
    """The parsed names of a directory, by what the files hold."""

    root: Path
    models: tuple[FileName, ...]
    optims: tuple[FileName, ...]
    layers: tuple[FileName, ...]
    experts: tuple[FileName, ...]
    expert_optims: tuple[FileName, ...]

    def path(self, name: FileName) -> Path:
        """Returns where a file lies."""
        return self.root / name.name


def read_directory(root: Path) -> Directory:
    """Lists a directory and sorts the names in it. Opens nothing."""
    names = [found for name in list_names(root) if (found := parse_name(name)) is not None]

    def pick(kind: Kind) -> tuple[FileName, ...]:
        return tuple(sorted((name for name in names if name.kind is kind), key=_order))

    return Directory(
        root,
        pick(Kind.MODEL),
        pick(Kind.OPTIM),
        pick(Kind.LAYER),
        pick(Kind.EXPERT),
        pick(Kind.EXPERT_OPTIM),
    )


def _order(name: FileName) -> tuple[int, int, int, int, str]:
    return (name.mp, -1 if name.dp is None else name.dp, name.layer or 0, name.expert or 0, name.name)


def looks_like(root: Path) -> str | None:
    """Returns why a directory looks like a native DeepSpeed checkpoint, None if it does not."""
    found = read_directory(root)
    if not found.models and not found.optims:
        return None
    if (root / "zero").is_dir() and not found.optims:
        return None
    if not found.optims:
        kinds = f"{found.models[0].name} and no optimizer files of ranks"
    else:
        kinds = f"{(found.models or found.optims)[0].name} and {found.optims[0].name}"
    return f"it holds {kinds}"


def choose_precision(optims: Iterable[FileName], wanted: str | None) -> tuple[tuple[FileName, ...], list[FileName]]:
    """Splits optimizer files into those of this save and those of another, when two precisions lie side by side.

    `wanted` is the prefix that the run's configuration asks for, where known.
    """
    files = list(optims)
    counts = Counter(name.precision for name in files)
    if len(counts) < 2:
        return tuple(files), []
    kept = wanted if wanted in counts else counts.most_common(1)[0][0]
    return (
        tuple(name for name in files if name.precision == kept),
        [name for name in files if name.precision != kept],
    )


def check_optimizer_files(
    directory: Directory, optims: Iterable[FileName], mp_ranks: Iterable[int], partitions: int, precision: str
) -> tuple[list[Problem], tuple[FileName, ...]]:
    """Compares the optimizer files with the number of partitions that the checkpoint itself records.

    Returns the findings, and the files of this save, those of ranks beyond it left out.
    """
    held = {(name.mp, name.dp or 0): name for name in optims}
    wanted = [(mp, dp) for mp in sorted(set(mp_ranks)) for dp in range(partitions)]
    problems = [
        _missing(directory, optim_name(mp, dp, precision), dp, partitions) for mp, dp in wanted if (mp, dp) not in held
    ]
    return problems, tuple(held[place] for place in wanted if place in held)


def check_stale(directory: Directory, names: Iterable[FileName], partitions: int) -> list[Problem]:
    """Names the files of data-parallel ranks that the save never had: an earlier one with more ranks left them."""
    stale = [name for name in names if name.dp is not None and name.dp >= partitions]
    if not stale:
        return []
    shown = ", ".join(name.name for name in stale[:6]) + (f" and {len(stale) - 6} more" if len(stale) > 6 else "")
    return [
        Problem(
            "SR-ZERO-STALE",
            f"{len(stale)} files are of ranks that this save never had: {shown}",
            severity=Severity.ERROR,
            where={"file": str(directory.root / stale[0].name), "rank": stale[0].dp},
            expected=f"{partitions} data-parallel ranks",
            found=f"rank {max(name.dp or 0 for name in stale)}",
            hint="an earlier save with more ranks wrote to the same place. DeepSpeed's own converters read every file "
            "they find and give wrong values without an error: move these away first",
        )
    ]


def check_other_precision(directory: Directory, others: Iterable[FileName]) -> list[Problem]:
    """Names optimizer files of another precision than the run's."""
    names = [name.name for name in others]
    if not names:
        return []
    return [
        Problem(
            "SR-ZERO-STALE",
            f"{len(names)} optimizer files are of a save in another precision, {names[0]} among them",
            where={"file": str(directory.root / names[0])},
            hint="two saves were written to the same place: move the files of the older one away",
        )
    ]


def _missing(directory: Directory, name: str, dp: int, partitions: int) -> Problem:
    return Problem(
        "SR-FILE-MISSING",
        f"the optimizer file of rank {dp} of {partitions} is not there",
        where={"file": str(directory.root / name), "rank": dp},
        hint="a part of every flattened group is lost with it: moments and, beyond rounding, weights. Restore it; "
        "if ranks wrote to disks of their own, gather every rank's files into one directory first",
    )

"""What only the values of a native checkpoint show: flipped bits, files of another step or rank, rebuilt masters."""

from __future__ import annotations

from collections.abc import Callable

from samerun.core.state import Role
from samerun.errors import Problem, Severity, has_errors
from samerun.formats.base import PayloadCheck
from samerun.formats.deepspeed.values import (
    Odd,
    Readable,
    check_checksums,
    compare_masters,
    compare_replicas,
    find_rounded,
    rounded_problem,
)
from samerun.formats.zero.assemble import Assembled
from samerun.formats.zero.swaps import tells_last_rank


def check_values(
    checkpoint: Readable, assembled: Assembled, advance: Callable[[int], None] | None = None
) -> PayloadCheck:
    """Reads every byte: checksums, copies that differ, masters against weights, rounding. `advance` counts bytes."""
    source = assembled.source
    problems = check_checksums(source.state_files(), source.files, advance)
    broken = bool(problems)
    replicas = compare_replicas(checkpoint, assembled.replicas, source.files)
    problems += [_replica(label, odd) for label, odd in replicas.items()]
    masters = compare_masters(checkpoint, assembled.placements, source.files)
    problems += [_masters(masters)] if masters.tensors else []
    problems += _rounded(checkpoint, assembled)
    doubts = [] if problems else [*check_dated(assembled), *check_ranked(assembled)]
    count = sum(len(file.archive.records) for file in source.state_files())
    intact = False if broken else None if problems or doubts or has_errors(source.problems) else True
    return PayloadCheck(count, count, intact, (*problems, *doubts))


def _rounded(checkpoint: Readable, assembled: Assembled) -> list[Problem]:
    """Finds masters that were rebuilt from weights."""
    trained = {
        entry.key.fqn: entry.dtype for entry in checkpoint.state.tensors.values() if entry.key.role is Role.PARAM
    }
    rounded = find_rounded(checkpoint, assembled.placements, assembled.source.files, trained)
    coarse = sorted({trained[key.partition(":")[2]].name for key in rounded.tensors})
    return rounded_problem(rounded, " or ".join(coarse), "SR-ZERO-ROUNDED")


def check_dated(assembled: Assembled) -> list[Problem]:
    """Says when nothing dates a file: no counter inside, and no second copy of its values to compare with.

    Below stage 3 model files and masters were compared, so a file with either is dated by the other.
    """
    source = assembled.source
    counted = {(mp, dp) for mp, dp, _ in assembled.flat.steps}
    open_files = [
        optim.file.path for place, optim in source.optims.items() if place not in counted and source.stage == 3
    ]
    masters = bool(assembled.flat.masters)
    if not masters:
        open_files += [file.path for file in (*source.layers.values(), *source.experts.values())]
    if not open_files:
        return []
    return [
        Problem(
            "SR-FILE-GENERATION-OPEN",
            f"{len(open_files)} files hold no counter that says of which save they are",
            severity=Severity.NOTE,
            where={"file": str(open_files[0])},
            hint="every checksum agrees; a file left from another save of this run would look the same",
        )
    ]


def check_ranked(assembled: Assembled) -> list[Problem]:
    """Says when nothing tells which rank wrote which file. At stage 3 only padding does, and only of the last ranks."""
    source = assembled.source
    if source.stage != 3 or source.degrees.dp == 1 or (source.degrees.dp == 2 and tells_last_rank(source)):
        return []
    return [
        Problem(
            "SR-ZERO-RANKOPEN",
            "nothing in the files says which rank wrote which: files of stage 3 under each other's names look the same",
            severity=Severity.NOTE,
            where={"file": str(source.root)},
            hint="every checksum agrees. If files were never renamed there is nothing to do; a digest taken by the job "
            "when it saved would decide it",
        )
    ]


def _replica(label: str, odd: Odd) -> Problem:
    buffer = label.startswith(Role.BUFFER.value)
    flat = label.endswith("flat buffers")
    if flat:
        return _masters(odd)
    return Problem(
        "SR-ZERO-REPLICA",
        f"{'buffers' if buffer else 'tensors'} that ranks share differ in {len(odd.tensors)} cases: {odd.text()}",
        severity=Severity.WARNING if buffer else Severity.ERROR,
        where={"file": odd.worst(), "tensor": next(iter(odd.tensors))},
        hint="running statistics may differ by rank; a resume keeps one rank's"
        if buffer
        else "tied weights, and weights that every tensor-parallel rank holds, must be equal; one rank's file is of "
        "another save, or the ranks had drifted apart before",
    )


def _masters(odd: Odd) -> Problem:
    return Problem(
        "SR-ZERO-MASTER",
        f"weights are not what the optimizer's masters round to in {len(odd.tensors)} tensors: {odd.text()}",
        where={"file": odd.worst(), "tensor": next(iter(odd.tensors))},
        expected="equal values",
        found=f"{sum(odd.files.values())} of {odd.compared} pieces differ, {odd.files[odd.worst()]} in that file",
        hint="model and optimizer files are of different saves or ranks; DeepSpeed would go on from the masters. Use "
        "another tag",
    )

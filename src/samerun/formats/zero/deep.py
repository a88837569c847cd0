"""What only the values of a native checkpoint show: flipped bits, files of another step or rank, rebuilt masters."""

from __future__ import annotations

from samerun.core.state import Role
from samerun.errors import Problem, Severity
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


def check_values(checkpoint: Readable, assembled: Assembled) -> list[Problem]:
    """Reads every byte and returns every finding: checksums, copies that differ, masters against weights, rounding."""
    files = assembled.source.files
    problems = check_checksums(assembled.source.state_files(), files)
    for label, odd in compare_replicas(checkpoint, assembled.replicas, files).items():
        problems.append(_replica(label, odd))
    odd = compare_masters(checkpoint, assembled.placements, files)
    problems += [_masters(odd)] if odd.tensors else []
    trained = {
        entry.key.fqn: entry.dtype for entry in checkpoint.state.tensors.values() if entry.key.role is Role.PARAM
    }
    rounded = find_rounded(checkpoint, assembled.placements, files, trained)
    coarse = sorted({trained[key.partition(":")[2]].name for key in rounded.tensors})
    return [*problems, *rounded_problem(rounded, " or ".join(coarse), "SR-ZERO-ROUNDED")]


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
        found=f"{sum(odd.files.values())} of {odd.compared} pieces differ, {odd.files[odd.worst()]} of them in that file",
        hint="model and optimizer files are of different saves or ranks; DeepSpeed would go on from the masters. Use "
        "another tag",
    )

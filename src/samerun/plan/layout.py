"""What a layout does to the tensors of a checkpoint, from their shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.errors import Problem, Severity
from samerun.plan.memory import ROOT_UNIT, unit_of

_NAMED = 3
"""Names that a finding spells out before it counts the rest."""


def check_layout(state: LogicalState, layout: Layout, source: Layout | None = None) -> list[Problem]:
    """Returns what `layout` does to the parameters: empty and padded shards, cuts that do not divide, idle stages."""
    params = [entry for entry in state.tensors.values() if entry.key.role is Role.PARAM]
    problems = [*_check_shards(params, layout)]
    if layout.tp > 1:
        problems += _check_tp(params, layout.tp)
    if layout.pp > 1:
        problems += _check_pp(params, layout.pp)
    if layout.ep > 1:
        problems += _check_ep(params, layout.ep)
    if source == layout:
        problems.append(
            Problem(
                "SR-PLAN-SAME-LAYOUT",
                f"source and destination are both {layout}: nothing moves",
                severity=Severity.NOTE,
                where={"key": "destination.layout"},
                hint="what follows is then a check of the plain resume",
            )
        )
    return problems


def _check_shards(params: Iterable[TensorEntry], layout: Layout) -> Iterator[Problem]:
    """Rows are dealt in chunks of ceil(rows / shards), so the last ranks can come away with less or nothing."""
    shards = layout.dp_shard * layout.cp
    empty, uneven = list[str](), list[str]()
    for entry in params:
        rows = entry.shape[0] if entry.shape else 1
        chunk = -(-rows // shards)
        if chunk * (shards - 1) >= rows and shards > 1:
            empty.append(entry.key.fqn)
        elif rows % shards:
            uneven.append(entry.key.fqn)
    if empty:
        yield _note("SR-PLAN-EMPTY-SHARDS", f"at {shards} shards some ranks hold nothing of", empty)
    if uneven:
        yield _note("SR-PLAN-UNEVEN", f"at {shards} shards the last rank holds less than the others of", uneven)


def _note(code: str, text: str, names: list[str]) -> Problem:
    return Problem(
        code,
        f"{text} {_some(names)}",
        severity=Severity.NOTE,
        where={"key": "destination.layout"},
        hint="FSDP2 handles both; converters and hand-written loaders that assume equal shards do not",
    )


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _check_tp(params: Iterable[TensorEntry], tp: int) -> Iterator[Problem]:
    matrices = [entry for entry in params if len(entry.shape) >= 2]
    if uncut := [entry.key.fqn for entry in matrices if entry.shape[0] % tp and entry.shape[1] % tp]:
        yield Problem(
            "SR-PLAN-TP",
            f"tp={tp} divides neither of the leading dimensions of {_some(uncut)}",
            severity=Severity.WARNING,
            where={"key": "destination.layout.tp"},
            hint="leave these modules out of the tensor-parallel plan, pad them (vocabulary), or take another tp",
        )


def _check_pp(params: Iterable[TensorEntry], pp: int) -> Iterator[Problem]:
    blocks = {unit for entry in params if (unit := unit_of(entry.key.fqn)) != ROOT_UNIT}
    if len(blocks) < pp:
        yield Problem(
            "SR-PLAN-PP",
            f"{len(blocks)} blocks cannot fill {pp} pipeline stages",
            where={"key": "destination.layout.pp"},
            expected=f"at most {max(len(blocks), 1)}",
            found=pp,
        )
    elif len(blocks) % pp:
        yield Problem(
            "SR-PLAN-PP",
            f"{len(blocks)} blocks over {pp} pipeline stages are uneven",
            severity=Severity.WARNING,
            where={"key": "destination.layout.pp"},
            hint="the memory estimate deals them as evenly as it goes; the job's own split may differ",
        )


def _check_ep(params: Iterable[TensorEntry], ep: int) -> Iterator[Problem]:
    counts = _expert_counts(params)
    if not counts:
        yield Problem(
            "SR-PLAN-EP",
            f"ep={ep}, but no parameter's name says that it belongs to experts",
            where={"key": "destination.layout.ep"},
            expected=1,
            found=ep,
        )
    if bad := sorted(name for name, count in counts.items() if count % ep):
        yield Problem(
            "SR-PLAN-EP",
            f"ep={ep} does not divide the number of experts of {_some(bad)}",
            where={"key": "destination.layout.ep"},
            expected=f"a divisor of {counts[bad[0]]}",
            found=ep,
        )


def _expert_counts(params: Iterable[TensorEntry]) -> dict[str, int]:
    """Returns the number of experts by the name of what holds them: numbered ones counted, stacked ones by dim 0."""
    counts: dict[str, int] = {}
    for entry in params:
        parts = entry.key.fqn.split(".")
        if "experts" not in parts[:-1]:
            continue
        at = parts.index("experts")
        number = parts[at + 1]
        holder = ".".join(parts[: at + 1])
        count = int(number) + 1 if number.isdecimal() else (entry.shape[0] if entry.shape else 1)
        counts[holder] = max(counts.get(holder, 0), count)
    return counts

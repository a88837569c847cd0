"""A rehearsal: both layouts on CPU processes, with a reduced copy, because the machines of the real run are gone.

What it can show is that this code, on these layouts, resumes: it holds as far as the copy is like the real run. Where
the real checkpoint can be read, what must be alike is compared: how many ranks wrote it, and what its optimizer keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samerun.core.state import LogicalState, Role
from samerun.errors import Problem, SamerunError, Severity
from samerun.manifest.models import Manifest

_MOVES = frozenset({"lr", "initial_lr", "step", "params", "param_names"})
"""Hyperparameters that a schedule moves, or that are no setting."""


def check_rehearsal(manifest: Manifest, base: Path, copy: LogicalState) -> list[Problem]:
    """Returns in what the reduced copy is not like the run that it stands for; nothing if the move is the real one.

    Args:
        manifest: the decided manifest.
        base: the folder that its paths are relative to.
        copy: the reduced copy's state.
    """
    rehearsal = manifest.control.rehearsal
    if rehearsal is None:
        return []
    told = _told(manifest)
    place = base / rehearsal.of
    if not place.exists():
        return [told, _unseen(rehearsal.of, "there is no such file here")]
    from samerun.formats.detect import open_checkpoint

    try:
        opened = open_checkpoint(place)
    except SamerunError as error:
        return [told, _unseen(rehearsal.of, error.problems[0].message)]
    try:
        return [told, *_check_alike(manifest, opened.state, copy)]
    finally:
        opened.close()


def _told(manifest: Manifest) -> Problem:
    rehearsal = manifest.control.rehearsal
    reduced = "; ".join(f"{name} {what}" for name, what in rehearsal.reduced.items()) if rehearsal else ""
    kept = ", ".join(rehearsal.kept) if rehearsal else ""
    return Problem(
        "SR-RUN-REHEARSED",
        f"this is a rehearsal of {rehearsal.of if rehearsal else ''} with a reduced copy ({reduced}); kept: {kept}",
        Severity.NOTE,
        where={"stage": "inspect", "key": "control.rehearsal"},
        hint="it shows that this code resumes on these layouts; the real move is still to be checked when it is made",
    )


def _unseen(of: str, why: str) -> Problem:
    return Problem(
        "SR-RUN-REHEARSED",
        f"the run that this stands for was not looked at: {of}: {why}",
        Severity.NOTE,
        where={"stage": "inspect", "key": "control.rehearsal.of"},
        hint="give the path of its checkpoint, and its ranks and its optimizer are compared with the copy's",
    )


def _check_alike(manifest: Manifest, real: LogicalState, copy: LogicalState) -> Iterator[Problem]:
    ranks = (real.topology.world_size, manifest.source.world_size)
    if ranks[0] is not None and ranks[0] != ranks[1]:
        yield _unlike("the number of ranks that wrote it", *ranks)
    if _slots(real) != _slots(copy):
        yield _unlike("what the optimizer keeps of each parameter", sorted(_slots(real)), sorted(_slots(copy)))
    settings = (_settings(real), _settings(copy))
    if all(settings) and settings[0] != settings[1]:
        yield _unlike("the hyperparameters of the optimizer's groups", *settings)
    types = (_types(real), _types(copy))
    if types[0] != types[1]:
        yield _unlike("the element types of its parameters", *types)


def _slots(state: LogicalState) -> frozenset[str]:
    return frozenset(entry.key.slot or "" for entry in state.tensors.values() if entry.key.role is Role.OPTIM)


def _settings(state: LogicalState) -> list[dict[str, str]]:
    groups: list[Mapping[str, Any]] = [group.hyperparameters for group in state.groups if group.params]
    return [{name: repr(value) for name, value in sorted(group.items()) if name not in _MOVES} for group in groups]


def _types(state: LogicalState) -> list[str]:
    found = {entry.dtype.name for entry in state.tensors.values() if entry.key.role in (Role.PARAM, Role.MASTER)}
    return sorted(found)


def _unlike(what: str, real: Any, copy: Any) -> Problem:
    return Problem(
        "SR-RUN-REHEARSAL",
        f"the reduced copy is not like the run that it stands for: {what}",
        where={"stage": "inspect", "key": "control.rehearsal"},
        expected=real,
        found=copy,
        hint="reduce only sizes: layers, widths, data. Layouts, optimizer and types are what is rehearsed",
    )

"""Ordinary tensors that every rank saved for itself under FSDP1: parts of flat parameters, or replicas."""

from __future__ import annotations

from collections.abc import Sequence

from samerun.errors import Problem, Severity
from samerun.formats.statedict.flat import has_flat, place_local
from samerun.formats.statedict.ranks import Merged, Plain, replicate, same_content, substitute
from samerun.formats.statedict.saved import SavedState
from samerun.formats.statedict.stored import Stored
from samerun.formats.statedict.unflatten import Known
from samerun.stores.local import MappedFiles


def place_ranks(
    merged: Merged, ranks: list[int], files: MappedFiles, saved: SavedState, known: Known | None = None
) -> frozenset[str] | None:
    """Replaces the ordinary tensors in the merged tree by what they are. Findings go to `saved`.

    Returns the names of parameters where the files tell them. `known` are shapes that other files tell, by name.
    """
    if not has_flat(merged.tree):
        saved.problems += _check_replicas(merged.plain, files)
        merged.tree = substitute(merged.tree, lambda plain: replicate(plain.parts))
        return None
    local = place_local(merged.tree, merged.plain, ranks, known)
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

"""Whether an average of the model (EMA, SWA) fits the model, is there where it should be, and is no copy of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import Checkpoint

_SHOWN = 4
_COUNTS = frozenset({"n_averaged", "num_updates"})  # kept among the tensors by some


def check_averages(state: LogicalState) -> list[Problem]:
    """Compares an average's tensors with the model's, by name: shapes, and which of the two lacks some."""
    averages = {entry.key.fqn: (key, entry) for key, entry in state.tensors.items() if entry.key.role is Role.EMA}
    model: dict[str, TensorEntry] = {}
    for role in (Role.MASTER, Role.BUFFER, Role.PARAM):
        model |= {entry.key.fqn: entry for entry in state.tensors.values() if entry.key.role is role}
    if not averages or not model:
        return []
    problems = [
        _shape_differs(key, model[fqn], entry)
        for fqn, (key, entry) in averages.items()
        if fqn in model and entry.shape != model[fqn].shape
    ]
    known = {alias for entry in model.values() for alias in entry.aliases} | model.keys()
    extra = [fqn for fqn in averages if fqn not in known and not fqn.startswith("#") and fqn not in _COUNTS]
    extra = [fqn for fqn in extra if not _is_qualified(fqn, known)]
    trained = [fqn for group in state.groups for fqn in group.params if fqn in model]
    lacking = [fqn for fqn in trained if fqn not in averages]
    if extra or (lacking and not any(fqn.startswith("#") for fqn in averages)):
        problems.append(_names_differ(extra, lacking, len(averages)))
    return problems


def _is_qualified(fqn: str, known: Collection[str]) -> bool:
    """Whether what follows some dot in a name is a known one: further averages' names begin with their own."""
    at = fqn.find(".")
    while at >= 0 and fqn[at + 1 :] not in known:
        at = fqn.find(".", at + 1)
    return at >= 0


def check_copied(checkpoint: Checkpoint, digests: Mapping[str, str]) -> list[Problem]:
    """Finds an average that is the model itself, bit for bit. Reads averages until one value differs.

    `digests` are those of the checkpoint's tensors by key.
    """
    from samerun.verify.state.digest import digest_tensor

    state = checkpoint.state
    update = state.progress.update
    if update is not None and update < 2:
        return []  # averages start as copies, and warm-ups keep them so for an update
    pairs = [(key, f"param:{entry.key.fqn}") for key, entry in state.tensors.items() if entry.key.role is Role.EMA]
    pairs = [(key, other) for key, other in pairs if other in state.tensors]
    for key, other in pairs:
        try:
            if digest_tensor(checkpoint, key, as_key=other) != digests.get(other):
                return []
        except FormatError:
            return []
    return [_copied(pairs[0][0], len(pairs), update)] if pairs else []


def _shape_differs(key: str, param: TensorEntry, entry: TensorEntry) -> Problem:
    return Problem(
        "SR-EMA-SHAPE",
        "an average has another shape than the tensor that it is the average of",
        where={"tensor": key},
        expected=list(param.shape),
        found=list(entry.shape),
        hint="it is of another model, or of another save; restore it from the source, or start the average anew",
    )


def _names_differ(extra: Sequence[str], lacking: Sequence[str], count: int) -> Problem:
    told = [f"has {len(extra)} tensors that the model does not: {_some(extra)}"] if extra else []
    told += [f"lacks {len(lacking)} that the optimizer trains: {_some(lacking)}"] if lacking else []
    return Problem(
        "SR-EMA-NAMES",
        f"the average of {count} tensors {' and '.join(told)}",
        severity=Severity.WARNING,
        where={"tensor": f"ema:{(extra or lacking)[0]}"},
        hint="what it lacks would start from the model's values or from those of a new model; loaders that are not "
        "strict say nothing",
    )


def _copied(key: str, count: int, update: int | None) -> Problem:
    return Problem(
        "SR-EMA-SAME",
        f"the average is the model itself: all {count} tensors are equal bit for bit"
        + (f" after {update} updates" if update is not None else ""),
        severity=Severity.WARNING,
        where={"tensor": key},
        hint="one was saved in place of the other (Lightning's callbacks copy the average into the model when training "
        "ends), or the average was never updated; a run that resumes here goes on from that one, with the model's "
        "moments",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

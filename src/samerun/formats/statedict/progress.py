"""How far the run was, from every place of a saved state that counts; and whether these places agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samerun.core.state import RecordedProgress
from samerun.errors import Problem, Severity

_SECTIONS = (
    "", "progress", "train", "train_state", "trainer", "trainer_state", "training", "training_state", "counters",
    "state", "meta", "metadata", "run", "extra_state", "client_state",
)  # fmt: skip
_COUNTERS: dict[str, tuple[str, ...]] = {
    "update": (
        "update",
        "updates",
        "num_updates",
        "global_step",
        "global_steps",
        "step",
        "iteration",
        "iter",
        "iter_num",
        "completed_steps",
    ),
    "samples": ("samples", "samples_seen", "consumed_samples", "consumed_train_samples", "num_samples"),
    "tokens": ("tokens", "tokens_seen", "consumed_tokens", "num_tokens"),
    "epoch": ("epoch", "current_epoch", "epochs"),
}
_LOADERS_OWN = frozenset({"step", "iteration", "iter", "iter_num", "num_samples"})


def read_progress(objects: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[RecordedProgress, tuple[Problem, ...]]:
    """Collects the counters. `objects` are by flat dotted name, `data` by section. Disagreement is a finding."""
    found: dict[str, int] = {}
    problems: list[Problem] = []
    for counter, names in _COUNTERS.items():
        values = list(_values(names, objects, data))
        if values:
            found[counter] = values[0][1]
        others = [value for value in values if value[1] != values[0][1]]
        if others:
            problems.append(_disagree(counter, [values[0], *others]))
    return RecordedProgress(**found), tuple(problems)


def _values(names: tuple[str, ...], objects: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for section in _SECTIONS:
        for name in names:
            value = objects.get(f"{section}.{name}" if section else name)
            if (count := _count(value)) is not None:
                yield (f"{section}.{name}" if section else name), count
                break
    for section, node in data.items():
        for name in names:
            value = node.get(name) if isinstance(node, Mapping) and name not in _LOADERS_OWN else None
            if (count := _count(value)) is not None:
                yield f"{section}.{name}", count
                break


def _count(value: Any) -> int | None:
    """Returns what a value counts: nothing unless it is whole and not negative (an epoch of 0.2 counts none)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value >= 0 and (isinstance(value, int) or value.is_integer()) else None


def _disagree(counter: str, values: list[tuple[str, int]]) -> Problem:
    return Problem(
        "SR-CNT-DISAGREE",
        f"places that count {counter}s disagree: {', '.join(f'{name} = {value}' for name, value in values)}",
        severity=Severity.WARNING if counter == "epoch" else Severity.ERROR,
        where={"key": values[1][0]},
        expected=values[0][1],
        found=values[1][1],
        hint="find out which one the training script goes on from before resuming",
    )

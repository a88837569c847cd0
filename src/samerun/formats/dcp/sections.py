"""Everything in a DCP state dict that is neither model nor optimizer: scheduler, RNG, data, progress, other objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from samerun.core.plain import is_blank
from samerun.core.schedule import number_schedulers
from samerun.core.state import RecordedProgress
from samerun.errors import Problem, Severity
from samerun.formats.dcp.roles import looks_random

_SCHEDULER = re.compile(r"sched", re.IGNORECASE)
_DATA = re.compile(r"(?:^|_)(?:data|dataset|dataloader|loader|sampler|batch_?sampler)(?:$|_|\d)", re.IGNORECASE)
_ABOUT_DATA = re.compile(
    r"_(?:meta\w*|info|names?|paths?|dirs?|conf\w*|cfg|\w*args|params|spec|version)$", re.IGNORECASE
)
_PROGRESS = ("progress", "train", "train_state", "trainer", "trainer_state", "training", "training_state", "counters",
             "state", "meta", "metadata", "run", "extra_state")  # fmt: skip
_COUNTERS: dict[str, tuple[str, ...]] = {
    "update": ("update", "updates", "num_updates", "global_step", "global_steps", "step", "iteration", "iter"),
    "samples": ("samples", "samples_seen", "consumed_samples", "consumed_train_samples", "num_samples"),
    "tokens": ("tokens", "tokens_seen", "consumed_tokens", "num_tokens"),
    "epoch": ("epoch", "current_epoch", "epochs"),
}
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sections:
    """The recognised parts. Each mapping is by the section's original dotted name."""

    scheduler: Mapping[str, Any] | None = None
    rng: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    progress: RecordedProgress = field(default_factory=RecordedProgress)
    problems: tuple[Problem, ...] = ()


def plant(items: Iterable[tuple[tuple[str | int, ...], Any]]) -> Tree:
    """Builds the nested state dict back from (path, value) pairs. What has the indices 0, 1, ... in paths is a list."""
    tree: Tree = {}
    indexed: list[tuple[Tree, str]] = []  # where a container may be a list, outer before inner
    for path, value in items:
        node = tree
        for part, below in pairwise(path):
            name = str(part)
            if name not in node:
                node[name] = {}
                if isinstance(below, int):
                    indexed.append((node, name))
            inner = node[name]
            if not isinstance(inner, dict):
                inner = node[name] = {"": inner}
            node = inner
        node[str(path[-1])] = value
    for holder, name in reversed(indexed):
        inner = holder[name]
        if isinstance(inner, dict) and inner.keys() == {str(i) for i in range(len(inner))}:
            holder[name] = [inner[str(i)] for i in range(len(inner))]
    return tree


def recognise(tree: Tree) -> Sections:
    """Sorts the sections of a state dict by name and content. Sections may lie a level or two down (`app.sched`)."""
    scheduler: Mapping[str, Any] | None = None
    rng: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for name, last, node in _sections(tree):
        listed = [item for item in node if _is_scheduler(last, item)] if isinstance(node, list) else []
        if listed and len(listed) == len(node):
            scheduler = number_schedulers(listed) if scheduler is None else scheduler
        elif isinstance(node, Mapping) and _is_scheduler(last, node):
            scheduler = cast("Mapping[str, Any]", node) if scheduler is None else scheduler
        elif is_blank(node):
            continue
        elif looks_random(last) and not _is_seed(node):
            rng[name] = node
        elif _is_loader(last, node):
            data[name] = node
    progress, problems = read_progress(tree, data)
    return Sections(scheduler, rng, data, progress, problems)


def _sections(tree: Tree, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    for saved, node in tree.items():
        key = str(saved)  # inside an object that was saved whole it may be anything
        name = f"{prefix}{key}"
        recognised = looks_random(key) or _is_loader(key, node) or _is_scheduler(key, node)
        yield name, key, node
        if isinstance(node, dict) and depth < 2 and not recognised:
            yield from _sections(node, f"{name}.", depth + 1)


def _is_seed(node: Any) -> bool:
    """Whether a value that is called like a generator's is a plain one: a seed is no state."""
    return isinstance(node, int | float | str)


def _is_loader(name: str, node: Any) -> bool:
    """Whether a value is the state of a data loader or sampler. What names or describes the data is none."""
    return bool(_DATA.search(name)) and not _ABOUT_DATA.search(name) and not isinstance(node, str)


def _is_scheduler(name: str, node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    counted = "last_epoch" in node and any(key in node for key in ("base_lrs", "_step_count", "_last_lr"))
    return counted or (bool(_SCHEDULER.search(name)) and bool(node))


def read_progress(tree: Tree, data: Mapping[str, Any]) -> tuple[RecordedProgress, tuple[Problem, ...]]:
    """Collects the counters of a run from the places that keep them; places that disagree are a finding."""
    places: list[tuple[str, Mapping[str, Any]]] = []
    for name, last, node in _sections(tree):
        if isinstance(node, dict) and (last.lower() in _PROGRESS or name in data):
            places.append((name, node))
    places.sort(key=lambda place: (place[0] in data, _PROGRESS.index(place[0]) if place[0] in _PROGRESS else 99))
    places.append(("", {key: value for key, value in tree.items() if not isinstance(value, dict)}))
    found: dict[str, int] = {}
    problems: list[Problem] = []
    for counter, names in _COUNTERS.items():
        values = list(_counter_values(counter, names, places, data))
        if values:
            found[counter] = values[0][1]
        others = [value for value in values if value[1] != values[0][1]]
        if others:
            problems.append(_disagree(counter, [values[0], *others]))
    return RecordedProgress(**found), tuple(problems)


def _counter_values(
    counter: str, names: tuple[str, ...], places: list[tuple[str, Mapping[str, Any]]], data: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    for place, node in places:
        for name in names:
            if place in data and name in ("step", "iteration", "iter", "num_samples"):
                continue  # a loader's own counters, per rank or per epoch
            value = node.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                yield (f"{place}.{name}" if place else name), value
                break


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

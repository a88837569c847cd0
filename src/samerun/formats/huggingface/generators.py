"""States of random generators, rank by rank, under the names of either library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samerun.core.mesh import Layout
from samerun.errors import Problem, Severity

_RANK = re.compile(r"(?:rank|_)(\d{1,6})$")
# One generator under the names that scripts, Trainer (`rng_state_N.pth`) and Accelerate (`random_states_N.pkl`) use.
_NAMES = {
    "python": "python", "random_state": "python", "random": "python",
    "numpy": "numpy", "numpy_random_seed": "numpy",
    "cpu": "cpu", "torch": "cpu", "torch_manual_seed": "cpu",
}  # fmt: skip
_TRAINER = {"python": "python", "numpy": "numpy", "cpu": "cpu"}
_ACCELERATE = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}


@dataclass(slots=True)
class Generators:
    """By rank, the generators by the three names of `_TRAINER`, and what else the source keeps with them.

    `taken` are the names of the sections that are wholly in here.
    """

    ranks: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    others: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    taken: list[str] = field(default_factory=list[str])

    def for_trainer(self) -> dict[str, dict[str, Any]]:
        """Returns file names and contents. Trainer of one process reads `rng_state.pth`, others a file per rank."""
        found = {rank: _named(states, _TRAINER) | self.others[rank] for rank, states in self.ranks.items()}
        if list(found) == [0]:
            return {"rng_state.pth": found[0]}
        return {f"rng_state_{rank}.pth": states for rank, states in found.items()}

    def for_accelerate(self, passes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns file names and contents. `passes` counts, by stem, how often `accumulate` was entered."""
        files: dict[str, dict[str, Any]] = {}
        for rank, states in self.ranks.items():
            stem = f"random_states_{rank}"
            counted = passes.get(stem)
            step = counted.get("passes") if isinstance(counted, Mapping) else None
            files[f"{stem}.pkl"] = (
                ({} if step is None else {"step": step}) | _named(states, _ACCELERATE) | self.others[rank]
            )
        return files


def _named(states: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[name]: value for name, value in states.items()}


def collect_generators(rng: Mapping[str, Any]) -> Generators:
    """Sorts the states of a checkpoint's generators by rank. What is not of the usual form is left where it is."""
    found = Generators()
    single = [name for name in rng if not _RANK.search(name)]
    numbered = len(single) < len(rng)
    for name, value in rng.items():
        if not isinstance(value, Mapping):
            continue
        match = _RANK.search(name)
        if value and all(re.fullmatch(r"rank\d{1,6}", str(key)) for key in value):
            parts = {int(str(key)[4:]): states for key, states in value.items()}
        elif match:
            parts = {int(match[1]): value}
        elif numbered or len(single) > 1:  # one stream beside those of the ranks is nobody's
            continue
        else:
            parts = {0: value}
        if all(_usual(states) for states in parts.values()) and not parts.keys() & found.ranks.keys():
            found.taken.append(name)
            for rank, states in parts.items():
                found.ranks[rank] = {_NAMES[key]: states[key] for key in states if key in _NAMES}
                found.others[rank] = {key: states[key] for key in states if key not in _NAMES}
    found.ranks = dict(sorted(found.ranks.items()))
    return found


def _usual(states: Any) -> bool:
    return isinstance(states, Mapping) and {_NAMES.get(str(key)) for key in states} >= {"python", "numpy", "cpu"}


def check_generators(found: Generators, layout: Layout | None) -> list[Problem]:
    """Reports generators that a job of the layout would not find, or would not use."""
    if layout is None or not found.ranks or layout.world_size == len(found.ranks):
        return []
    return [
        Problem(
            "SR-HFW-RNG",
            "there is a generator state for each rank of the source, and the job will have another number of ranks",
            severity=Severity.WARNING,
            expected=layout.world_size,
            found=len(found.ranks),
            hint="ranks without a file seed theirs anew, with a log line at most; files of further ranks are not read. "
            "Dropout and augmentation draw other numbers than the source would have",
        )
    ]

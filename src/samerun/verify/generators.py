"""Which random number generators a checkpoint holds states of, and of which ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from samerun.core.state import LogicalState

TORCH_BYTES = 5056
"""Length of `torch.get_rng_state()`: MT19937 with its counters (torch 2.13.0)."""
CUDA_BYTES = 16
"""Length of a CUDA generator's state: Philox seed and offset."""

_RANK = re.compile(r"(?:^|rank|_)(\d+)$")


def saved_generators(state: LogicalState) -> dict[str, list[str]]:
    """Returns the kinds of generators by rank, and under `every` those saved without a rank.

    Kinds are `torch`, `cuda`, `numpy`, `python`, `megatron-tracker` (CUDA streams by name, of tensor- and
    expert-parallel regions), and `other`. They are told by what a state looks like, not by its name.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for path, kind in _leaves((), state.rng):
        ranks = [match[1] for part in path if (match := _RANK.search(part))]
        found[ranks[0] if ranks else "every"].add(kind)
    order = sorted(found, key=lambda rank: (rank == "every", int(rank) if rank.isdigit() else 0))
    return {rank: sorted(found[rank]) for rank in order}


def describe_generators(generators: Mapping[str, list[str]]) -> str:
    """Returns the kinds with the ranks that have them, in one line.

    >>> describe_generators({"0": ["numpy", "torch"], "1": ["numpy", "torch"], "2": ["torch"]})
    'numpy, torch of ranks 0, 1; torch of ranks 2'
    """
    by_kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for rank, kinds in generators.items():
        by_kinds[tuple(kinds)].append(rank)
    return "; ".join(f"{', '.join(kinds)} of {_ranks(ranks)}" for kinds, ranks in by_kinds.items())


def _ranks(ranks: list[str]) -> str:
    if ranks == ["every"]:
        return "no rank in particular"
    shown = ", ".join(ranks) if len(ranks) <= 4 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)})"
    return f"ranks {shown}"


def _leaves(path: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    if (kind := _kind(node)) is not None:
        tracked = any("tracker" in part for part in path)
        yield path, "megatron-tracker" if tracked else kind
    elif isinstance(node, Mapping):
        for name, below in cast("Mapping[Any, Any]", node).items():
            yield from _leaves((*path, *str(name).split(".")), below)
    elif isinstance(node, list | tuple):
        per_rank = not any("cuda" in part for part in path)  # a list of CUDA states is by device of one rank
        for number, below in enumerate(cast("list[Any]", node)):
            yield from _leaves((*path, str(number)) if per_rank else path, below)


def _kind(node: Any) -> str | None:
    if isinstance(node, np.ndarray):
        array = cast("np.ndarray[Any, Any]", node)
        return {TORCH_BYTES: "torch", CUDA_BYTES: "cuda"}.get(array.nbytes, "other")
    if isinstance(node, Mapping):
        return "numpy" if "bit_generator" in node else None
    if isinstance(node, list | tuple):
        items = cast("list[Any]", node)
        if items and isinstance(items[0], str):
            return "numpy"
        if len(items) == 3 and isinstance(items[1], list | tuple) and len(cast("list[Any]", items[1])) == 625:
            return "python"
        return None
    return "other"

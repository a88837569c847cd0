"""Which random number generators a checkpoint holds states of, and of which ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

from samerun.core.generators import TRACKER, generator_digest, generator_kind
from samerun.core.state import LogicalState

_RANK = re.compile(r"(?:^|rank|_)(\d+)$")
EVERY = "every"
"""Stands for the rank of states that were saved without one."""


def saved_generators(state: LogicalState) -> dict[str, list[str]]:
    """Returns the kinds of generators by rank, and under `every` those saved without a rank.

    Kinds are `torch`, `cuda`, `numpy`, `python`, `megatron-tracker` (CUDA streams by name, of tensor- and
    expert-parallel regions), and `other`. They are told by what a state looks like, not by its name.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for path, node in _leaves((), state.rng):
        name = _name(path, node)
        found[_rank(path)].add("megatron-tracker" if name.startswith(TRACKER) else name)
    order = sorted(found, key=lambda rank: (rank == EVERY, int(rank) if rank.isdigit() else 0))
    return {rank: sorted(found[rank]) for rank in order}


def saved_digests(state: LogicalState) -> dict[str, dict[str, set[str]]]:
    """Returns the digests of saved states by generator and rank (`every`: without one).

    Generators are named as a job names its own (`samerun.train.objects.generator_digests`): `torch`, `cuda`, `numpy`,
    `python`, and `megatron:NAME` for those of Megatron's tracker. A rank has several digests where it saved the states
    of several devices.
    """
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path, node in _leaves((), state.rng):
        if (digest := generator_digest(node)) is not None:
            found[_name(path, node)][_rank(path)].add(digest)
    return {name: dict(ranks) for name, ranks in found.items()}


def describe_generators(generators: Mapping[str, list[str]]) -> str:
    """Returns the kinds with the ranks that have them, in one line.

    >>> describe_generators({"0": ["numpy", "torch"], "1": ["numpy", "torch"], "2": ["torch"]})
    'numpy, torch of ranks 0, 1; torch of rank 2'
    >>> describe_generators({"0": ["torch"], "1": ["torch"], "every": ["torch"]})
    'torch of ranks 0, 1 and of no rank in particular'
    """
    by_kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for rank, kinds in generators.items():
        by_kinds[tuple(kinds)].append(rank)
    return "; ".join(f"{', '.join(kinds)} of {_ranks(ranks)}" for kinds, ranks in by_kinds.items())


def _ranks(ranks: list[str]) -> str:
    own = [rank for rank in ranks if rank != EVERY]
    shown = ", ".join(own) if len(own) <= 4 else f"{own[0]} to {own[-1]} ({len(own)})"
    said = [f"rank{'s' * (len(own) > 1)} {shown}"] if own else []
    if len(own) < len(ranks):
        said.append("no rank in particular")
    return " and of ".join(said)


def _rank(path: tuple[str, ...]) -> str:
    return next((match[1] for part in path if (match := _RANK.search(part))), EVERY)


def _name(path: tuple[str, ...], node: Any) -> str:
    if any("tracker" in part for part in path):
        return TRACKER + path[-1]
    return generator_kind(node) or "other"


def _leaves(path: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if generator_kind(node) is not None:
        yield path, node
    elif isinstance(node, Mapping):
        for name, below in cast("Mapping[Any, Any]", node).items():
            yield from _leaves((*path, *str(name).split(".")), below)
    elif isinstance(node, list | tuple):
        per_rank = not any("cuda" in part for part in path)  # a list of CUDA states is by device of one rank
        for number, below in enumerate(cast("list[Any]", node)):
            yield from _leaves((*path, str(number)) if per_rank else path, below)

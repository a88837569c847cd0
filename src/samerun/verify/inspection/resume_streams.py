"""Whether random number generators and data positions are saved, and for the ranks that need them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from samerun.core.state import LogicalState
from samerun.errors import Problem, Severity
from samerun.plan.position import check_phases

_SHOWN = 4


def check_streams(state: LogicalState) -> list[Problem]:
    """Checks random number generators and data positions: there, per rank where they must be, for every rank."""
    problems: list[Problem] = []
    if not state.rng:
        problems.append(
            Problem(
                "SR-RNG-MISSING",
                "no random number generator state is saved",
                severity=Severity.WARNING,
                hint="dropout and augmentation will draw other numbers; declare rng: expected-to-change",
            )
        )
    problems += _check_rng_ranks(state)
    problems += _check_data(state)
    problems += check_phases(state)
    return problems


def ranks_in(section: str, names: Iterable[str]) -> set[int]:
    """Returns the ranks that names in a section carry: `rng_rank3`, `rng.3`, `dataloader.dp_rank_3`."""
    ranks: set[int] = set()
    for name in names:
        tail = name.rpartition(".")[2] if "." in name else name.removeprefix(section)
        match = re.search(r"(\d+)$", tail)
        if match:
            ranks.add(int(match.group(1)))
    return ranks


def _check_rng_ranks(state: LogicalState) -> list[Problem]:
    world_size = state.topology.world_size
    told = any(problem.code == "SR-RNG-LOST" for problem in state.problems)
    if not state.rng or not world_size or world_size < 2 or told:
        return []
    ranks = ranks_in("", state.rng)
    for node in state.rng.values():
        if isinstance(node, dict) and node and all(re.search(r"\d+$", str(key)) for key in node):
            ranks |= ranks_in("", [str(key) for key in node])
        elif isinstance(node, list) and len(node) > 1 and all(isinstance(item, dict | np.ndarray) for item in node):
            ranks |= set(range(len(node)))
    if not ranks:
        return [
            Problem(
                "SR-RNG-SHARED",
                f"one random number generator state is saved for {world_size} ranks",
                severity=Severity.WARNING,
                where={"key": next(iter(state.rng))},
                expected=world_size,
                found=1,
                hint="either every rank saved under the same name and one of them survived (save it under a name per "
                "rank), or a run of one process was converted for more, and the new ranks have no stream yet",
            )
        ]
    if ranks == set(range(world_size)):
        return []
    return [
        Problem(
            "SR-RNG-RANKS",
            f"random number generator states are of {_ranks(ranks)}, and the checkpoint is one of {world_size} ranks",
            severity=Severity.WARNING,
            where={"key": next(iter(state.rng))},
            expected=world_size,
            found=len(ranks),
            hint="ranks without a state start a stream of their own: expected where a conversion changed their number "
            "(declare rng: expected-to-change), otherwise states were lost, or are left over from another save",
        )
    ]


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown} alone" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


def _check_data(state: LogicalState) -> list[Problem]:
    if not state.data:
        samples = state.progress.samples
        known = f"; {samples} samples are counted, which fixes the place in a known order" if samples else ""
        return [
            Problem(
                "SR-DATA-MISSING",
                f"no sampler or data loader state is saved{known}",
                severity=Severity.WARNING,
                hint="a data loader made anew starts the epoch again: samples are seen twice. Save the sampler's state",
            )
        ]
    problems: list[Problem] = []
    for name, node in state.data.items():
        ranks = ranks_in("", [str(key) for key in node if "rank" in str(key)]) if isinstance(node, dict) else set[int]()
        if ranks and state.progress.samples is None:
            problems.append(
                Problem(
                    "SR-DATA-PERRANK",
                    f"the data loader's position is kept per rank, for {len(ranks)} ranks, without a global count",
                    severity=Severity.WARNING,
                    where={"key": name},
                    hint="on another number of ranks samples are replayed or skipped unless it is rewritten to a "
                    "global position (samples committed so far in the whole run)",
                )
            )
    return problems

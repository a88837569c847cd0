"""The load proof: what a job holds after loading, against the checkpoint that it loaded.

Every check runs and every difference is reported, each with the two values. Tensors are compared by their additive
digests (computed here from the checkpoint's bytes, in the job where the tensors are), everything else by value.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from samerun.errors import CorruptCheckpoint, Problem
from samerun.verify.load.loaded import DigestCache, Loaded
from samerun.verify.load.objects import check_config, check_objects, check_rng, check_scheduler
from samerun.verify.load.settings import check_counters, check_groups, check_optimizer_class, check_update
from samerun.verify.load.streams import check_policy
from samerun.verify.load.tensors import check_ranks, check_tensors, check_ties
from samerun.verify.state.match import match_tensors

if TYPE_CHECKING:
    from samerun.formats.base import Checkpoint


def check_loaded(
    checkpoint: Checkpoint,
    found: Mapping[str, Any],
    *,
    declare: Mapping[str, Any],
    optimizer: str | None = None,
    digests: DigestCache | None = None,
    threads: int = 2,
) -> list[Problem]:
    """Returns every difference between a job's captured state and the checkpoint that it loaded.

    Args:
        checkpoint: the checkpoint, opened. All tensors that the job holds too are read once.
        found: the job's "state" line (`CapturedState.to_json()`, plus `update` if known).
        declare: the manifest's `declare` table; `exact` for what it does not mention. A difference in a part that is
            `expected-to-change` is a note; one that is `bounded` is compared with its bound.
        optimizer: class name of the optimizer that the manifest names, if it names one.
        digests: digests computed by an earlier call for the same checkpoint; new ones are added.
        threads: tensors digested at once.

    Raises:
        CorruptCheckpoint: if a tensor of the checkpoint is not whole or cannot be read; every such tensor is listed.
    """
    match = match_tensors(checkpoint.state, found["tensors"])
    loaded = Loaded(checkpoint, found, declare, match, digests if digests is not None else {})
    _digest_ahead(loaded, threads)
    return [
        *check_ranks(loaded),
        *check_tensors(loaded),
        *check_ties(loaded),
        *check_counters(loaded),
        *check_update(loaded),
        *check_groups(loaded),
        *check_optimizer_class(loaded, optimizer),
        *check_scheduler(loaded),
        *check_objects(loaded),
        *check_config(loaded),
        *check_rng(loaded),
        *check_policy(found, has_saved=bool(checkpoint.state.rng)),
    ]


def _digest_ahead(loaded: Loaded, threads: int) -> None:
    """Digests, a few at a time, every tensor whose digest will be asked for."""
    wanted: list[tuple[str, str]] = []
    for pair in loaded.match.pairs:
        entry, fact = loaded.state.tensors[pair.saved], loaded.found["tensors"][pair.key]
        if list(entry.shape) == list(fact["shape"]) and entry.dtype.name == fact["dtype"]:
            wanted += [(saved, pair.key) for saved in (pair.saved, *pair.copies)]

    def work(names: tuple[str, str]) -> tuple[Problem, ...]:
        try:
            loaded.digest(*names)
        except CorruptCheckpoint as error:
            return error.problems
        return ()

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        problems = [problem for found in pool.map(work, wanted) for problem in found]
    if problems:
        raise CorruptCheckpoint(problems)

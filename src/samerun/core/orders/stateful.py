"""What torchdata's `StatefulDataLoader` saved on each rank, as one position (torchdata 0.11.0, map-style data).

A rank's state counts the batches which that rank's loader had given out. It says neither how many ranks there were nor
how large a batch was, and it says "given out", not "committed": save it right after the last update's batches were
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from samerun.core.order import GlobalOrder
from samerun.errors import FormatError, Problem


def batches_given(state: Mapping[str, Any]) -> int:
    """Returns how many batches of the current epoch a rank's `StatefulDataLoader.state_dict()` counts.

    Raises:
        FormatError: for anything that is not such a state (SR-ORDER-STATE).
    """
    snapshot = state.get("_snapshot")
    if isinstance(snapshot, Mapping):  # with workers
        parts = [cast("Mapping[str, Any]", snapshot).get("_snapshot_step"), state.get("_steps_since_snapshot", 0)]
    else:
        parts = [state.get("_num_yielded")]
    if not all(isinstance(part, int) and part >= 0 for part in parts):
        raise FormatError(
            Problem(
                "SR-ORDER-STATE",
                "this is no state of a StatefulDataLoader",
                expected="_num_yielded, or _snapshot with _snapshot_step",
                found=", ".join(sorted(state)) or "nothing",
                hint="give each rank's own state, as `StatefulDataLoader.state_dict()` returned it",
            )
        )
    return sum(cast("list[int]", parts))


def stateful_position(order: GlobalOrder, epoch: int, states: Sequence[Mapping[str, Any]], batch_size: int) -> int:
    """Returns the position in `order` that all ranks' states together mean.

    Args:
        order: the order of the loader's sampler at the number of ranks that saved: `DistributedSamplerOrder` with
            `num_replicas=len(states)`.
        epoch: the epoch in which the states were saved; a `DistributedSampler` does not save it.
        states: one per data-parallel rank, all of them.
        batch_size: the loader's, per rank.

    Raises:
        FormatError: if the ranks do not tell one position (SR-ORDER-RANKS), or a state cannot be read.
    """
    given = [batches_given(state) for state in states]
    if len(set(given)) != 1:
        raise FormatError(
            Problem(
                "SR-ORDER-RANKS",
                "the ranks' loaders were not at the same batch when they were saved",
                where={"rank": next(rank for rank, count in enumerate(given) if count != given[0])},
                expected=given[0],
                found=given,
                hint="save every rank between the same two updates; a rank's state may belong to another checkpoint",
            )
        )
    return min(given[0] * batch_size * len(states), order.num_samples(epoch))

"""Where in a declared order a checkpoint stands, if a sampler of samerun's saved it, at whatever place in the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from samerun.core.plain import plain
from samerun.core.state import LogicalState
from samerun.errors import FormatError, Problem


def saved_positions(state: LogicalState) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (dotted place, saved state) of every sampler of samerun's in a checkpoint."""
    yield from _search("", plain(_nested({**state.objects, **state.data}), "data"))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Opens dotted names, in which some formats keep what was nested."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = str(name).split(".")
        node: Any = tree
        for parent in parents:
            below = node.setdefault(parent, {})
            node = below if isinstance(below, dict) else {}
        node[leaf] = value
    return tree


def _search(place: str, node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(node, Mapping):
        return
    body = cast("Mapping[str, Any]", node)
    if "samples_in_epoch" in body and "order" in body:
        yield place, body
        return
    for name, below in body.items():
        yield from _search(f"{place}.{name}" if place else str(name), below)


def samples_left(state: LogicalState) -> int | None:
    """Returns how many positions of the epoch in progress are not committed, or None if no checkpointed order tells."""
    from samerun.core.orders import order_from_identity
    from samerun.core.progress import Committed

    for _, body in saved_positions(state):
        try:
            at = Committed.from_json(body)
        except FormatError:
            continue
        order = order_from_identity(body["order"]) if isinstance(body["order"], Mapping) else None
        if order is not None:
            return max(order.num_samples(at.epoch) - at.samples_in_epoch, 0)
    return None


def check_phases(state: LogicalState) -> list[Problem]:
    """Returns SR-ORDER-PHASE for a checkpoint that was saved within an update."""
    positions = list(saved_positions(state))
    if not positions:
        return []
    from samerun.core.progress import check_phase  # with all orders behind it, a tenth of an inspection's time

    return [problem for _, body in positions for problem in check_phase(body)]

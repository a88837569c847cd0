"""What another layout would do to a state's tensors, from shapes alone: uneven and empty shards, streams to re-deal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role
from samerun.errors import Problem, Severity

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Destination:
    """How parameters would be cut at `layout`. Both name parameters; FSDP2 cuts the first dimension in ceil(n / k)."""

    layout: Layout
    uneven: tuple[str, ...]
    empty: tuple[str, ...]
    largest_rank_elements: int
    smallest_rank_elements: int

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form, part of the inspect document."""
        return {
            "layout": self.layout.to_dict(short=True),
            "world_size": self.layout.world_size,
            "batch_replicas": self.layout.batch_replicas,
            "uneven": list(self.uneven),
            "empty": list(self.empty),
            "elements_per_rank": {"largest": self.largest_rank_elements, "smallest": self.smallest_rank_elements},
        }


def plan_destination(state: LogicalState, layout: Layout) -> Destination:
    """Returns how FSDP2 would cut every parameter along its first dimension into dp_shard x cp parts."""
    parts = layout.dp_shard * layout.cp
    uneven: list[str] = []
    empty: list[str] = []
    largest = smallest = 0
    for entry in state.tensors.values():
        if entry.key.role is not Role.PARAM:
            continue
        rows = entry.shape[0] if entry.shape else 1
        width = entry.num_elements // rows if rows else 0
        chunk = -(-rows // parts)
        filled = -(-rows // chunk) if chunk else 0
        last = rows - chunk * (parts - 1) if filled == parts else 0
        largest += chunk * width
        smallest += max(last, 0) * width
        if filled < parts:
            empty.append(entry.key.fqn)
        elif rows % parts:
            uneven.append(entry.key.fqn)
    return Destination(layout, tuple(uneven), tuple(empty), largest, smallest)


def check_destination(state: LogicalState, destination: Destination) -> list[Problem]:
    """Returns what the user should know before loading at that layout."""
    layout = destination.layout
    parts = layout.dp_shard * layout.cp
    problems: list[Problem] = []
    if destination.empty:
        problems.append(
            _note(
                "SR-TO-EMPTY",
                f"at {layout}, {len(destination.empty)} parameters have fewer rows than {parts} shards: some ranks "
                f"hold nothing of {_some(destination.empty)}",
                destination.empty[0],
                "FSDP2 handles empty shards; code that reads local shards, such as a norm or a hook, must too",
            )
        )
    if destination.uneven:
        problems.append(
            _note(
                "SR-TO-UNEVEN",
                f"at {layout}, {len(destination.uneven)} parameters do not divide into {parts} equal shards: "
                f"{_some(destination.uneven)}",
                destination.uneven[0],
                "FSDP2 pads the last shard when it communicates; the padding is not part of any value",
            )
        )
    problems += _check_tensor_parallel(state, layout)
    if state.topology.world_size and state.topology.world_size != layout.world_size:
        problems += _check_streams(state, layout)
    return problems


def _check_tensor_parallel(state: LogicalState, layout: Layout) -> list[Problem]:
    if layout.tp == 1:
        return []
    stuck = [
        entry.key.fqn
        for entry in state.tensors.values()
        if entry.key.role is Role.PARAM and len(entry.shape) > 1 and all(size % layout.tp for size in entry.shape)
    ]
    if not stuck:
        return []
    return [
        _note(
            "SR-TO-TP",
            f"no dimension of {len(stuck)} matrices divides by tp={layout.tp}: {_some(stuck)}",
            stuck[0],
            "a tensor-parallel plan must leave these whole, or cut them unevenly",
        )
    ]


def _check_streams(state: LogicalState, layout: Layout) -> list[Problem]:
    if not state.rng:
        return []
    return [
        _note(
            "SR-TO-RNG",
            f"random number generator states are those of {state.topology.world_size} ranks; {layout.world_size} are "
            "wanted",
            "",
            "streams per rank do not carry over: declare rng: expected-to-change, or use streams keyed by sample",
        )
    ]


def _note(code: str, message: str, tensor: str, hint: str) -> Problem:
    return Problem(code, message, severity=Severity.NOTE, where={"tensor": tensor} if tensor else {}, hint=hint)


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

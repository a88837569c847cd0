"""Names of experts. A rank's optimizer numbers its own experts from 0; files of experts use the global number."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from samerun.core.flat import Block
from samerun.formats.deepspeed.slices import Slice
from samerun.formats.deepspeed.states import as_count, as_dict, as_list

_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..+)")
_FUSED = re.compile(r"(.*)\.(w[123])(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer whose experts are one three-dimensional tensor per weight (AutoEP). `placement` is by rank."""

    prefix: str
    num_experts: int
    placement: Mapping[int, tuple[int, ...]]


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Returns what an expert's name begins with, the expert's number, and the rest; None for any other name.

    >>> expert_of("moe.deepspeed_experts.3.up.weight")
    ('moe.deepspeed_experts.', 3, '.up.weight')
    """
    match = _EXPERT.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def is_buffer_of_expert(place: tuple[str, int, str], buffers: Container[str]) -> bool:
    """Whether a tensor of an expert is a buffer. The first rank's file names its own buffers; it has an expert 0."""
    return f"{place[0]}0{place[2]}" in buffers


def local_experts(names: Iterable[str]) -> dict[str, int]:
    """Returns, by layer, how many experts a rank's own names count.

    >>> local_experts(["moe.deepspeed_experts.0.w", "moe.deepspeed_experts.1.w"])
    {'moe.deepspeed_experts.': 2}
    """
    counts: dict[str, int] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match:
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def global_name(name: str, counts: Mapping[str, int], ep_rank: int) -> str:
    """Returns an expert's name with its global number; other names stay.

    >>> global_name("moe.deepspeed_experts.1.w", {"moe.deepspeed_experts.": 2}, 1)
    'moe.deepspeed_experts.3.w'
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{ep_rank * counts.get(match[1], 0) + int(match[2])}{match[3]}"


def fused_layers(records: Any) -> dict[str, FusedLayer]:
    """Returns the AutoEP layers that a model file describes, by the prefix of their experts' names."""
    layers: dict[str, FusedLayer] = {}
    for record in map(as_dict, as_list(records)):
        prefix = str(record.get("expert_key_prefix", ""))
        count, held = as_count(record.get("num_experts")), as_count(record.get("num_local_experts"))
        if prefix and count and held:
            layers[prefix] = FusedLayer(prefix, count, _placement(record, count, held))
    return layers


def _placement(record: Mapping[Any, Any], count: int, held: int) -> dict[int, tuple[int, ...]]:
    """Returns which experts each rank holds: as recorded, else in order."""
    found: dict[int, tuple[int, ...]] = {}
    for rank in map(as_dict, as_list(as_dict(record.get("expert_placement")).get("ranks"))):
        number, experts = as_count(rank.get("rank")), rank.get("experts")
        if number is not None and isinstance(experts, list) and all(as_count(one) is not None for one in experts):
            found[number] = tuple(experts)
    return found or {rank: tuple(range(rank * held, (rank + 1) * held)) for rank in range(count // held)}


def fused_slice(
    name: str, shape: tuple[int, ...], layers: Mapping[str, FusedLayer], ep_rank: int
) -> tuple[str, Slice] | None:
    """Returns the whole tensor's name and a rank's part of it, for a tensor of fused experts; None for any other.

    The part of a tensor that is one expert's own has a first dimension of 1 that the tensor itself has not.
    """
    match = _FUSED.fullmatch(name)
    layer = layers.get(match[1]) if match else None
    if match is None or layer is None:
        return None
    if match[3] is not None:  # one expert's own tensor, from its own file: a row of the whole one
        origin = (0,) * len(shape)
        block = Block((0, *origin), (int(match[3]), *origin), (1, *shape))
        return f"{match[1]}.{match[2]}", Slice((layer.num_experts, *shape), (block,))
    held = layer.placement.get(ep_rank, ())
    if not shape or len(held) != shape[0] or any(expert >= layer.num_experts for expert in held):
        return None
    inner = (0,) * (len(shape) - 1)
    blocks = tuple(Block((number, *inner), (expert, *inner), (1, *shape[1:])) for number, expert in enumerate(held))
    return name, Slice((layer.num_experts, *shape[1:]), blocks)

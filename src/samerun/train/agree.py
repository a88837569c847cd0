"""How ranks agree on what they know: small collectives over descriptions, never over tensor values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Variant:
    """One distinct description and the ranks (of the default group) that gave it."""

    value: Any
    ranks: tuple[int, ...]


def world() -> tuple[int, int]:
    """Returns (rank, world size) of the default process group; (0, 1) without one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def collective_device() -> torch.device:
    """Returns a device on which the default group can communicate."""
    import torch
    import torch.distributed as dist

    backend = str(dist.get_backend()).lower()
    if "gloo" in backend or "mpi" in backend or not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type, torch.get_device_module(kind).current_device()) if kind else torch.device("cpu")


def add_over_ranks(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the elementwise int64 sum over all ranks, modulo 2**64. Collective: every rank calls it."""
    if world()[1] == 1:
        return numbers
    import torch.distributed as dist

    there = numbers.to(collective_device())
    dist.all_reduce(there)
    return there.to(numbers.device)


def gather_number(number: int) -> list[int]:
    """Returns every rank's 63-bit number, by rank. Collective."""
    import torch

    rank, size = world()
    numbers = torch.zeros(size, dtype=torch.int64)
    numbers[rank] = number
    return add_over_ranks(numbers).tolist()


def distinct(value: Any) -> list[Variant]:
    """Returns the distinct JSON-able descriptions that ranks have, in order of the lowest rank that has each.

    Collective. Costs eight bytes per rank, plus one broadcast per distinct description: ranks that agree (all of
    them, usually; one per pipeline stage otherwise) do not send theirs.
    """
    rank, size = world()
    text = json.dumps(value, sort_keys=True)
    if size == 1:
        return [Variant(json.loads(text), (0,))]
    import torch.distributed as dist

    fingerprint = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    ranks_of: dict[int, list[int]] = {}
    for other, number in enumerate(gather_number(fingerprint)):
        ranks_of.setdefault(number, []).append(other)
    variants: list[Variant] = []
    for ranks in ranks_of.values():
        box: list[Any] = [text if rank == ranks[0] else None]
        dist.broadcast_object_list(box, src=ranks[0], device=collective_device())
        variants.append(Variant(json.loads(box[0]), tuple(ranks)))
    return variants

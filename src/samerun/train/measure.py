"""Measuring what every rank holds, each at its own indices, and adding it up over ranks and replicas."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from samerun.core.digest import MASK, to_hex, whole_digest
from samerun.core.dtype import parse_dtype
from samerun.core.plain import plain
from samerun.errors import Problem, SamerunError, VerificationError
from samerun.train.agree import add_over_ranks, distinct, world
from samerun.train.boxpart import Part
from samerun.train.digest import digest_shard, dtype_of, sum_unordered
from samerun.train.facts import Replica, TensorFact
from samerun.train.named import (
    COUNTER_SLOTS,
    named_average,
    optimizer_masters,
    optimizer_slots,
    own_buffers,
    own_parameters,
)
from samerun.train.shards import Shard, local_shard, whole_shape

if TYPE_CHECKING:
    import torch

# Columns of the one matrix that is reduced: a row per replica of each tensor.
_DIGEST, _ELEMENTS, _NONFINITE, _NONZERO, _VALUE, _UNORDERED = range(6)
LARGEST_UNORDERED = 1 << 26
"""Elements of the largest tensor whose sum without places is taken: it takes as long as the digest."""

_BITS = 62  # presence bits per int64 word: sums of distinct bits stay positive


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    key: str
    dtype: str
    shard: Shard | None  # None: this rank is not part of the tensor's mesh
    shape: tuple[int, ...]
    trainable: bool | None = None
    aliases: tuple[str, ...] = ()

    @property
    def cuts(self) -> list[list[Any]] | None:
        return self.shard.describe_cuts() if self.shard is not None else None


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    held: tuple[Held, ...]
    problems: tuple[Problem, ...]

    def describe(self) -> list[list[Any]]:
        return [[h.key, list(h.shape), h.dtype, h.trainable, list(h.aliases), h.cuts] for h in self.held]


def read_local(model: Any, optimizer: Any, average: Any = None) -> Local:
    held: list[Held] = []
    problems: list[Problem] = []
    rank, _ = world()

    def hold(
        key: str, tensor: torch.Tensor | Part, trainable: bool | None = None, aliases: tuple[str, ...] = ()
    ) -> None:
        try:
            shard = local_shard(tensor, rank=rank)
        except SamerunError as error:
            problems.extend(error.problems)
            return
        held.append(Held(key, dtype_of(tensor).name, shard, whole_shape(tensor), trainable, aliases))

    try:
        parameters, buffers = own_parameters(model), own_buffers(model)
    except SamerunError as error:
        return Local((), error.problems)
    for name, tensor in parameters.tensors.items():
        hold(f"param:{name}", tensor, bool(tensor.requires_grad), parameters.aliases.get(name, ()))
    for name, tensor in buffers.tensors.items():
        hold(f"buffer:{name}", tensor, None, buffers.aliases.get(name, ()))
    for name, slot, value in optimizer_slots(model, optimizer) if optimizer is not None else ():
        if (tensor := _as_tensor(value)) is not None:
            hold(f"optim.{slot}:{name}", tensor)
    for name, master in optimizer_masters(model, optimizer) if optimizer is not None else ():
        hold(f"master:{name}", master)
    for name, tensor in named_average(average).items():
        hold(f"ema:{name}", tensor)
    return Local(tuple(held), tuple(problems))


def _as_tensor(value: Any) -> torch.Tensor | Part | None:
    import torch

    if isinstance(value, torch.Tensor | Part):
        return value
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else None


def is_tensor(key: str) -> bool:
    head, _, _ = key.partition(":")
    role, _, slot = head.partition(".")
    return not (role == "optim" and slot in COUNTER_SLOTS)


def agree_that_all_could(local: Local) -> None:
    """Raises on every rank if any rank has a problem, so that none is left waiting in a collective."""
    variants = distinct([problem.to_json() for problem in local.problems])
    bodies = [(body, variant.ranks) for variant in variants for body in variant.value]
    if bodies:
        raise VerificationError(
            Problem(
                body["code"],
                body["message"],
                where={**body["where"], "rank": ranks[0]},
                hint=body["hint"],
                expected=body.get("expected"),
                found=body.get("found"),
            )
            for body, ranks in bodies
        )


@dataclass(frozen=True, slots=True)
class Described:
    shape: tuple[int, ...]
    dtype: str
    trainable: bool | None
    aliases: tuple[str, ...]
    cuts: list[list[Any]] | None = field(default=None, compare=False)  # not known to ranks outside of the mesh


def measure(local: Local, catalogue: Mapping[str, Described]) -> dict[str, list[list[int]]]:
    """Returns by key, for each replica, [lead rank, digest, elements, nonfinite, nonzero, value bits, unordered].

    Collective.
    """
    import torch

    leads = _replica_leads(local, list(catalogue))
    first_row: dict[str, int] = {}
    num_rows = 0
    for key in catalogue:
        first_row[key] = num_rows
        num_rows += len(leads[key])
    matrix = torch.zeros((num_rows, 6), dtype=torch.int64)
    rank, _ = world()
    for held in local.held:
        if held.shard is not None and held.shape == catalogue[held.key].shape:
            row = first_row[held.key] + leads[held.key].index(held.shard.lead)
            matrix[row] = torch.tensor(_measure_shard(held.key, held.shard, rank), dtype=torch.int64)
    rows = add_over_ranks(matrix).tolist()
    return {
        key: [[lead, *rows[first_row[key] + number]] for number, lead in enumerate(leads[key])] for key in catalogue
    }


def _replica_leads(local: Local, keys: list[str]) -> dict[str, list[int]]:
    """Returns the lead rank of every replica of every key. Collective: one bit per key and rank is added up."""
    import torch

    rank, size = world()
    number = {key: index for index, key in enumerate(keys)}
    bits = torch.zeros((len(keys), -(-size // _BITS)), dtype=torch.int64)
    for held in local.held:
        if held.shard is not None and held.shard.lead == rank:
            bits[number[held.key], rank // _BITS] = 1 << (rank % _BITS)
    words = add_over_ranks(bits).tolist()
    return {
        key: [other for other in range(size) if words[number[key]][other // _BITS] >> (other % _BITS) & 1]
        for key in keys
    }


def _measure_shard(key: str, shard: Shard, rank: int) -> list[int]:
    import torch

    local = shard.local
    digest = digest_shard(key, shard)
    nonfinite = 0
    if local.is_floating_point() or local.is_complex():
        wide = local.float() if local.element_size() == 1 else local
        nonfinite = local.numel() - int(torch.isfinite(wide).sum())
    nonzero = int(
        torch.count_nonzero(local.view(torch.uint8) if str(local.dtype).startswith("torch.float8") else local)
    )
    value = _float_bits(float(local.item())) if not is_tensor(key) and local.numel() == 1 and shard.lead == rank else 0
    small = math.prod(shard.shape) <= LARGEST_UNORDERED
    unordered = _to_signed(sum_unordered(local)) if is_tensor(key) and small else 0
    return [_to_signed(digest), local.numel(), nonfinite, nonzero, value, unordered]


def _float_bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _to_signed(digest: int) -> int:
    return digest - (1 << 64) if digest >> 63 else digest


def tensor_fact(key: str, rows: list[list[int]], described: Described) -> TensorFact:
    dtype = parse_dtype(described.dtype)
    replicas = [Replica(row[0], whole_digest(row[1 + _DIGEST] & MASK, key, dtype, described.shape)) for row in rows]
    most = _majority([replica.digest for replica in replicas])
    of_most = [row for row, replica in zip(rows, replicas, strict=True) if replica.digest == most]
    unordered = of_most[0][1 + _UNORDERED] if of_most else 0
    elements = math.prod(described.shape)
    return TensorFact(
        key=key,
        shape=described.shape,
        dtype=described.dtype,
        digest=most,
        unordered=to_hex(unordered & MASK) if elements <= LARGEST_UNORDERED else None,
        replicas=len(replicas),
        odd=tuple(replica for replica in replicas if replica.digest != most),
        nonfinite=max((row[1 + _NONFINITE] for row in rows), default=0),
        nonzero=max((row[1 + _NONZERO] for row in rows), default=0),
        missing_elements=max((elements - row[1 + _ELEMENTS] for row in rows), default=elements),
        trainable=described.trainable,
        aliases=described.aliases,
        cuts=described.cuts,
        lead=replicas[0].lead if replicas else 0,
    )


def _majority(values: list[Any]) -> Any:
    return max(values, key=lambda value: (values.count(value), -values.index(value))) if values else to_hex(0)


def counter_fact(rows: list[list[int]], described: Described) -> dict[str, Any]:
    values = [struct.unpack("<d", struct.pack("<q", row[1 + _VALUE]))[0] for row in rows]
    most = _majority(values) if values else None
    body: dict[str, Any] = {"value": plain(most), "dtype": described.dtype, "replicas": len(rows)}
    odd = [{"rank": row[0], "value": plain(value)} for row, value in zip(rows, values, strict=True) if value != most]
    return {**body, "odd": odd} if odd else body

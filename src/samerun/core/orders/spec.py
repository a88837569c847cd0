"""Orders as documents: what no line of text can hold (shard tables, lengths, lists of ids), and any order inside.

A document is plain JSON data. An order that text can name is that text (`"keyed:samples=97,seed=5"`); the others are
objects with their `kind`:

    {"kind": "explicit", "epochs": [[4, 2, 0], ...]}
    {"kind": "shards", "lengths": {"a.bin": 10000}, "ranges": [["a.bin", 4113, 10000]], "epoch": 2, "lanes": 8,
     "seed": 0}                                                     # ranges null: all of every shard
    {"kind": "packed", "base": ORDER, "lengths": [...], "capacity": 4096}
    {"kind": "measured", "base": ORDER, "lengths": [...]}
    {"kind": "remainder", "after": ORDER, "epoch": 2, "consumed": [...]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from samerun.core.order import ExplicitOrder, GlobalOrder, SequentialOrder
from samerun.core.orders.accelerate import AccelerateOrder
from samerun.core.orders.distributed import DistributedSamplerOrder, RandomSamplerOrder
from samerun.core.orders.keyed import KeyedOrder
from samerun.core.orders.megatron import MegatronCyclicOrder, MegatronSequentialOrder
from samerun.core.orders.randperm import Draw, torch_randperm
from samerun.core.orders.read import parse_order
from samerun.core.orders.remainder import RemainderOrder
from samerun.core.orders.shards import RangeOrder, ShardRange
from samerun.core.packing import PackedOrder
from samerun.core.tokens import MeasuredSamples
from samerun.errors import Problem, UsageError

_FIELDS: dict[str, tuple[str, ...]] = {
    "explicit": ("epochs",),
    "shards": ("lengths", "ranges", "epoch", "lanes", "seed"),
    "packed": ("base", "lengths", "capacity"),
    "measured": ("base", "lengths"),
    "remainder": ("after", "epoch", "consumed"),
}


def order_from_spec(spec: Any, draw: Draw = torch_randperm) -> GlobalOrder:
    """Returns the order that a document describes; the inverse of `order_spec`.

    >>> order_from_spec({"kind": "explicit", "epochs": [[4, 2, 0]]}).ids(0, 0, 2).tolist()
    [4, 2]

    Raises:
        UsageError: for a document that describes none (SR-ORDER-TEXT).
    """
    if isinstance(spec, str):
        return parse_order(spec, draw)
    body = cast("Mapping[str, Any]", spec) if isinstance(spec, Mapping) else {}
    kind = body.get("kind")
    if kind not in _FIELDS:
        raise _unusable(f"{kind!r} is no kind of order in a document", f"text, or one of {', '.join(_FIELDS)}")
    expected = _FIELDS[kind]
    if wrong := sorted(set(expected) ^ (set(body) - {"kind"})):
        raise _unusable(f"{kind}: {', '.join(wrong)} is missing or unknown", ", ".join(expected))
    inner = {name: order_from_spec(body[name], draw) for name in ("base", "after") if name in expected}
    try:
        return _BUILD[kind]({**body, **inner})
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise _unusable(f"{kind}: {error}", ", ".join(expected)) from None


def _shards(body: Mapping[str, Any]) -> RangeOrder:
    ranges = None if body["ranges"] is None else [ShardRange(*part) for part in body["ranges"]]
    if ranges is not None and any(part.stop > body["lengths"][part.shard] for part in ranges):
        raise ValueError("a range goes beyond its shard")
    return RangeOrder(body["lengths"], ranges, epoch=body["epoch"], lanes=body["lanes"], seed=body["seed"])


_BUILD: dict[str, Callable[[Mapping[str, Any]], GlobalOrder]] = {
    "explicit": lambda body: ExplicitOrder(*body["epochs"]),
    "shards": _shards,
    "packed": lambda body: PackedOrder(body["base"], body["lengths"], body["capacity"]),
    "measured": lambda body: MeasuredSamples(body["base"], body["lengths"]),
    "remainder": lambda body: RemainderOrder(body["after"], body["epoch"], np.array(body["consumed"], dtype=np.int64)),
}


def order_spec(order: GlobalOrder) -> str | dict[str, Any]:
    """Returns the document of an order: to be kept beside a ledger, so that it can be audited.

    Raises:
        UsageError: for an order of another class, or with explicit seeds (SR-ORDER-TEXT).
    """
    match order:
        case ExplicitOrder():
            return {"kind": "explicit", "epochs": [epoch.tolist() for epoch in order.epochs]}
        case RangeOrder():
            ranges = [[part.shard, part.start, part.stop] for part in order.ranges]
            lengths = dict(order.lengths)
            plain = {"epoch": order.epoch, "lanes": order.lanes, "seed": order.seed}
            return {"kind": "shards", "lengths": lengths, "ranges": ranges, **plain}
        case PackedOrder():
            lengths = order.lengths.tolist()
            return {"kind": "packed", "base": order_spec(order.base), "lengths": lengths, "capacity": order.capacity}
        case MeasuredSamples():
            return {"kind": "measured", "base": order_spec(order.base), "lengths": order.lengths.tolist()}
        case RemainderOrder():
            consumed = order.consumed.tolist()
            return {"kind": "remainder", "after": order_spec(order.after), "epoch": order.epoch, "consumed": consumed}
        case _:
            return _text(order)


def _text(order: GlobalOrder) -> str:
    match order:
        case SequentialOrder(length):
            return f"sequential:samples={length}"
        case KeyedOrder(length, seed):
            return f"keyed:samples={length},seed={seed}"
        case DistributedSamplerOrder(length, seed, frozen_epoch=False):
            cut = f"replicas={order.num_replicas},drop_last={_word(order.drop_last)}"
            loader = f"loader_batch={order.loader_batch or 0}"
            return f"distributed:samples={length},seed={seed},shuffle={_word(order.shuffle)},{cut},{loader}"
        case RandomSamplerOrder(length, ()):
            return f"random:samples={length},seed={order.first_seed}"
        case AccelerateOrder(SequentialOrder(length) | RandomSamplerOrder(length, ())):
            seed = order.base.first_seed if isinstance(order.base, RandomSamplerOrder) else 0
            shuffle = _word(isinstance(order.base, RandomSamplerOrder))
            cut = f"batch={order.batch_size},processes={order.num_processes},split={_word(order.split_batches)}"
            more = f"dispatch={_word(order.dispatch_batches)},even={_word(order.even_batches)}"
            drop = f"drop_last={_word(order.drop_last)}"
            return f"accelerate:samples={length},seed={seed},shuffle={shuffle},{cut},{more},{drop}"
        case MegatronSequentialOrder(length, micro, ranks, drop_last):
            return f"megatron-sequential:samples={length},micro={micro},dp={ranks},drop_last={_word(drop_last)}"
        case MegatronCyclicOrder(length, micro, ranks, sharding):
            return f"megatron-cyclic:samples={length},micro={micro},dp={ranks},sharding={_word(sharding)}"
        case _:
            raise _unusable(f"{type(order).__name__} has no document", "an order of samerun.core.orders without seeds")


def _word(value: bool) -> str:
    return "yes" if value else "no"


def _unusable(message: str, expected: str) -> UsageError:
    hint = "samerun.core.orders.order_spec writes such a document"
    return UsageError(Problem("SR-ORDER-TEXT", message, expected=expected, hint=hint))

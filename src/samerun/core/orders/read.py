"""Orders from text and from a saved identity: what a command line and an audit need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from samerun.core.order import GlobalOrder, SequentialOrder
from samerun.core.orders.accelerate import AccelerateOrder
from samerun.core.orders.distributed import DistributedSamplerOrder, RandomSamplerOrder
from samerun.core.orders.keyed import KeyedOrder
from samerun.core.orders.megatron import MegatronCyclicOrder, MegatronSequentialOrder
from samerun.core.orders.randperm import Draw, torch_randperm
from samerun.errors import Problem, UsageError

_Values = Mapping[str, Any]
_Build = Callable[[_Values, Draw], GlobalOrder]

ORDER_FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "sequential": ({"samples": None}, "0, 1, 2, ..."),
    "keyed": ({"samples": None, "seed": 0}, "samerun's keyed permutation"),
    "distributed": (
        {"samples": None, "seed": 0, "shuffle": True, "replicas": 1, "drop_last": False, "loader_batch": 0},
        "torch's DistributedSampler; replicas is the number that the run began with",
    ),
    "random": ({"samples": None, "seed": 0}, "a RandomSampler whose generator is seeded with seed + epoch"),
    "accelerate": (
        {"samples": None, "seed": 0, "shuffle": True, "batch": None, "processes": None, "split": False}
        | {"dispatch": False, "even": True, "drop_last": False},
        "Accelerate or the Hugging Face Trainer with the seedable sampler",
    ),
    "megatron-sequential": (
        {"samples": None, "micro": 1, "dp": 1, "drop_last": True},
        "Megatron's --dataloader-type single",
    ),
    "megatron-cyclic": (
        {"samples": None, "micro": None, "dp": None, "sharding": True},
        "Megatron's --dataloader-type cyclic, at the data-parallel size it ran with",
    ),
}
"""Each kind of order that text can name: its arguments with their defaults (None: must be given), and what it is."""

_BUILD: dict[str, _Build] = {
    "sequential": lambda at, _: SequentialOrder(at["samples"]),
    "keyed": lambda at, _: KeyedOrder(at["samples"], at["seed"]),
    "distributed": lambda at, draw: DistributedSamplerOrder(
        at["samples"], at["seed"], at["shuffle"], at["drop_last"], at["replicas"], at["loader_batch"] or None, draw=draw
    ),
    "random": lambda at, draw: RandomSamplerOrder.reseeded(at["samples"], at["seed"], draw),
    "accelerate": lambda at, draw: AccelerateOrder(
        RandomSamplerOrder.reseeded(at["samples"], at["seed"], draw)
        if at["shuffle"]
        else SequentialOrder(at["samples"]),
        at["batch"],
        at["processes"],
        at["split"],
        at["dispatch"],
        at["even"],
        at["drop_last"],
    ),
    "megatron-sequential": lambda at, _: MegatronSequentialOrder(at["samples"], at["micro"], at["dp"], at["drop_last"]),
    "megatron-cyclic": lambda at, draw: MegatronCyclicOrder(
        at["samples"], at["micro"], at["dp"], at["sharding"], draw=draw
    ),
}


def parse_order(text: str, draw: Draw = torch_randperm) -> GlobalOrder:
    """Reads an order from text such as `"distributed:samples=1000,seed=0,replicas=4"`.

    >>> parse_order("sequential:samples=5").ids(0, 0, 3).tolist()
    [0, 1, 2]

    Raises:
        UsageError: naming everything in the text that is missing, unknown, repeated or unusable (SR-ORDER-TEXT).
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in ORDER_FORMS:
        raise UsageError(_problem(f"{kind!r} is no kind of order", f"one of {', '.join(ORDER_FORMS)}"))
    defaults = ORDER_FORMS[kind][0]
    values, wrong = dict(defaults), list[str]()
    given: set[str] = set()
    for part in filter(None, rest.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name not in defaults:
            wrong.append(f"{name!r} is no argument of it")
        elif name in given:
            wrong.append(f"{name} is given twice")
        elif (read := _value(defaults[name], value)) is None:
            wrong.append(f"{name} cannot be {value!r}")
        else:
            values[name] = read
        given.add(name)
    wrong += [f"{name} is missing" for name, value in values.items() if value is None and name not in given]
    if wrong:
        arguments = ", ".join(name if value is None else f"{name}={value}" for name, value in defaults.items())
        raise UsageError([_problem(f"{kind}: {each}", arguments) for each in wrong])
    try:
        return _BUILD[kind](values, draw)
    except ValueError as error:
        raise UsageError(_problem(str(error), "an order with samples in it")) from None


def _value(default: Any, text: str) -> Any:
    if isinstance(default, bool):
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower())
    return int(text) if text.isascii() and text.isdigit() else None


def _problem(message: str, expected: str) -> Problem:
    hint = "an order looks like distributed:samples=1000,seed=0,replicas=4"
    return Problem("SR-ORDER-TEXT", message, expected=expected, found=None, hint=hint)


def order_from_identity(identity: Mapping[str, Any], draw: Draw = torch_randperm) -> GlobalOrder | None:
    """Returns the order that `identity()` describes, or None for a kind whose ids its identity does not hold.

    Explicit lists, shards and remainders are known by a digest only.
    """
    found = dict(identity)
    try:
        match found.get("kind"):
            case "sequential":
                return SequentialOrder(found["num_samples"])
            case "keyed":
                order: GlobalOrder = KeyedOrder(found["num_samples"], found["seed"])
                return order if order.identity() == found else None
            case "torch-distributed":
                names = ("shuffle", "drop_last", "num_replicas", "loader_batch")
                more = {name: found[name] for name in names} | {"frozen_epoch": found.get("frozen_epoch", False)}
                return DistributedSamplerOrder(found["num_samples"], found["seed"] or 0, **more, draw=draw)
            case "torch-random":
                seeds = tuple(found.get("seeds", ()))
                return RandomSamplerOrder(found["num_samples"], seeds, found.get("seed", 0), draw)
            case "megatron-cyclic":
                names = ("micro_batch_size", "data_parallel_size", "data_sharding")
                return MegatronCyclicOrder(found["num_samples"], **{name: found[name] for name in names}, draw=draw)
            case "megatron-sequential":
                return MegatronSequentialOrder(found["num_samples"], drop_last=False)
            case _:
                return None
    except (KeyError, TypeError, ValueError):
        return None

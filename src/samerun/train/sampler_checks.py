"""What is wrong with the arguments of an `ElasticSampler`, and with the loader that it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, Sampler

from samerun.core.batch import Dealing, RampUp, check_batch
from samerun.core.order import GlobalOrder
from samerun.core.progress import Committed, LastBatch, next_update
from samerun.errors import Problem, UsageError, has_errors

Empty = Literal["list", "placeholder"]


def _invalid(name: str, found: Any, expected: str) -> Problem:
    return Problem("SR-ORDER-INVALID", f"{name} cannot be {found!r}", expected=expected, found=repr(found))


def check_choices(last_batch: str, empty: str) -> list[Problem]:
    choices = (("last_batch", last_batch, get_args(LastBatch)), ("empty", empty, get_args(Empty)))
    return [_invalid(name, value, f"one of {', '.join(known)}") for name, value, known in choices if value not in known]


def check_dealing(
    global_batch: int, replicas: int, replica: int, max_microbatch: int | None, dealing: Dealing | None
) -> list[Problem]:
    if max_microbatch is None:
        return [_invalid("max_microbatch", None, "a whole number of at least 1, unless a dealing is given")]
    problems = [problem for problem in check_batch(global_batch, replicas, max_microbatch) if has_errors([problem])]
    if problems:
        return problems
    if not 0 <= replica < replicas:
        problems.append(_invalid("replica", replica, f"0 to {replicas - 1}"))
    if dealing is not None:
        found = {"global_batch": dealing.global_batch, "replicas": dealing.replicas}
        expected = {"global_batch": global_batch, "replicas": replicas}
        problems += [
            _invalid(f"dealing.{name}", found[name], str(expected[name]))
            for name in found
            if found[name] != expected[name]
        ]
        if dealing.max_microbatch > max_microbatch:
            problems.append(_invalid("dealing.max_microbatch", dealing.max_microbatch, f"at most {max_microbatch}"))
    return problems


def check_order_arguments(order: int | GlobalOrder, seed: int, shuffle: bool) -> list[Problem]:
    if isinstance(order, int):
        return [] if order >= 1 and not isinstance(order, bool) else [_invalid("order", order, "at least one sample")]
    if seed != 0 or not shuffle:
        return [_invalid("seed and shuffle", (seed, shuffle), "left out: the order that was given has its own")]
    return []


def check_final(global_batch: int, ramp: RampUp | None) -> list[Problem]:
    if ramp is None or ramp.final == global_batch:
        return []
    return [_invalid("ramp", ramp, f"a ramp whose final batch is the global batch, {global_batch}")]


def require_some_update(order: GlobalOrder, global_batch: int, last_batch: LastBatch) -> None:
    try:
        next_update(order, Committed(), global_batch, last_batch)
    except ValueError as error:
        raise UsageError(Problem("SR-ORDER-INVALID", str(error), hint="use last_batch='keep' or 'carry'")) from None


def require_own(loader: Iterable[Any], sampler: Sampler[list[int]]) -> None:
    if getattr(getattr(loader, "dataset", None), "sampler", None) is sampler:
        return  # an `ElasticStream` of this sampler
    if isinstance(loader, DataLoader) and loader.batch_sampler is not sampler:
        raise UsageError(
            Problem(
                "SR-ORDER-LOADER",
                "the loader does not take its batches from this sampler",
                found=type(loader.batch_sampler).__name__,
                hint="DataLoader(dataset, batch_sampler=sampler), without batch_size, shuffle, sampler, drop_last; "
                "do not let Accelerate or Lightning prepare it: that cuts by rank again",
            )
        )

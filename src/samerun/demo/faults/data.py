"""Faults of the data: other samples, or the same samples elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from samerun.demo.faults.catalog import LOW, Kind, in_job
from samerun.demo.faults.wrap import wrap

Batches = list[list[int]]
Change = Callable[[Batches, Batches, Iterator[list[int]]], Iterator[list[int]]]


def _reorder(change: Change) -> None:
    """Lets `change(first, second, rest)` say what the loader hands out; the first two are the first two updates."""
    from samerun.train.sampler import ElasticSampler

    def around(original: Any, sampler: Any) -> Iterator[list[int]]:
        batches = original(sampler)
        passes = sampler.dealing.passes
        return change(list(islice(batches, passes)), list(islice(batches, passes)), batches)

    wrap(ElasticSampler, "__iter__", around)


@in_job("sampler-restart", Kind.DATA, "SR-LOAD-OBJECT", "SR-SAMPLE-REPLAYED")
def restart_sampler() -> None:
    """The sampler's position is not restored, the epoch begins again."""
    from samerun.train.sampler import ElasticSampler

    def around(original: Any, sampler: Any, state: Any) -> None:
        return

    wrap(ElasticSampler, "load_state_dict", around)


@in_job("order-redrawn", Kind.DATA, "SR-LOAD-OBJECT", "SR-SAMPLE-OTHER", "SR-SAMPLE-REPLAYED")
def redraw_order() -> None:
    """The permutation is drawn again with another seed, and the position counts in that."""
    from dataclasses import replace

    from samerun.train.sampler import ElasticSampler

    def around(original: Any, sampler: Any, state: Any) -> None:
        original(sampler, state)
        sampler.order = replace(sampler.order, seed=sampler.order.seed + 1)

    wrap(ElasticSampler, "load_state_dict", around)


@in_job("update-replayed", Kind.DATA, "SR-SAMPLE-REPLAYED", "SR-SAMPLE-OTHER")
def replay_an_update() -> None:
    """The data stand one update behind the model: a whole batch is consumed again."""
    _reorder(lambda first, second, rest: chain(first, first, second, rest))


@in_job("update-omitted", Kind.DATA, "SR-SAMPLE-OMITTED")
def omit_an_update() -> None:
    """What was read ahead before the save counts as consumed: a whole batch is passed over."""
    _reorder(lambda first, second, rest: chain(second, rest))


@in_job("updates-exchanged", Kind.DATA, "SR-SAMPLE-ORDER")
def exchange_updates() -> None:
    """The second and third update change places; over the window every sample is consumed once."""
    _reorder(lambda first, second, rest: chain(first, islice(rest, len(second)), second, rest))


@in_job("cursor-shared", Kind.DATA, "SR-SAMPLE-OVERLAP", "SR-JOB-BATCH", "SR-UPD-SAMPLES")
def share_one_cursor() -> None:
    """Every replica takes the first replica's samples."""
    from samerun.train.sampler import ElasticSampler

    def around(original: Any, sampler: Any, *args: Any, **rest: Any) -> None:
        original(sampler, *args, **{**rest, "replica": 0})

    wrap(ElasticSampler, "__init__", around)


@in_job("one-sample-changed", Kind.DATA, "SR-SAMPLE-OTHER", "SR-SAMPLE-OMITTED", "SR-SAMPLE-REPLAYED")
def change_one_sample() -> None:
    """One sample in the first update is another one: the smallest change there is."""

    def change(first: Batches, second: Batches, rest: Iterator[list[int]]) -> Iterator[list[int]]:
        (dropped, *others), *more = first
        return chain([[second[0][0] if dropped != second[0][0] else dropped, *others]], more, second, rest)

    _reorder(change)


@in_job("one-token-changed", Kind.DATA, "SR-UPD-LOSS", "SR-UPD-GRADNORM", "SR-UPD-GRADIENT", precisions=LOW)
def change_one_token() -> None:
    """One token of one sample in each pass is another one, which bfloat16 would not tell from rounding."""
    from torch.utils.data import DataLoader

    def around(original: Any, loader: Any, dataset: Any, *args: Any, **rest: Any) -> None:
        collate = rest["collate_fn"]

        def other(samples: Any) -> Any:
            batch = collate(samples)
            if batch.inputs.numel():
                batch.inputs[0, 3] = (batch.inputs[0, 3] + 1) % 256
            return batch

        original(loader, dataset, *args, **{**rest, "collate_fn": other})

    wrap(DataLoader, "__init__", around)


@in_job("tokens-changed", Kind.DATA, "SR-UPD-LOSS", "SR-EVAL-LOSS", "SR-EVAL-EXAMPLES", "SR-UPD-TOKENS")
def tokenise_otherwise() -> None:
    """The samples' identifiers are right and their tokens are not: the text was prepared again."""
    from torch.utils.data import DataLoader

    def around(original: Any, loader: Any, dataset: Any, *args: Any, **rest: Any) -> None:
        collate = rest["collate_fn"]

        def other(samples: Any) -> Any:
            batch = collate(samples)
            if batch.inputs.numel():
                batch.inputs[:, -1] = (batch.inputs[:, -1] + 1) % 256
            return batch

        original(loader, dataset, *args, **{**rest, "collate_fn": other})

    wrap(DataLoader, "__init__", around)

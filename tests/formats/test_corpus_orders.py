"""The samples that the corpus's runs consumed, by every framework, are what the orders here say."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from samerun.core.orders import (
    AccelerateOrder,
    DistributedSamplerOrder,
    MegatronSequentialOrder,
    RandomSamplerOrder,
    batches_given,
    compare_switch,
    stateful_position,
)
from samerun.core.progress import next_update, seek
from samerun.formats.detect import open_checkpoint
from support.corpus import CORPUS

SAMPLES, SEED = 97, 5
KINDS = ["distributed_nw0", "distributed_nw2", "stateful_distributed_nw0", "stateful_distributed_nw2"]

pytestmark = pytest.mark.skipif(CORPUS is None, reason="SAMERUN_CORPUS is not set")


def torch_corpus() -> Path:
    assert CORPUS is not None
    return Path(CORPUS) / "torch"


def recorded(folder: Path) -> list[list[int]]:
    """The distinct ids of each step: ranks that share a batch (TP, PP) recorded the same."""
    by_step: dict[int, dict[int, None]] = defaultdict(dict)
    for line in (folder / "samples.jsonl").read_text().splitlines():
        body = json.loads(line)
        by_step[body["step"]] |= dict.fromkeys(body["ids"])
    return [list(by_step[step]) for step in sorted(by_step)]


def folders() -> list[str]:
    return sorted(path.parent.name for path in torch_corpus().glob("*/samples.jsonl")) if CORPUS else []


@pytest.mark.parametrize("name", folders())
def test_consumed_ids_are_the_orders_prefix(name: str) -> None:
    order, at = RandomSamplerOrder.reseeded(SAMPLES, SEED), 0
    steps = recorded(torch_corpus() / name)
    assert steps
    for ids in steps:
        assert sorted(ids) == sorted(order.ids(0, at, at + len(ids)).tolist()), name
        at += len(ids)


def test_the_trainers_fetched_ids_rank_by_rank() -> None:
    fetched = json.loads((torch_corpus() / "hf_trainer_ws2" / "truth.json").read_text())["fetched"]
    order = AccelerateOrder(RandomSamplerOrder.reseeded(SAMPLES, SEED), batch_size=2, num_processes=2)
    ids = [sample for step in zip(*fetched, strict=True) for batch in step for sample in batch]
    assert order.ids(0, 0, len(ids)).tolist() == ids
    assert order.skipped(0, 5) == 20  # five steps at two ranks, one more was prefetched
    moved = AccelerateOrder(order.base, batch_size=2, num_processes=3)
    assert moved.num_batches(0, 20) is None  # skipping five batches there would omit ten samples
    assert moved.skipped(0, 5) - 20 == 10
    assert compare_switch(order, moved, 0, 20).omitted == ()  # the order itself is the same but for its padding


@pytest.mark.parametrize("kind", KINDS)
def test_stateful_loaders_of_two_ranks_are_at_twenty_samples(kind: str) -> None:
    torch = pytest.importorskip("torch")
    files = [torch_corpus() / "dataloader_states" / f"{kind}_ws2_rank{rank}.pt" for rank in (0, 1)]
    states: list[Any] = [torch.load(file, weights_only=True) for file in files]
    assert [batches_given(state) for state in states] == [5, 5]
    assert stateful_position(DistributedSamplerOrder(SAMPLES, SEED, num_replicas=2), 0, states, 2) == 20


def counted() -> list[str]:
    """Checkpoints of Megatron and DeepSpeed jobs whose truth says how many samples they had consumed."""
    if CORPUS is None:
        return []
    truths = [*Path(CORPUS).glob("megatron/*/TRUTH.json"), *Path(CORPUS).glob("deepspeed/*/truth_step5.json")]
    return sorted(str(path.relative_to(CORPUS)) for path in truths)


@pytest.mark.parametrize("name", counted())
def test_counts_of_consumed_samples_are_positions(name: str) -> None:
    """The same position at any number of ranks, where the order does not depend on them."""
    assert CORPUS is not None
    truth = json.loads((Path(CORPUS) / name).read_text())
    wanted = truth["consumed_train_samples"] if "megatron" in name.split("/")[0] else truth["global_samples"]
    checkpoint = open_checkpoint(Path(CORPUS) / Path(name).parent)
    try:
        progress = checkpoint.state.progress
        arguments = checkpoint.state.objects.get("args")
    finally:
        checkpoint.close()
    if "megatron" not in name.split("/")[0] and progress.update != truth["global_steps"]:
        pytest.skip("a later step of this run is the latest one")
    assert progress.samples == wanted
    assert progress.update is not None
    batch = wanted // progress.update
    for ranks in (4, 3, 5, 2):
        order = MegatronSequentialOrder(1000, 1, ranks, drop_last=False)
        at = seek(order, progress.update, batch)
        assert (at.samples, at.samples_in_epoch) == (wanted, wanted)
        assert next_update(order, at, batch).ids(order).tolist() == list(range(wanted, wanted + batch))
    if isinstance(arguments, dict) and arguments.get("global_batch_size"):
        assert arguments["global_batch_size"] == batch

"""The orders of Accelerate, the Trainer, torchdata and Megatron against their own loaders, run here.

As `tests/unit/test_routes.py`: a framework's run on four ranks is left after each of its updates, and gone on with on
3, 5 and 2. The ids that other tests have from files are those which the installed frameworks give out.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

from samerun.core.order import GlobalOrder
from samerun.core.orders import (
    AccelerateOrder,
    DistributedSamplerOrder,
    MegatronCyclicOrder,
    MegatronSequentialOrder,
    RandomSamplerOrder,
    RangeOrder,
    ShardCursor,
    ShardRange,
    compare_switch,
    remaining_ranges,
    stateful_position,
)
from samerun.core.progress import Committed
from samerun.train.sampler import ElasticSampler
from samerun.train.stream import ElasticStream
from support.gloo import run_ranks
from support.routes import (
    GOLDEN,
    LENGTH,
    RANKS,
    READ_AHEAD,
    ROUTE,
    Numbers,
    Updates,
    as_list,
    go_on,
    joined,
    leave_after_every_update,
)

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.mark.framework
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library"),
    [("torchdata",) * 2, ("accelerate",) * 2, ("trainer", "transformers"), ("trainer_schedule", "transformers")],
)
def test_the_kept_ids_are_those_of_the_installed_frameworks(name: str, library: str, tmp_path: Path) -> None:
    """Their real loaders on gloo ranks, resumed by their own means after every update."""
    pytest.importorskip(library)
    command = [sys.executable, "-W", "ignore", str(GOLDEN / "make.py"), "--only", name, "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    now, kept = (json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, GOLDEN))
    for case in (*now, *kept):
        case.pop("states", None)  # hold a seed that each run draws
    assert now == kept


@pytest.mark.framework
@pytest.mark.parametrize("cut", [{}, {"split_batches": True}, {"even_batches": False}], ids=str)
def test_accelerate(cut: dict[str, bool]) -> None:
    loading = pytest.importorskip("accelerate.data_loader")
    batch = 12 if cut.get("split_batches") else 3
    base = RandomSamplerOrder.reseeded(LENGTH, 7)
    order = AccelerateOrder(base, batch, RANKS, **cut)
    data: Any = range(LENGTH)

    def loader_of(rank: int) -> Any:
        from accelerate.data_loader import SeedableRandomSampler

        sampler = SeedableRandomSampler(data, data_seed=7)
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, batch, False), collate_fn=as_list, **READ_AHEAD)
        return loading.prepare_data_loader(
            loader, num_processes=RANKS, process_index=rank, put_on_device=False, data_seed=7,
            use_seedable_sampler=True, split_batches=cut.get("split_batches", False),
            even_batches=cut.get("even_batches", True),
        )  # fmt: skip

    real = joined([list(loader_of(rank)) for rank in range(RANKS)])
    leave_after_every_update(order, order.step_samples, real)
    if cut.get("even_batches", True):
        for count in (1, 2):
            rest = joined([list(loading.skip_first_batches(loader_of(rank), count)) for rank in range(RANKS)])
            assert rest == real[count:]
            assert order.num_batches(0, order.skipped(0, count)) == count


def dispatched(rank: int, ranks: int, cut: dict[str, Any], batch: int) -> list[list[Any]]:
    """What this rank is handed of an epoch, and of the epoch after `skip_first_batches` of 1, 2, ... batches."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29543", ACCELERATE_USE_CPU="true")
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):  # as other tests of this process left them
        state._reset_state()
    config = DataLoaderConfiguration(dispatch_batches=True, use_seedable_sampler=True, data_seed=7, **cut)
    accelerator = Accelerator(dataloader_config=config, cpu=True)
    assert accelerator.num_processes == ranks
    data: Any = range(LENGTH)
    loader = accelerator.prepare(DataLoader(data, batch, sampler=RandomSampler(data), **READ_AHEAD))
    found = []
    for count in range(3):
        loader.set_epoch(0)
        found.append([part.tolist() for part in (skip_first_batches(loader, count) if count else loader)])
    return found


@pytest.mark.framework
@pytest.mark.parametrize("cut", [{}, {"split_batches": True}], ids=str)
def test_accelerate_dispatching(cut: dict[str, bool]) -> None:
    """Process 0 reads, with workers, and deals to the others over gloo."""
    pytest.importorskip("accelerate")
    batch = 12 if cut else 3
    order = AccelerateOrder(
        RandomSamplerOrder.reseeded(LENGTH, 7), batch, RANKS, dispatch_batches=True, split_batches=bool(cut)
    )
    by_rank = run_ranks(RANKS, dispatched, cut, batch, with_workers=True)
    real = joined([rank[0] for rank in by_rank])
    assert len(real) == -(-LENGTH // 12)
    leave_after_every_update(order, order.step_samples, real)
    for count in (1, 2):
        rest = joined([rank[count] for rank in by_rank])
        ids = order.ids(0, order.skipped(0, count), order.num_unpadded(0)).tolist()
        assert [sample for step in rest for sample in step][: len(ids)] == ids


@pytest.mark.framework
def test_stateful_loader_over_map_style_data() -> None:
    """A position from the states of four ranks, taken while their workers had read ahead."""
    build = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    order = DistributedSamplerOrder(LENGTH, 5, num_replicas=RANKS)
    loaders = []
    for rank in range(RANKS):
        sampler = DistributedSampler(range(LENGTH), RANKS, rank, seed=5)  # type: ignore[arg-type]
        workers = {"num_workers": 2, "prefetch_factor": 3} if rank < 2 else {}
        loaders.append(build(Numbers(), batch_size=3, sampler=sampler, collate_fn=as_list, **workers))
    states: list[list[Any]] = []
    real: Updates = []
    for step in zip(*loaders, strict=True):
        real.append([i for batch in step for i in batch])
        states.append([loader.state_dict() for loader in loaders])
    for number, each in enumerate(states, start=1):
        at = stateful_position(order, 0, each, 3)
        go_on(order, Committed(samples_in_epoch=at), 3 * RANKS, real[number:])


SHARDS = {"a": 17, "b": 9, "c": 4, "d": 21, "e": 6, "f": 13, "g": 5, "h": 8}


class Reader(IterableDataset[tuple[str, int]]):
    """A streaming loader as many are written: each worker of each rank reads shards of its own, with a cursor."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cursor: dict[str, int] = {}

    def mine(self) -> list[str]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return list(SHARDS)[self.rank * count + number :: RANKS * count]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for shard in self.mine():
            for place in range(self.cursor.get(shard, 0), SHARDS[shard]):
                self.cursor[shard] = place + 1
                yield shard, place

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": dict(self.cursor), "mine": self.mine()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = dict(state["cursor"])


def cursors_of(rank: int, state: Any) -> list[ShardCursor]:
    """What a StatefulDataLoader saved of its workers' datasets, as they were for the batches that were handed out."""
    found = []
    workers = state["_snapshot"]["_worker_snapshots"]
    for name, worker in workers.items():
        dataset = worker["fetcher_state"]["dataset_iter_state"] or worker["dataset_state"]
        for shard in dataset["mine"]:
            whole = ShardRange(shard, 0, SHARDS[shard])
            found.append(ShardCursor(f"rank {rank} {name}", whole, dataset["cursor"].get(shard, 0)))
    return found


def open_shard(shard: str, start: int) -> Iterator[tuple[str, int]]:
    return iter([(shard, place) for place in range(start, SHARDS[shard])])


@pytest.mark.framework
def test_streaming_shards_with_a_cursor_per_rank_and_worker() -> None:
    """After each batch: what four ranks with two workers each had handed out, and the rest exactly once on 3, 5, 2."""
    build = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loaders = [
        build(
            Reader(rank), batch_size=2, num_workers=2, prefetch_factor=3, collate_fn=as_list, snapshot_every_n_steps=1
        )
        for rank in range(RANKS)
    ]
    everything = {(shard, place) for shard, length in SHARDS.items() for place in range(length)}
    consumed: list[tuple[str, int]] = []
    streams = [iter(loader) for loader in loaders]
    for step in range(4):
        for rank, stream in enumerate(streams):
            if rank != 3 or step < 3:  # one rank is behind the others
                consumed += next(stream)
        cursors = [c for rank, loader in enumerate(loaders) for c in cursors_of(rank, loader.state_dict())]
        rest = remaining_ranges(SHARDS, cursors)
        order = RangeOrder(SHARDS, rest, lanes=3, seed=2)
        assert order.num_samples(0) == len(everything) - len(consumed)
        left: list[tuple[str, int]] = []
        state: Any = None
        for number, replicas in enumerate(itertools.cycle(ROUTE), start=1):
            if len(left) == order.num_samples(0):
                break
            parts = [
                ElasticSampler(order, global_batch=17, replicas=replicas, replica=r, max_microbatch=3)
                for r in range(replicas)
            ]
            for part in parts:
                if state is not None:
                    part.load_state_dict(state)
                stream = DataLoader(ElasticStream(part, open_shard), batch_size=None, collate_fn=as_list)
                left += [
                    sample for microbatch in next(part.updates(stream, until=number)) for sample in microbatch.batch
                ]
                part.commit()
            state = parts[0].state_dict()
        assert Counter(left) == Counter(everything - set(consumed))
    assert len(consumed) == len(set(consumed)) == 2 * (4 * RANKS - 1)


MEGATRON_HERE = Path(sys.prefix, "megatron-training")
"""Where `scripts/megatron.sh` puts a release whose loader runs, beside the one of the environment itself."""


def megatron(jobs: list[dict[str, Any]]) -> list[Any]:
    """Runs Megatron's own loader on gloo ranks; see `support/megatron_loader.py`."""
    script = Path(__file__).parents[1] / "support" / "megatron_loader.py"
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(script)],
        input=json.dumps(jobs), env={**os.environ, "PYTHONPATH": str(MEGATRON_HERE)},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


STEP = 3 * RANKS
MEGATRON: dict[str, GlobalOrder] = {
    "sequential": MegatronSequentialOrder(LENGTH, 3, RANKS),
    "sequential-keep": MegatronSequentialOrder(LENGTH, 3, RANKS, drop_last=False),
    "cyclic": MegatronCyclicOrder(LENGTH, 3, RANKS, data_sharding=False),
    "cyclic-sharded": MegatronCyclicOrder(LENGTH, 3, RANKS),
}


@pytest.mark.slow
@(pytest.mark.framework if MEGATRON_HERE.exists() else pytest.mark.skip("no megatron.training: scripts/megatron.sh"))
def test_megatron() -> None:
    """`build_pretraining_data_loader` with two workers: its run is left after every update, and it resumes itself.

    Then the sharded cyclic one on 2 x TP 2, whose tensor-parallel ranks read alike; with EP 2, which changes nothing;
    and on 3 ranks as Megatron itself would go on there: what it replays and omits is what `compare_switch` says.
    """
    jobs = [
        {"kind": kind, "length": LENGTH, "micro": 3, "dp": RANKS, "consumed": [*range(0, order.num_samples(0), STEP)]}
        for kind, order in MEGATRON.items()
    ]
    jobs.append({"kind": "cyclic-sharded", "length": LENGTH, "micro": 3, "dp": 2, "tp": 2, "consumed": [0, 42, 48]})
    jobs.append({"kind": "cyclic-sharded", "length": LENGTH, "micro": 2, "dp": 3, "consumed": [24]})
    jobs.append({"kind": "cyclic-sharded", "length": LENGTH, "micro": 3, "dp": RANKS, "ep": 2, "consumed": [0, 12]})
    *found, two, moved, experts = megatron(jobs)
    assert experts == found[-1][:2]  # expert-parallel ranks read samples of their own
    for (kind, order), after in zip(MEGATRON.items(), found, strict=True):
        steps = -(-order.num_samples(0) // STEP)  # what ranks find beyond them is SR-ORDER-RAGGED
        real = joined(after[0])[:steps]
        leave_after_every_update(order, STEP, real)
        for count, rest in enumerate(after):
            assert joined(rest)[: steps - count] == real[count:], kind
    order = MegatronCyclicOrder(LENGTH, 3, 2)
    for epoch, after in ((0, two[0]), (1, two[1])):
        assert after[0] == after[1]
        assert after[2] == after[3]
        ids = order.ids(epoch, 0, 42).tolist()
        assert joined([after[0], after[2]]) == [ids[at : at + 6] for at in range(0, 42, 6)]
    assert joined([two[2][0], two[2][2]]) == joined([two[1][0], two[1][2]])[1:]
    order, there = MegatronCyclicOrder(LENGTH, 3, RANKS), MegatronCyclicOrder(LENGTH, 2, 3)
    read = Counter(order.ids(0, 0, 24).tolist()) + Counter(itertools.chain(*joined(moved[0])))
    switch = compare_switch(order, there, 0, 24)
    assert Counter(switch.replayed) == read - Counter(set(order.ids(0, 0, 36).tolist()))
    assert Counter(switch.omitted) == Counter(order.ids(0, 0, 36).tolist()) - read
    assert switch.replayed

"""Megatron's tracker of generators: the real one, on gloo ranks, under both policies, recorded, and compared.

A state is 16 bytes in host memory: making, setting, reading and comparing them needs no device. `add` asks CUDA for
the state that a seed leaves behind, so the two calls that it makes are answered from `cuda_state` here (that this is
torch's own layout is `tests/formats/test_generators.py`). Drawing from a state needs a GPU and is not tested.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from samerun.core.generators import cuda_state, generator_digest, tracker_streams
from samerun.core.mesh import Layout
from samerun.errors import UsageError
from samerun.train.rank_rng import apply_rank_rng, capture_rank_rng
from samerun.train.recorder import Recorder
from samerun.verify.load.streams import check_kept_streams, check_policy
from support.gloo import run_ranks

IS_HERE = importlib.util.find_spec("megatron") is not None
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.framework if IS_HERE else pytest.mark.skip("megatron-core is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
MODEL, DATA, EXPERT = (f"megatron:{name}-parallel-rng" for name in ("model", "data", "expert"))


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Imported once, for all ranks to inherit."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    importlib.import_module("megatron.core.parallel_state")
    importlib.import_module("megatron.core.tensor_parallel.random")


def make_tracker(layout: Layout, seed: int, expert_tensor: int | None = None) -> None:
    """Builds Megatron's groups and its tracker on this rank, as `initialize_megatron` does."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=expert_tensor, create_gloo_process_groups=True,
    )  # fmt: skip
    device: list[Any] = [torch.zeros(16, dtype=torch.uint8)]
    torch.cuda.get_rng_state = lambda *_: device[0]  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda value: device.__setitem__(0, torch.from_numpy(cuda_state(value).copy()))
    model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


def tracked(rank: int, world_size: int, layout: str, expert_tensor: int | None) -> dict[str, str]:
    make_tracker(Layout.parse(layout), 7, expert_tensor)
    return {name: generator_digest(state.numpy()) for name, state in capture_rank_rng().items() if ":" in name}


@pytest.mark.parametrize(
    ("layout", "expert_tensor"),
    [
        ("dp_shard=2,tp=2", None),
        ("pp=2,dp_shard=2,tp=2", None),
        ("dp_shard=4,tp=2,ep=2", None),
        ("dp_shard=2,tp=2,ep=2", 1),
        ("pp=2,dp_shard=2,cp=2,ep=2", None),
    ],
)
def test_ranks_share_a_stream_where_megatron_gives_them_one_seed(layout: str, expert_tensor: int | None) -> None:
    shape = Layout.parse(layout)
    found = run_ranks(shape.world_size, tracked, layout, expert_tensor)
    streams = [tracker_streams(shape, rank, expert_tensor=expert_tensor) for rank in range(shape.world_size)]
    assert [set(by_name) for by_name in found] == [{MODEL, DATA, EXPERT}] * shape.world_size
    for name in found[0]:
        pairs = {(by_name[name], of[name.partition(":")[2]]) for by_name, of in zip(found, streams, strict=True)}
        assert len(pairs) == len({stream for _, stream in pairs}), name
        for stage in range(shape.pp):  # stage 1 of expert 0 has the seed of stage 0 of expert 1: 100 for either
            ranks = [rank for rank in range(shape.world_size) if shape.coordinate(rank)["pp"] == stage]
            seeds = {(found[rank][name], streams[rank][name.partition(":")[2]]) for rank in ranks}
            assert len(seeds) == len({seed for seed, _ in seeds}), name


def moved(rank: int, world_size: int, layout: str, saved: list[Any], folder: str, policy: str) -> dict[str, Any]:
    """A job on `layout` that resumes at update 12; `saved` are what earlier ranks captured."""
    shape = Layout.parse(layout)
    torch.manual_seed(70 + shape.batch_replica(rank))
    make_tracker(shape, 5)
    model, done = torch.nn.Linear(2, 1), None
    if policy:
        streams = tracker_streams(shape, rank)
        own = saved[rank] if rank < len(saved) else None
        replica = shape.batch_replica(rank)
        done = apply_rank_rng(policy, seed=3, stream=replica, update=12, saved=own, tracker=streams)  # type: ignore[arg-type]
    recorder = Recorder(folder)
    recorder.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), layout=shape)
    recorder.loaded(update=12, rank_rng=done)
    recorder.close()
    return capture_rank_rng()


def state_line(folder: Path) -> Mapping[str, Any]:
    lines = map(json.loads, (folder / "rank-00000.jsonl").read_text().splitlines())
    return next(line for line in lines if line["kind"] == "state")


@pytest.mark.parametrize("policy", ["keyed", "survivors"])
def test_a_policy_over_a_move(policy: str, tmp_path: Path) -> None:
    """From 2 x TP 2 to 3 x TP 2: recorded, compared with the control, and the same again on a second move."""
    before = run_ranks(4, moved, "dp_shard=2,tp=2", [], str(tmp_path / "control"), "")
    control = state_line(tmp_path / "control")
    assert control["generators"][MODEL] == {
        str(rank): generator_digest(cuda_state(5 + 2718 + rank % 2)) for rank in range(4)
    }
    after = run_ranks(6, moved, "dp_shard=3,tp=2", before, str(tmp_path / "moved"), policy)
    line = state_line(tmp_path / "moved")
    assert check_kept_streams(control, line) == []
    assert check_policy(line, has_saved=True) == []
    record = line["rank_rng"]["5"]
    assert (record["policy"], record["kept"]) == (policy, [])
    assert set(record["seeded"]) == {"torch", "numpy", "python", MODEL, DATA, EXPERT}
    assert record["tracker"] == {"data-parallel-rng": 0, "model-parallel-rng": 1, "expert-parallel-rng": 1}
    for rank in range(6):
        kept = policy == "survivors" and rank < 4
        for name in (MODEL, DATA, EXPERT, "torch"):
            same = rank < 4 and torch.equal(after[rank][name], before[rank][name])
            assert same == kept, (rank, name)
            assert (name in line["rank_rng"][str(rank)]["kept"]) == kept
    again = run_ranks(6, moved, "dp_shard=3,tp=2", before, str(tmp_path / "again"), policy)
    assert [line["generators"], line["rng"]] == [state_line(tmp_path / "again")[name] for name in ("generators", "rng")]
    assert all(torch.equal(one[MODEL], two[MODEL]) for one, two in zip(after, again, strict=True))


def careless(rank: int, world_size: int, folder: str, wrong: str) -> None:
    """Ranks of 2 x TP 2 that all took rank 0's states (`states`), or were all given rank 0's streams (`streams`)."""
    layout = Layout.parse("dp_shard=2,tp=2")
    make_tracker(layout, 5)
    done = None
    if wrong == "states":
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()
        tracker.set_states({name: torch.from_numpy(cuda_state(9).copy()) for name in tracker.get_states()})
    else:
        streams = tracker_streams(layout, 0)
        done = apply_rank_rng("keyed", seed=3, stream=layout.batch_replica(rank), update=12, tracker=streams)
    model = torch.nn.Linear(2, 1)
    recorder = Recorder(folder)
    recorder.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), layout=layout)
    recorder.loaded(update=12, rank_rng=done)
    recorder.close()


def test_one_ranks_states_everywhere_are_found(tmp_path: Path) -> None:
    run_ranks(4, moved, "dp_shard=2,tp=2", [], str(tmp_path / "control"), "")
    control = state_line(tmp_path / "control")
    for wrong in ("states", "streams"):
        run_ranks(4, careless, str(tmp_path / wrong), wrong)
        line = state_line(tmp_path / wrong)
        problems = check_kept_streams(control, line)
        assert ("SR-RNG-SAME", MODEL) in [(p.code, p.where["key"]) for p in problems], wrong
        codes = [problem.code for problem in check_policy(line, has_saved=True)]
        assert codes == (["SR-RNG-SAME"] if wrong == "streams" else [])


def refuses(rank: int, world_size: int) -> list[str]:
    make_tracker(Layout.parse("tp=2"), 5)
    saved, said = capture_rank_rng(), []
    streams = tracker_streams(Layout.parse("tp=2"), rank)
    for more in ({}, {"tracker": {"model-parallel-rng": 0}}, {"tracker": streams, "saved": {**saved, "megatron:x": 1}}):
        try:
            apply_rank_rng("survivors", seed=1, stream=0, update=0, **more)
        except UsageError as error:
            said.append(error.problems[0].message)
    assert all(torch.equal(state, saved[name]) for name, state in capture_rank_rng().items() if ":" in name)
    return said


def test_a_tracker_without_streams_is_refused() -> None:
    for said in run_ranks(2, refuses):
        assert [text.split(" ")[0:2] for text in said] == [
            ["the", "generators"],
            ["the", "generators"],
            ["the", "saved"],
        ]

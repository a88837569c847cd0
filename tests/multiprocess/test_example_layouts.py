"""The example's model on every layout, on real gloo ranks: one gradient, one run, equal replicas, true norms."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samerun.core.batch import deal
from samerun.core.mesh import Layout
from samerun.core.mix import GOLDEN, fold_key, mix64
from samerun.core.sketch import apart
from samerun.errors import has_errors
from samerun.trace import Trace, check_trace, read_trace
from support.gloo import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "pytorch")
LAYOUTS = (
    "dp_shard=1",
    "dp_shard=3",
    "dp_shard=4",
    "dp_replicate=3",
    "dp_replicate=2,dp_shard=2",
    "tp=2",
    "tp=2,dp_shard=2",
)
GLOBAL_BATCH = 13  # divides by none of the numbers of replicas
NUM_UPDATES = 8
PATIENCE_SECONDS = 600.0


def build(layout: Layout, precision: str = "float32") -> tuple[Any, Any, Any]:
    """Returns (model on the layout's mesh, text, mesh) as `train.py` makes them. Every rank calls it."""
    if EXAMPLE not in sys.path:
        sys.path.insert(0, EXAMPLE)
    from data import load_text
    from model import GPT, SIZES, initialize
    from parallel import make_mesh, parallelize

    mesh = make_mesh({axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "tp")}, "cpu")
    text, _ = load_text(SIZES["tiny"].block, "tiny")
    model = GPT(SIZES["tiny"])
    initialize(model, text.log_frequencies(), seed=3)
    parallelize(model, mesh, precision)
    return model, text, mesh


def whole(tensor: Any) -> np.ndarray[Any, Any]:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().numpy()


def gradient_on(rank: int, world_size: int, layout_text: str, ids: list[int], precision: str) -> dict[str, Any]:
    """Returns the loss and the gradient of the global batch `ids`, dealt to the layout in passes of one sample."""
    from samerun.train import ContributionMean

    layout = Layout.parse(layout_text)
    model, text, mesh = build(layout, precision)
    dealing = deal(len(ids), layout.batch_replicas, 1)
    mine = [[ids[i] for i in part] for part in dealing.replica_positions(layout.batch_replica(rank))]
    batches = [text.collate([text[i] for i in part]) for part in mine]
    mean = ContributionMean(mesh["dp_replicate", "dp_shard"], reduction="sum")
    mean.start(sum(batch.valid_tokens for batch in batches), passes=dealing.passes)
    for batch in batches:
        logits = model(batch.inputs)
        mean.backward(torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="sum"))
    result = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    loss = mean.loss()
    return {"loss": loss, "num_empty": dealing.num_empty, "gradient": result if rank == 0 else None}


def oracle(ids: list[int]) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
    """The same gradient on one plain model without any mesh: one mean over all valid tokens of one batch."""
    return run_ranks(1, plain_gradient, ids, timeout=PATIENCE_SECONDS)[0]


def plain_gradient(rank: int, world_size: int, ids: list[int]) -> Any:
    sys.path.insert(0, EXAMPLE)
    from data import load_text
    from model import GPT, SIZES, initialize

    text, _ = load_text(SIZES["tiny"].block, "tiny")
    model = GPT(SIZES["tiny"])
    initialize(model, text.log_frequencies(), seed=3)
    batch = text.collate([text[i] for i in ids])
    loss = torch.nn.functional.cross_entropy(model(batch.inputs), batch.targets.flatten())
    loss.backward()
    return float(loss.detach()), {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def relative(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.fixture(scope="module")
def unequal_ids() -> list[int]:
    sys.path.insert(0, EXAMPLE)
    try:
        from data import load_text

        text, _ = load_text(32, "tiny")
    finally:
        sys.path.remove(EXAMPLE)
        for name in ("data", "model"):
            sys.modules.pop(name, None)
    lengths = {i: text.samples[i][2] - text.samples[i][1] for i in range(200)}
    short = [i for i, length in lengths.items() if length < 16][:3]
    return [*short, *[i for i, length in lengths.items() if length == 32][:2]]


@pytest.fixture(scope="module")
def expected(unequal_ids: list[int]) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
    return oracle(unequal_ids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_gradient_whatever_the_layout(layout: str, unequal_ids: list[int], expected: Any) -> None:
    loss, gradient = expected
    world_size = Layout.parse(layout).world_size
    ranks = run_ranks(world_size, gradient_on, layout, unequal_ids, "float32", timeout=PATIENCE_SECONDS)
    found: Mapping[str, np.ndarray[Any, Any]] = ranks[0]["gradient"]
    assert found.keys() == gradient.keys()
    worst = max(relative(found[name], gradient[name]) for name in gradient)
    assert worst < 2e-5, {name: relative(found[name], gradient[name]) for name in gradient}
    assert [rank["loss"] for rank in ranks] == [pytest.approx(loss, rel=1e-6)] * world_size
    if Layout.parse(layout).batch_replicas > 1:
        assert ranks[0]["num_empty"] > 0  # some rank made a pass without any sample


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_bfloat16_compute_keeps_the_scale(layout: str, unequal_ids: list[int], expected: Any) -> None:
    loss, gradient = expected
    found = run_ranks(2, gradient_on, layout, unequal_ids, "mixed", timeout=PATIENCE_SECONDS)[0]
    assert found["loss"] == pytest.approx(loss, rel=1e-2)
    assert max(relative(found["gradient"][name], gradient[name]) for name in gradient) < 0.1


def train(rank: int, world_size: int, layout_text: str, directory: str) -> dict[str, Any]:
    """Trains `NUM_UPDATES` updates with a recorder, and returns what a full, unsharded copy says about them."""
    from samerun.train import ContributionMean, ElasticSampler, Recorder
    from samerun.train.capture import capture_state

    layout = Layout.parse(layout_text)
    model, text, mesh = build(layout)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)
    sampler = ElasticSampler.from_layout(layout, rank, len(text), global_batch=GLOBAL_BATCH, max_microbatch=4)
    loader = torch.utils.data.DataLoader(text, batch_sampler=sampler, collate_fn=text.collate)
    mean = ContributionMean(mesh["dp_replicate", "dp_shard"], reduction="sum")
    recorder = Recorder(directory, norms="every")
    recorder.attach(model, optimizer, sampler=sampler, layout=layout)
    recorder.loaded(update=0)
    odd: list[str] = []
    every: dict[str, float] = {}
    first: dict[str, float] = {}
    changes: dict[str, list[float]] = {}
    gradients: dict[str, list[float]] = {}
    for update in sampler.updates(loader, until=NUM_UPDATES):
        batches = [microbatch.batch for microbatch in update]
        mean.start(sum(batch.valid_tokens for batch in batches), passes=update.passes)
        for batch in batches:
            logits = model(batch.inputs)
            mean.backward(torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="sum"))
        before = {name: whole(p) for name, p in model.named_parameters()} if update.number == 1 else {}
        if update.number == 1:
            gradients = {name: pointing(name, whole(p.grad)) for name, p in model.named_parameters() if p.requires_grad}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for name, p in model.named_parameters() if before else ():
            change = whole(p) - before[name]
            every[name] = float(np.linalg.norm(change))
            first[name] = float(np.linalg.norm(change[loud(p)]))
            if p.requires_grad:
                changes[name] = pointing(name, np.where(loud(p), change, np.float32(0)))
        optimizer.zero_grad()
        done = sampler.commit(tokens=mean.total)
        recorder.record(update=done.update, loss=mean.loss(), grad_norm=norm, sample_ids=update.sample_ids)
        if update.number % 4 == 0:
            captured = capture_state(model, optimizer)
            odd += [key for key, fact in captured.tensors.items() if fact.odd]
    recorder.close()
    found = {"changes": changes, "gradients": gradients}
    return {"odd": odd, "every": every, "moved": first, "tied": model.is_tied, **found}


def pointing(name: str, values: np.ndarray[Any, Any]) -> list[float]:
    """Returns the direction of a whole tensor from the definition: every element's weights in plain Python."""
    flat = values.astype(np.float64).reshape(-1)
    key = fold_key(*name.encode())
    words = np.array([mix64(key + index * GOLDEN) for index in range(flat.size)], np.uint64)
    weights = (words.view(np.int8).reshape(-1, 8) + 0.5) * (12 / (2**16 - 1)) ** 0.5
    return list(flat @ weights / np.linalg.norm(flat))


def loud(parameter: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns which elements have a gradient that is more than rounding, or none at all."""
    from samerun.train.norms import QUIET

    if parameter.grad is None:
        return np.ones(tuple(parameter.shape), bool)
    size = np.abs(whole(parameter.grad).astype(np.float64))
    return (size >= QUIET * np.sqrt(np.mean(size**2))) | (size == 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, list[dict[str, Any]]]]:
    top = tmp_path_factory.mktemp("traces")
    found: dict[str, tuple[Trace, list[dict[str, Any]]]] = {}
    for layout in LAYOUTS:
        world_size = Layout.parse(layout).world_size
        ranks = run_ranks(world_size, train, layout, str(top / layout), timeout=PATIENCE_SECONDS)
        found[layout] = read_trace(top / layout), ranks
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_the_same_on_every_layout(layout: str, runs: Any) -> None:
    trace, ranks = runs[layout]
    alone, _ = runs["dp_shard=1"]
    assert not has_errors(check_trace(trace))
    assert trace.layout == Layout.parse(layout)
    assert trace.update_indices == tuple(range(1, NUM_UPDATES + 1))
    for index in trace.update_indices:
        mine, reference = trace.lead.update(index), alone.lead.update(index)
        assert mine is not None
        assert reference is not None
        assert mine.loss == pytest.approx(reference.loss, rel=2e-5)
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=2e-4)
        assert mine.update_norm == pytest.approx(reference.update_norm, rel=2e-3)
        together = sorted(sample for ids in trace.sample_ids(index).values() for sample in ids)
        assert together == sorted(alone.sample_ids(index)[0])
        assert len(together) == GLOBAL_BATCH
    assert all(rank["tied"] for rank in ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_stay_equal(layout: str, runs: Any) -> None:
    _, ranks = runs[layout]
    assert [rank["odd"] for rank in ranks] == [[]] * len(ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_are_those_of_the_whole_tensors(layout: str, runs: Any) -> None:
    trace, ranks = runs[layout]
    every, moved = ranks[0]["every"], ranks[0]["moved"]
    line = trace.lead.update(1)
    assert line is not None
    assert line.moved == pytest.approx(moved, rel=1e-5, abs=1e-12)
    assert line.update_norm == pytest.approx(float(np.linalg.norm(list(every.values()))), rel=1e-6)
    assert line.deltas == pytest.approx({name: moved[name] for name in line.deltas}, rel=1e-5)
    assert line.moved["prior"] == 0.0
    assert len(line.deltas) == 5
    assert all(rank.updates[0].moved is None for rank in trace.ranks[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_directions_are_those_of_the_whole_tensors(layout: str, runs: Any) -> None:
    trace, ranks = runs[layout]
    line = trace.lead.update(1)
    assert line is not None
    for found, name in ((line.moved_direction, "changes"), (line.gradients_direction, "gradients")):
        expected = ranks[0][name]
        assert found is not None
        assert found.keys() == expected.keys()
        assert max(apart(found[tensor], expected[tensor]) for tensor in expected) < 1e-4
        assert "prior" not in found

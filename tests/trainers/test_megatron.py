"""Megatron-core: distributed checkpoints moved to other tensor, pipeline and data ranks, and broken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from samerun.core.mesh import Layout
from samerun.trace import read_trace
from support.moves import Move, codes, new_move, wrongly
from support.warm_ranks import warm_launches

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

REWRITTEN = {"to": "megatron"}
EXPERTS = ("--num-experts", "6")
PRECISIONS = {"--bf16": "bfloat16", "--fp16": "float16"}
UNEVEN = ("--decoder-first-pipeline-num-layers", "1")
DEGREES = (
    "--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
    "--context-parallel-size {cp} --expert-model-parallel-size {ep}"
)
ARGUMENTS = f"{DEGREES} --micro-batch-size {{max_microbatch}} --train-iters 100 --load {{checkpoint}}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has the framework imported."""
    with warm_launches("megatron.core", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer"):
        yield


def prepare(folder: Path, source: str, to: str, *flags: str, convert: dict[str, str] | None = None) -> Move:
    """Trains 12 samples an update at the layout `source` and drafts a move to the layout `to`."""
    moved = new_move(folder, "megatron")
    layout = Layout.parse(source)
    degrees = DEGREES.format(**layout.to_dict())
    moved.train(layout.world_size, *degrees.split(), "--train-iters", 8, "--save", "saved", *flags)
    moved.draft(
        *("saved", source, to, " ".join((ARGUMENTS, *flags))),
        batch__global_batch=12,
        batch__max_microbatch=2,
        run__optimizer="FusedAdam",
        progress__scheduler=None,
        run__precision=next((name for flag, name in PRECISIONS.items() if flag in flags), "float32"),
    )
    kept = [line for line in moved.manifest.read_text().splitlines() if not line.startswith("convert:")]
    moved.manifest.write_text("\n".join([*kept, f"convert: {json.dumps(convert)}", ""]))
    return moved


def move(folder: Path, source: str, to: str, *flags: str, convert: dict[str, str] | None = None) -> Move:
    """Trains and moves the run."""
    moved = prepare(folder, source, to, *flags, convert=convert)
    result = moved.run()
    assert result.verdict.decision == "promote", wrongly(result)
    return moved


@pytest.fixture(scope="module")
def without_tensor_parallelism(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Two tensor-parallel ranks to one, promoted."""
    return move(tmp_path_factory.mktemp("tp"), "tp=2", "tp=1")


@pytest.fixture(scope="module")
def without_stages(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Two pipeline stages, of one layer and of two, which share the embedding, to one; promoted."""
    return move(tmp_path_factory.mktemp("pp"), "pp=2", "pp=1", *UNEVEN, "--hidden-size", "32")


@pytest.fixture(scope="module")
def on_three_replicas(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """The distributed optimizer on two ranks to three, with fp32 masters; promoted."""
    return move(tmp_path_factory.mktemp("dp"), "dp_shard=2", "dp_shard=3", "--bf16")


@pytest.fixture(scope="module")
def experts_on_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Six experts spread over two ranks to three, promoted."""
    return move(tmp_path_factory.mktemp("ep"), "dp_shard=2,ep=2", "dp_shard=3,ep=3", *EXPERTS)


@pytest.fixture(scope="module")
def over_positions(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Two replicas to one whose two ranks share the positions of every sequence, promoted."""
    return move(tmp_path_factory.mktemp("cp"), "dp_shard=2", "cp=2")


MOVES = (
    "without_tensor_parallelism",
    "without_stages",
    "on_three_replicas",
    "experts_on_three_ranks",
    "over_positions",
)


@pytest.mark.parametrize("name", MOVES)
def test_the_gradient_of_every_parameter_is_seen(name: str, request: pytest.FixtureRequest) -> None:
    """What the bridge reads out of Megatron's buffers, parameter by parameter, adds up to Megatron's own norm."""
    moved: Move = request.getfixturevalue(name)
    for stage in ("02-control", "05-update"):
        update = read_trace(moved.rundir.stage(stage) / "trace").ranks[0].updates[0]
        assert update.gradients
        assert update.grad_norm is not None
        parts = math.sqrt(math.fsum(norm**2 for norm in update.gradients.values()))
        assert math.isclose(parts, update.grad_norm, rel_tol=1e-6)
        seen_whole = {tensor for tensor, norm in update.gradients.items() if norm}
        assert seen_whole
        assert (update.gradients_direction or {}).keys() == seen_whole
        assert update.moved
        assert (update.moved_direction or {}).keys() == {tensor for tensor, norm in update.moved.items() if norm}


def test_a_checkpoint_that_megatron_does_not_move(tmp_path: Path) -> None:
    """Flat optimizer state, which Megatron loads at the degree of tensor parallelism that wrote it, is rewritten."""
    moved = move(tmp_path, "tp=2", "tp=1", "--optimizer-encoding", "dp_reshardable", convert=REWRITTEN)
    assert "dp_reshardable" in moved.samerun("inspect", "saved", "--json")


def test_what_megatron_itself_saves_wrong(tmp_path: Path) -> None:
    """An embedding that two stages share has a bucket of its own; 0.16.1 shifts what is behind its padding.

    At another width the embedding needs no padding, and the same move is promoted (`without_stages`).
    """
    result = prepare(tmp_path, "pp=2", "pp=1", *UNEVEN).run()
    assert "SR-MEG-MASTER" in codes(result), wrongly(result)
    assert result.verdict.decision != "promote"


def test_an_optimizer_that_is_not_restored(without_tensor_parallelism: Move, tmp_path: Path) -> None:
    result = without_tensor_parallelism.copy(tmp_path / "move").run(fault="megatron-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_halves_joined_the_wrong_way(without_tensor_parallelism: Move, tmp_path: Path) -> None:
    result = without_tensor_parallelism.copy(tmp_path / "move").run(fault="megatron-swap-halves", stage="03-load")
    assert result.verdict.decision == "reject"
    assert codes(result) == {"SR-LOAD-PARAM"}, wrongly(result)
    assert all("linear_fc1" in problem.where["tensor"] for problem in result.verdict.reasons)


def test_experts_in_the_wrong_order(experts_on_three_ranks: Move, tmp_path: Path) -> None:
    result = experts_on_three_ranks.copy(tmp_path / "move").run(fault="megatron-swap-experts", stage="03-load")
    assert result.verdict.decision == "reject"
    assert codes(result) == {"SR-LOAD-PARAM"}, wrongly(result)
    assert all(".experts." in problem.where["tensor"] for problem in result.verdict.reasons)


def test_positions_that_another_rank_has(over_positions: Move, tmp_path: Path) -> None:
    """Nothing that is saved tells: the weights are right, and the function is another one."""
    result = over_positions.copy(tmp_path / "move").run(fault="megatron-positions-in-order", stage="04-eval")
    assert result.verdict.decision == "reject"
    assert "SR-EVAL-LOGITS" in codes(result), wrongly(result)


def test_layers_in_the_wrong_order(without_stages: Move, tmp_path: Path) -> None:
    result = without_stages.copy(tmp_path / "move").run(fault="megatron-swap-layers", stage="03-load")
    assert result.verdict.decision == "reject"
    assert codes(result) == {"SR-LOAD-PARAM"}, wrongly(result)


def test_a_step_too_many(on_three_replicas: Move, tmp_path: Path) -> None:
    result = on_three_replicas.copy(tmp_path / "move").run(fault="megatron-miscount-steps", stage="03-load")
    assert result.verdict.decision == "reject"
    assert codes(result) == {"SR-LOAD-STEP"}, wrongly(result)


def test_data_that_begins_again(on_three_replicas: Move, tmp_path: Path) -> None:
    result = on_three_replicas.copy(tmp_path / "move").run(fault="restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

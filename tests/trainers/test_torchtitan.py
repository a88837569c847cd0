"""torchtitan: its own Trainer and checkpoint directory, on four ranks moved to three, and broken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.moves import ROOT, Move, codes, new_move, wrongly
from support.warm_ranks import warm_launches

pytest.importorskip("torchtitan")
pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ARGUMENTS = (
    "--tp {tp} --pp {pp} --batch {global_batch} --at-once {max_microbatch} --steps 100 --dump unused "
    "--resume {checkpoint}"
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has the framework imported, for CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "examples" / "torchtitan"), prepend=os.pathsep)
        with warm_launches("on_cpu", "torchtitan.trainer", "torchtitan.models.llama3"):
            yield


def move(folder: Path, source: str, replicas: int, to: str, *flags: object) -> Move:
    """Trains 12 samples an update on four ranks and moves the run to another layout."""
    moved = new_move(folder, "torchtitan")
    moved.train(4, "--at-once", 3, "--steps", 8, "--dump", "saved", *flags)
    moved.draft(
        *("saved/checkpoint/step-8", source, to, ARGUMENTS),
        batch__global_batch=12,
        batch__max_microbatch=2,
        progress__samples=96,
        source__microbatch=3,
        source__accumulation=4 // replicas,
    )
    result = moved.run()
    assert result.verdict.decision == "promote", wrongly(result)
    assert not (moved.folder / "unused" / "checkpoint").exists()
    return moved


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """FSDP on four ranks to three, promoted."""
    return move(tmp_path_factory.mktemp("fsdp"), "dp_shard=4", 4, "dp_shard=3")


def test_tensor_parallel_ranks_to_sharded_ones(tmp_path: Path) -> None:
    move(tmp_path, "dp_shard=2,tp=2", 2, "dp_shard=3", "--tp", 2)


@pytest.fixture(scope="module")
def without_stages(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Two pipeline stages of two sharded replicas to three ranks without stages, promoted."""
    return move(tmp_path_factory.mktemp("pp"), "pp=2,dp_shard=2", 2, "dp_shard=3", "--pp", 2)


def test_stages_joined_in_the_wrong_order(without_stages: Move, tmp_path: Path) -> None:
    result = without_stages.copy(tmp_path / "move").run(fault="torchtitan-swap-layers", stage="03-load")
    assert result.verdict.decision == "reject"
    assert codes(result) == {"SR-LOAD-PARAM"}, wrongly(result)


def test_an_optimizer_that_is_not_restored(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="torchtitan-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_data_that_begins_again(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

"""Lightning: saved on two processes by DDP and by ModelParallelStrategy, moved to one, and broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.moves import Move, codes, new_move, wrongly
from support.warm_ranks import warm_launches

pytest.importorskip("lightning")
pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ARGUMENTS = "--batch {global_batch} --at-once {max_microbatch} --steps 100 --save-dir unused --resume {checkpoint}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has the framework imported."""
    with warm_launches("lightning.pytorch", "s3fs"):  # which fsspec imports at its first use
        yield


def move_to_one(folder: Path, strategy: str, axis: str) -> Move:
    move = new_move(folder, "lightning")
    move.train(2, "--steps", 8, "--save-dir", "saved", "--strategy", strategy)
    move.draft(
        *("saved/last.ckpt", f"{axis}=2", f"{axis}=1", f"{ARGUMENTS} --strategy {strategy}"),
        batch__global_batch=12,
        batch__max_microbatch=3,
    )
    result = move.run()
    assert result.verdict.decision == "promote", wrongly(result)
    assert not (move.folder / "unused").exists()
    return move


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """DDP on two processes to one, promoted."""
    return move_to_one(tmp_path_factory.mktemp("ddp"), "ddp", "dp_replicate")


def test_the_position_is_in_lightnings_own_checkpoint(promoted: Move) -> None:
    shown = promoted.samerun("inspect", "saved/last.ckpt")
    assert "update 8, 96 samples" in shown
    assert "SR-PL-EPOCH" not in shown


def test_sharded_on_two_processes_to_one(tmp_path: Path) -> None:
    move_to_one(tmp_path, "fsdp2", "dp_shard")


def test_an_optimizer_that_is_not_restored(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="pl-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_data_that_begins_again(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

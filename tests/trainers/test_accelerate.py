"""Accelerate: `save_state` on two processes, DDP and FSDP2, moved to three, and broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.moves import Move, codes, new_move, wrongly
from support.warm_ranks import HUGGING_FACE, warm_launches

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ARGUMENTS = "--batch {global_batch} --at-once {max_microbatch} --passes {passes} --steps 100 --resume {checkpoint}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has the framework imported."""
    with warm_launches(*HUGGING_FACE):
        yield


def move_to_three(folder: Path, axis: str, *flags: str) -> Move:
    move = new_move(folder, "accelerate")
    move.train(2, "--steps", 8, "--save", "saved", *flags)
    move.draft(
        *("saved", f"{axis}=2", f"{axis}=3", " ".join((ARGUMENTS, *flags))),
        batch__global_batch=12,
        batch__max_microbatch=2,
        progress__samples=96,
    )
    result = move.run()
    assert result.verdict.decision == "promote", wrongly(result)
    return move


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """FSDP2 on two processes to three, promoted."""
    return move_to_three(tmp_path_factory.mktemp("fsdp"), "dp_shard", "--shard")


def test_replicated_on_two_processes_to_three(tmp_path: Path) -> None:
    move_to_three(tmp_path, "dp_replicate")


def test_an_optimizer_that_is_not_restored(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="accelerate-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_data_that_begins_again(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

"""Hugging Face Trainer: saved on two processes, moved to one and to three, and broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.moves import Move, codes, new_move, wrongly
from support.warm_ranks import HUGGING_FACE, warm_launches

pytest.importorskip("transformers")
pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ARGUMENTS = "--per-device {max_microbatch} --accumulation {passes} --steps 100 --save-dir unused --resume {checkpoint}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has the framework imported."""
    with warm_launches(*HUGGING_FACE):
        yield


def move_to(folder: Path, ranks: int, micro: int) -> Move:
    """Trains 12 samples an update on two processes and moves the run to `ranks` of them."""
    move = new_move(folder, "huggingface")
    move.train(2, "--per-device", 3, "--accumulation", 2, "--steps", 8, "--save-dir", "saved")
    move.draft(
        *("saved/checkpoint-8", "dp_replicate=2", f"dp_replicate={ranks}", ARGUMENTS),
        batch__global_batch=12,
        batch__max_microbatch=micro,
        source__microbatch=3,
        source__accumulation=2,
    )
    result = move.run()
    assert result.verdict.decision == "promote", wrongly(result)
    return move


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Two processes to three, promoted."""
    return move_to(tmp_path_factory.mktemp("hf"), 3, 2)


def test_a_launched_job_saves_nothing(promoted: Move) -> None:
    assert not (promoted.folder / "unused").exists() or not list((promoted.folder / "unused").iterdir())


def test_from_two_processes_to_one(tmp_path: Path) -> None:
    move_to(tmp_path, 1, 4)


def test_an_optimizer_that_is_not_restored(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="hf-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_data_that_begins_again(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="hf-restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

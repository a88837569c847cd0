"""Hugging Face Trainer: saved on two processes, moved to one and to three, and broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.moves import Move, codes, new_move, wrongly

pytest.importorskip("transformers")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ARGUMENTS = "--per-device {max_microbatch} --accumulation {passes} --steps 100 --save-dir unused --resume {checkpoint}"


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Two processes to three, promoted."""
    move = new_move(tmp_path_factory.mktemp("hf"), "huggingface")
    move.train(2, "--per-device", 3, "--accumulation", 2, "--steps", 8, "--save-dir", "saved")
    move.draft(
        *("saved/checkpoint-8", "dp_replicate=2", "dp_replicate=3", ARGUMENTS),
        batch__global_batch=12,
        batch__max_microbatch=2,
    )
    result = move.run()
    assert result.verdict.decision == "promote", wrongly(result)
    return move


def test_from_two_processes_to_three(promoted: Move) -> None:
    assert not (promoted.folder / "unused").exists() or not list((promoted.folder / "unused").iterdir())


def test_an_optimizer_that_is_not_restored(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="hf-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_data_that_begins_again(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="hf-restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

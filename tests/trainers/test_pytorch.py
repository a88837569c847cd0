"""Plain PyTorch with DCP: four ranks, HSDP or TP x FSDP2, moved to three FSDP2 ranks, and broken.

FSDP2 on four ranks moved to three and to HSDP, with many faults, is in tests/multiprocess/test_demo.py, and moved to
TP x FSDP2 in test_labels.py beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.moves import Move, codes, new_move, wrongly
from support.warm_ranks import warm_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS = "--size tiny --global-batch 12 --warmup 3 --schedule-updates 60 --log-every 5"
ARGUMENTS = f"{SETTINGS} --layout {{layout}} --max-microbatch {{max_microbatch}} --updates 100 --resume {{checkpoint}}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has torch imported."""
    with warm_launches():
        yield


def move_to_three(folder: Path, source: str) -> Move:
    """Trains on the four ranks of `source` and moves the run to three."""
    move = new_move(folder, "pytorch")
    move.train(4, *SETTINGS.split(), "--layout", source, "--max-microbatch", 2, "--updates", 8, "--save-dir", "saved")
    move.draft(
        *("saved/step-8", source, "dp_shard=3", ARGUMENTS),
        batch__global_batch=12,
        batch__max_microbatch=2,
        progress__tokens=...,
    )
    result = move.run()
    assert result.verdict.decision == "promote", wrongly(result)
    return move


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Tensor parallel times sharded to sharded alone, promoted."""
    return move_to_three(tmp_path_factory.mktemp("tp"), "tp=2,dp_shard=2")


def test_hybrid_sharded_to_sharded(tmp_path: Path) -> None:
    move_to_three(tmp_path, "dp_replicate=2,dp_shard=2")


def test_an_optimizer_that_is_not_restored(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="torch-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_data_that_begins_again(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

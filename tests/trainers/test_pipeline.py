"""torch.distributed.pipelining with DCP: two stages moved to one, and broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.moves import Move, codes, new_move, wrongly
from support.warm_ranks import warm_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ARGUMENTS = "--batch {global_batch} --at-once {max_microbatch} --steps 100 --resume {checkpoint}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has the framework imported."""
    with warm_launches("torch.distributed.pipelining"):
        yield


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Two pipeline stages to one, promoted."""
    move = new_move(tmp_path_factory.mktemp("pp"), "pipeline")
    move.train(2, "--steps", 8, "--save-dir", "saved")
    move.draft("saved", "pp=2", "pp=1", ARGUMENTS, batch__global_batch=12, batch__max_microbatch=3)
    result = move.run()
    assert result.verdict.decision == "promote", wrongly(result)
    return move


def test_an_optimizer_that_is_not_restored(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="torch-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_data_that_begins_again(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

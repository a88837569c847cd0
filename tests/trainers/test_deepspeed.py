"""DeepSpeed: ZeRO 1, 2 and 3, rewritten for another number of ranks in their own format, moved, and broken."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.moves import Move, codes, new_move, wrongly
from support.warm_ranks import ZERO, warm_launches

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ARGUMENTS = "--at-once {max_microbatch} --passes {passes} --steps 100 --resume {checkpoint}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has the framework imported."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warm_launches(*ZERO):
        yield


def move(folder: Path, stage: int, ranks: int, to: int, *flags: str) -> Move:
    """Trains 12 samples an update on `ranks` ranks and moves the run to `to` ranks through a converted checkpoint.

    The controls resume what DeepSpeed saved on the ranks that saved it, once in other microbatches.
    """
    moved = new_move(folder, "deepspeed")
    moved.train(
        *(ranks, "--stage", stage, "--at-once", 3, "--passes", 4 // ranks, "--steps", 8, "--save-dir", "saved", *flags)
    )
    moved.draft(
        *("saved", f"dp_shard={ranks}", f"dp_shard={to}", " ".join((f"--stage {stage} {ARGUMENTS}", *flags))),
        batch__global_batch=12,
        batch__max_microbatch=min(3, 12 // to),
        run__precision="bfloat16" if flags else "float32",
    )
    text = moved.manifest.read_text()
    kept = [line for line in text.splitlines() if not line.startswith("convert:")]
    moved.manifest.write_text("\n".join([*kept, "convert: {to: zero}", ""]))
    result = moved.run()
    assert result.verdict.decision == "promote", wrongly(result)
    native, converted = (measured(moved, name) for name in ("02-control", "03-load"))
    assert native["controls"] == ["first", "repeat-2"]
    assert native["tensors"] == converted["tensors"] > 0
    assert native["state"] == converted["state"]  # one digest of all values
    return moved


def measured(moved: Move, stage: str) -> dict[str, Any]:
    """Returns what a stage found of what the job had loaded."""
    return json.loads((moved.rundir.stage(stage) / "result.json").read_text())["measured"]


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """ZeRO 3 on four ranks to three, promoted."""
    return move(tmp_path_factory.mktemp("zero3"), 3, 4, 3)


MOVES = {
    "1, 4 to 3": (1, 4, 3),
    "2, 2 to 4, bf16": (2, 2, 4, "--bf16"),
}
MORE = {
    "1, 2 to 4": (1, 2, 4),
    "2, 4 to 3": (2, 4, 3),
    "3, 2 to 4": (3, 2, 4),
}
"""Every stage is moved once above or in `promoted`, some to fewer ranks and some to more."""


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in MOVES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in MORE.items()),
    ],
)
def test_another_number_of_ranks(case: tuple[Any, ...], tmp_path: Path) -> None:
    move(tmp_path, *case)


def test_a_native_resume_without_the_optimizer(promoted: Move, tmp_path: Path) -> None:
    """On the ranks that saved, as the control: it is judged like any other."""
    result = promoted.copy(tmp_path / "move").run(fault="deepspeed-forget-optimizer", stage="02-control")
    assert result.verdict.decision != "promote"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_an_optimizer_that_is_not_restored(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="deepspeed-forget-optimizer", stage="03-load")
    assert result.verdict.decision == "reject"
    assert "SR-LOAD-OPT-RESET" in codes(result), wrongly(result)


def test_data_that_begins_again(promoted: Move, tmp_path: Path) -> None:
    result = promoted.copy(tmp_path / "move").run(fault="restart-data", stage="05-update")
    assert result.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(result), wrongly(result)

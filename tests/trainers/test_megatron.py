"""Megatron-core: distributed checkpoints moved to other tensor, pipeline and data ranks, and broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.moves import Move, codes, new_move, wrongly
from support.warm_ranks import warm_launches

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

DEGREES = "--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
ARGUMENTS = f"{DEGREES} --micro-batch-size {{max_microbatch}} --train-iters 100 --load {{checkpoint}}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has the framework imported."""
    with warm_launches("megatron.core", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer"):
        yield


def move(folder: Path, source: str, to: str, *flags: str, convert: bool = False, **answers: object) -> Move:
    """Trains 12 samples an update at the layout `source` and moves the run to the layout `to`."""
    moved = new_move(folder, "megatron")
    degrees = {"tp": 1, "pp": 1, "dp_shard": 1} | {
        axis: int(size) for axis, size in (part.split("=") for part in source.split(","))
    }
    ranks = degrees["tp"] * degrees["pp"] * degrees["dp_shard"]
    moved.train(ranks, *DEGREES.format(**degrees).split(), "--train-iters", 8, "--save", "saved", *flags)
    moved.draft(
        *("saved", source, to, " ".join((ARGUMENTS, *flags))),
        batch__global_batch=12,
        batch__max_microbatch=2,
        run__optimizer="FusedAdam",
        progress__scheduler=None,
        run__precision="bfloat16" if "--bf16" in flags else "float32",
        **answers,
    )
    if convert:
        text = moved.manifest.read_text()
        kept = [line for line in text.splitlines() if not line.startswith("convert:")]
        moved.manifest.write_text("\n".join([*kept, "convert: {to: megatron}", ""]))
    result = moved.run()
    assert result.verdict.decision == "promote", wrongly(result)
    return moved


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Move:
    """Two tensor-parallel ranks to one, promoted."""
    return move(tmp_path_factory.mktemp("tp"), "tp=2", "tp=1")


def test_promoted(promoted: Move) -> None:
    pass

"""DeepSpeed's experts at other degrees: stock `load_checkpoint` goes on from what samerun writes, value for value.

Runs where DeepSpeed is installed. About half a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("deepspeed")

from samerun.convert.convert import convert
from samerun.core.mesh import Layout
from samerun.formats.detect import open_checkpoint
from samerun.plan.memory import estimate_memory
from support import dsmoe
from support.dsjob import differing
from support.dsmoe import Job

pytestmark = [
    pytest.mark.framework,
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

SAVED = 3
_LOSS = 5e-7  # fp32, over five updates
Moved = Callable[..., Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Four ranks, each layer's 6 and 12 experts over two of them, stage 2."""
    folder = tmp_path_factory.mktemp("experts")
    return folder, dsmoe.make_source(Job(2, 2), 4, folder / "source", updates=SAVED)


def moved(folder: Path, layout: Layout, to: str = "zero") -> Path:
    dest = folder / f"{to}-{layout}"
    checkpoint = open_checkpoint(folder / "source")
    convert(checkpoint, dest, to=to, layout=layout)
    checkpoint.close()
    return dest


def labelled(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "name"} for group in groups]


@pytest.mark.parametrize(("stage", "ep", "ranks"), [(2, 2, 2), (1, 3, 3)])
def test_the_engine_goes_on_at_another_degree(stage: int, ep: int, ranks: int, source: Any) -> None:
    folder, truth = source
    found = dsmoe.resume(Job(stage, ep), ranks, moved(folder, Layout(dp_shard=ranks, ep=ep)), first=SAVED)
    assert differing(found["held"], truth["held"]) == []
    assert len(found["held"]) > 300  # masters, both moments and steps of 18 experts, frozen parameters, buffers
    assert labelled(found["facts"]["groups"]) == labelled(truth["facts"]["groups"])
    assert {group["name"] for group in found["facts"]["groups"] if group.get("moe")} == {f"ep_size_{ep}"}
    assert found["facts"]["counters"] == truth["facts"]["counters"]
    assert found["client"] == SAVED * dsmoe.BATCH
    assert found["later"] == pytest.approx(truth["later"], abs=_LOSS)


def test_load_universal_gives_every_rank_the_first_rank_s_experts(source: Any) -> None:
    """Why `universal` is refused for ep > 1: written for ep=1 it is right there, and silently wrong at ep=2."""
    folder, truth = source
    dest = moved(folder, Layout(dp_shard=2), "universal")
    trained = {name for name in truth["held"] if name.startswith("fp32/")}
    alone = dsmoe.resume(Job(2, 1, universal=True), 2, dest, more=0)["held"]
    assert [name for name in sorted(trained) if not np.array_equal(alone[name], truth["held"][name])] == []
    dealt = dsmoe.resume(Job(2, 2, universal=True), 2, dest, more=0)["held"]
    wrong = [name for name in sorted(trained) if not np.array_equal(dealt[name], truth["held"][name])]
    assert wrong == [name for name in sorted(trained) if _of_second_rank(name)]


def _of_second_rank(name: str) -> bool:
    layer, _, number = name.partition(".deepspeed_moe.experts.deepspeed_experts.")
    return bool(number) and int(number.partition(".")[0]) >= (3 if layer.endswith(".0") else 6)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_memory_estimate_counts_dealt_experts(stage: int, source: Any) -> None:
    folder, truth = source
    state = open_checkpoint(folder / "source").state
    for rank in estimate_memory(state, Layout(dp_shard=4, ep=2), stage=stage).per_rank:
        held = truth["bytes"][rank.rank]
        assert rank.parameters_bytes == pytest.approx(held["parameters"], rel=0.1)
        assert rank.optimizer_bytes == pytest.approx(held["optimizer"], rel=0.1)
        assert rank.masters_bytes == pytest.approx(held["masters"], rel=0.1)
    other = estimate_memory(state, Layout(dp_shard=4), stage=stage).per_rank[0]
    assert other.parameters_bytes != pytest.approx(truth["bytes"][0]["parameters"], rel=0.1)

"""What samerun writes for Hugging Face, resumed by the stock Trainer and the stock Accelerate on other ranks.

Runs where transformers and accelerate are importable; `tests/formats/test_huggingface_write.py` is for everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.convert.convert import convert
from samerun.formats.detect import open_checkpoint
from support import hfjob
from support.gloo import import_frameworks, run_ranks
from support.warm_ranks import HUGGING_FACE

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What every rank would import."""
    import_frameworks(*HUGGING_FACE)


# One update of Adam moves a value by at most the rate (1e-3, 2e-3). Sums over samples in another order change gradients
# by some units in the last place, 1e-7 of them, and an update relatively by as much.
_ROUNDING = 2e-3 * 1e-3


def through_dcp(source: Path, folder: Path, **options: Any) -> Path:
    """Converts to DCP and from there for Hugging Face."""
    for step, start, to in (("dcp", source, "dcp"), ("moved", folder / "dcp", "huggingface")):
        with_source = open_checkpoint(start)
        try:
            convert(with_source, folder / step, to=to, allow=("SR-WRITE-OBJECT",), **options)
        finally:
            with_source.close()
    return folder / "moved"


def check_resumed(found: dict[str, Any], control: dict[str, Any]) -> None:
    assert found["saved"].keys() == control["saved"].keys()
    for key, value in control["saved"].items():
        assert found["saved"][key].tobytes() == value.tobytes(), key
    assert found["rates"] == control["rates"]
    moved = [float(np.abs(value - control["saved"][key]).max()) for key, value in control["next"].items()]
    assert max(moved) > 1e-4  # the update was taken
    for key, value in control["next"].items():
        scale = max(1.0, float(np.abs(value).max())) if key.startswith("optim") else 1.0
        assert np.abs(found["next"][key] - value).max() <= _ROUNDING * scale, key


@pytest.fixture(scope="module", params=[0.1, 0.0])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, float]:
    """A stock Trainer's run on two ranks: its directory, what each rank held, and the weight decay."""
    folder = tmp_path_factory.mktemp("trainer")
    return folder, run_ranks(2, hfjob.train, folder, None, request.param, timeout=300), request.param


def test_a_trainer_checkpoint_resumes_after_the_round_trip(trained: Any, tmp_path: Path):
    folder, control, decay = trained
    moved = through_dcp(folder / f"checkpoint-{hfjob.SAVED}", tmp_path)
    for world_size in (1, 2, 3):
        found = run_ranks(world_size, hfjob.train, None, moved, decay, timeout=300)
        for one in found:
            check_resumed(one, control[0])
        if world_size == 2:
            assert [one["rng"] for one in found] == [one["rng"] for one in control]
            for one, other in zip(found, control, strict=True):
                assert {key: value.tobytes() for key, value in one["next"].items()} == {
                    key: value.tobytes() for key, value in other["next"].items()
                }


def test_an_fsdp2_job_becomes_a_trainer_s(trained: Any, tmp_path: Path):
    folder, control, decay = trained
    run_ranks(3, hfjob.shard, folder / f"checkpoint-{hfjob.SAVED}", tmp_path / "fsdp2", decay, timeout=300)
    source = open_checkpoint(tmp_path / "fsdp2")
    assert len(source.state.groups) == (2 if decay else 1)
    done = convert(source, tmp_path / "moved", to="huggingface")
    assert "SR-HFW-LAMBDAS" in {problem.code for problem in done.problems}
    assert ("SR-HFW-DEALT" in {problem.code for problem in done.problems}) is (decay == 0.0)
    source.close()
    for world_size in (1, 2):
        check_resumed(run_ranks(world_size, hfjob.train, None, tmp_path / "moved", decay, timeout=300)[0], control[0])


def test_an_accelerate_checkpoint_resumes_after_the_round_trip(tmp_path: Path):
    control = run_ranks(2, hfjob.accelerate, tmp_path / "state", None, timeout=300)
    moved = through_dcp(tmp_path / "state", tmp_path)
    for world_size in (1, 2, 3):
        found = run_ranks(world_size, hfjob.accelerate, None, moved, timeout=300)
        for one in found:
            check_resumed(one, control[0])
        if world_size == 2:
            assert [one["rng"] for one in found] == [one["rng"] for one in control]

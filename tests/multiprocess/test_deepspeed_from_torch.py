"""Runs that torch alone trained, moved into DeepSpeed at another number of ranks: native and universal, every stage.

The source is a DCP directory of FSDP2 or of replicas, or a file of torch.save; the truth is the run that went on.
Runs where DeepSpeed is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from samerun.cli import root
from support.dsjob import RESTORE_MODEL, RESTORE_STAGE3, Job, differing, resume
from support.gloo import import_frameworks
from support.plainjob import make_source
from support.warm_ranks import ZERO

pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What every rank would import."""
    import_frameworks(*ZERO)


MARK = 5e-7  # follows an exact state at another number of ranks: stage 0 itself differs by as much
ALLOW = ("SR-DSW-ROLE", "SR-WRITE-OBJECT", "SR-CONVERT-OBJECT")


@pytest.fixture(scope="module", params=["replicas", "fsdp2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("torch") / "run"
    truth = make_source(Job(3 if request.param == "fsdp2" else 0), 3, folder)
    return folder, {**truth, "kind": request.param}


@pytest.mark.parametrize(
    ("saved", "to", "stage"),
    [
        ("dcp", "zero", 1),
        ("run.pt", "zero", 2),
        ("dcp", "zero", 3),
        ("dcp", "universal", 2),
        ("run.pt", "universal", 3),
    ],
)
def test_goes_on_in_deepspeed(
    saved: str, to: str, stage: int, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, truth = trained
    command = ["convert", str(folder / saved), str(tmp_path / "moved"), "--to", to, "--layout", "dp=2"]
    command += [part for code in ALLOW for part in ("--allow", code)]
    if to == "zero":
        command += ["--stage", str(stage)]
    if saved == "dcp" and truth["kind"] == "replicas":  # there a frozen parameter and a buffer look alike
        (tmp_path / "roles.yaml").write_text('"buffer:frozen_bias": "param:frozen_bias"\n')
        command += ["--map", str(tmp_path / "roles.yaml")]
    root.main(command, standalone_mode=False)
    universal = to == "universal"
    remedy = RESTORE_MODEL + (RESTORE_STAGE3 if stage == 3 else "") if universal else ""
    found = resume(Job(stage), 2, tmp_path / "moved", universal=universal, remedy=remedy)
    assert differing(found["held"], truth["held"]) == []
    assert found["facts"]["global_steps"] == 5
    assert set(found["facts"]["steps"]) == {5.0}
    off = [abs(a - b) for a, b in zip(found["losses"], truth["later"], strict=True)]
    assert max(off) < MARK, off

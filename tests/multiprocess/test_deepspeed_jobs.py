"""Real DeepSpeed jobs load what samerun writes, at another number of ranks, and go on as the run would have.

Runs where DeepSpeed is installed, which the development environment has not: see tests/golden/deepspeed/PROVENANCE.md.
The whole table in docs/formats/universal.md comes from scripts/universal_matrix.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from samerun.core.mesh import Layout
from samerun.formats.detect import open_checkpoint
from samerun.formats.universal.write import lay_out as lay_out_universal
from samerun.formats.zero.write import lay_out as lay_out_zero
from support.dsjob import RESTORE_MODEL, RESTORE_STAGE3, Job, differing, make_source, resume
from support.gloo import import_frameworks
from support.warm_ranks import ZERO
from support.written import carry_out, source_of

pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What every rank would import."""
    import_frameworks(*ZERO)


# Follows an exact state at another number of ranks: stage 0 itself differs by as much.
MARK = 5e-7

JOBS = {
    "stage 2": Job(2, unused=True),
    "stage 3": Job(3, unused=True, sub_group_size=1500),
}


@pytest.fixture(scope="module", params=list(JOBS))
def moved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path, dict[str, Any]]:
    job, folder = JOBS[request.param], tmp_path_factory.mktemp("moved")
    truth = make_source(job, 3, folder / "source")
    checkpoint = open_checkpoint(folder / "source")
    for name, lay_out in (("zero", lay_out_zero), ("universal", lay_out_universal)):
        carry_out(lay_out(source_of(checkpoint), Layout(dp_shard=2)), checkpoint, folder / name)
    return job, folder, truth


def assert_goes_on(found: dict[str, Any], truth: dict[str, Any]) -> None:
    assert differing(found["held"], truth["held"]) == []
    for key in ("groups", "global_steps", "global_samples", "scheduler"):
        assert found["facts"][key] == truth["facts"][key]
    assert set(found["facts"]["steps"]) == {5.0}
    off = [abs(a - b) for a, b in zip(found["losses"], truth["later"], strict=True)]
    assert max(off) < MARK, off


def test_native_files_load_at_another_degree(moved: tuple[Job, Path, dict[str, Any]]) -> None:
    job, folder, truth = moved
    found = resume(job, 2, folder / "zero")
    assert_goes_on(found, truth)
    assert found["client"] == {**found["client"], "epoch": 1, "consumed_samples": 60}


def test_universal_files_load_at_another_degree_with_the_documented_lines(
    moved: tuple[Job, Path, dict[str, Any]],
) -> None:
    job, folder, truth = moved
    lines = RESTORE_MODEL + (RESTORE_STAGE3 if job.stage == 3 else "")
    found = resume(job, 2, folder / "universal", universal=True, remedy=lines)
    assert_goes_on(found, truth)
    left = differing(found["held_before"], truth["held"])
    assert left == ["buffer/n_calls", "buffer/running_mean", "module/frozen_bias"], "what the lines are for"


def test_another_stage_loads_the_same_universal_directory(moved: tuple[Job, Path, dict[str, Any]]) -> None:
    job, folder, truth = moved
    other = replace(job, stage=3 if job.stage == 2 else 1)
    lines = RESTORE_MODEL + (RESTORE_STAGE3 if other.stage == 3 else "")
    assert_goes_on(resume(other, 2, folder / "universal", universal=True, remedy=lines), truth)


def test_a_wrong_byte_in_a_moment_shows(moved: tuple[Job, Path, dict[str, Any]]) -> None:
    from samerun.formats.torchfile import read_archive

    job, folder, truth = moved
    path = next((folder / "zero" / "global_step5").glob("zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    data = bytearray(path.read_bytes())
    largest = max(read_archive(bytes(data), path).records.values(), key=lambda record: record.num_bytes)
    before = bytes(data)
    data[largest.offset_bytes + 2] ^= 0x40
    path.write_bytes(bytes(data))
    found = resume(job, 2, folder / "zero", more=1)
    path.write_bytes(before)
    assert len(differing(found["held"], truth["held"])) == 1

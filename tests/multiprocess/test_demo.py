"""The main job with real processes: clean moves are promoted, every injected fault is rejected under its own name.

One tiny run is trained once (4 ranks, FSDP2, DCP) and moved many times. Moves with a fault share the sealed control of
the clean move, as `samerun demo` itself does. The move to TP x DP is in test_labels.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samerun.demo.faults import FAULTS
from support.warm_ranks import warm_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

REPLICATED = "dp_replicate=2,dp_shard=2"
UPDATES = 10  # 13..22 contain a logging and an evaluation boundary

# The faults that everybody knows, and one for each stage and each kind of evidence. `scripts/fault_matrix.py` runs all.
CHOSEN = (
    *("shard-missing", "shard-stale", "shard-corrupt", "world-size", "other-layout", "batch-drift", "accumulation"),
    *("optimizer-reset", "moments-swapped", "replica-diverged", "one-bit", "weight-nan", "scheduler-ahead"),
    *("learning-rate-doubled", "heads-interleaved", "sampler-restart", "updates-exchanged", "gradient-nan"),
    *("parameter-held", "replica-drifts", "average-stands", "scaler-counts", "gradient-of-one", "clipping-lost"),
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has torch imported."""
    with warm_launches():
        yield


def demo(directory: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Runs `samerun demo --json`; returns exit code, judge document and everything that was shown."""
    command = [sys.executable, "-m", "samerun", "demo", "--dir", str(directory), "--size", "tiny"]
    command += ["--updates", str(UPDATES), "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=900)
    if not done.stdout.strip():
        raise AssertionError(f"exit {done.returncode}, no judge document:\n{done.stderr[-6000:]}")
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "work"


@pytest.fixture(scope="module")
def promoted(directory: Path) -> dict[str, tuple[int, dict[str, Any], str]]:
    """The clean moves: 4 FSDP2 ranks to 3, and to HSDP."""
    return {layout: demo(directory, "--to", layout) for layout in ("dp_shard=3", REPLICATED)}


@pytest.mark.timeout(1800)
def test_clean_moves_are_promoted(
    promoted: dict[str, tuple[int, dict[str, Any], str]],
) -> None:
    for layout, (code, verdict, shown) in promoted.items():
        assert (code, verdict["verdict"]) == (0, "promote"), f"{layout}: {verdict.get('reasons')}\n{shown[-3000:]}"
        assert verdict["schema"] == "samerun/judge/1"
        assert verdict["label"] == "continuation"
        assert verdict["first_divergence"] is None
        assert all(criterion["pass"] for criterion in verdict["criteria"])
        assert verdict["validated"]["batch"]["global_batch"] == 32
    assert promoted["dp_shard=3"][1]["validated"]["layout"]["dp_shard"] == 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHOSEN)
def test_every_fault_is_rejected_under_its_own_name(
    directory: Path, promoted: dict[str, tuple[int, dict[str, Any], str]], name: str
) -> None:
    fault = FAULTS[name]
    code, verdict, shown = demo(directory, "--break", name)
    assert (code, verdict["verdict"]) == (1, "reject"), shown[-3000:]
    assert verdict["named"], f"wanted one of {fault.codes}, found {[reason['code'] for reason in verdict['reasons']]}"
    assert verdict["first_divergence"]["kind"] == fault.kind.value
    if name == "heads-interleaved":
        assert verdict["first_divergence"]["where"]["module"].startswith("blocks.0.attention.")


def test_the_moved_run_and_the_control_consume_the_same_samples(
    directory: Path, promoted: dict[str, tuple[int, dict[str, Any], str]]
) -> None:
    from samerun.trace import read_trace

    stages = directory / "run-tiny-float32-0/moves/dp_shard=3/run/stages"
    control = read_trace(next(stages.glob("02-control/**/trace")))
    moved = read_trace(next(stages.glob("06-window/**/trace")))
    assert {len(trace.ranks) for trace in (control, moved)} == {4, 3}
    for update in range(13, 13 + UPDATES):
        consumed = [sorted(id for ids in trace.sample_ids(update).values() for id in ids) for trace in (control, moved)]
        assert consumed[0] == consumed[1]
        assert len(set(consumed[0])) == 32

"""The example scripts: the uninterrupted run and the moved one are one run. The GPT is started by torchrun itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samerun.errors import has_errors
from samerun.trace import Trace, check_trace, read_trace
from support.warm_ranks import warm_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(1800)]

TOP = Path(__file__).parents[2]
GPT = TOP / "examples" / "pytorch" / "train.py"
DDP = TOP / "examples" / "ddp" / "train.py"
SMALL = ("--size", "tiny", "--global-batch", "14", "--max-microbatch", "3", "--warmup", "3", "--schedule-updates", "20")


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """The jobs of tests that ask for it fork their ranks from one process that has torch imported."""
    with warm_launches():
        yield


def torchrun(ranks: int, script: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAMERUN_")}
    path = os.pathsep.join(filter(None, (str(TOP / "src"), environment.get("PYTHONPATH"))))
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return subprocess.run(
        [*launcher, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=800,
        env=environment,
        check=False,
    )


def sound(directory: Path) -> Trace:
    trace = read_trace(directory)
    assert not has_errors(check_trace(trace))
    return trace


def same_run(whole: Trace, moved: Trace, updates: range) -> None:
    assert moved.update_indices == tuple(updates)
    for index in updates:
        mine, theirs = moved.lead.update(index), whole.lead.update(index)
        assert mine is not None
        assert theirs is not None
        assert sorted(sum(moved.sample_ids(index).values(), ())) == sorted(sum(whole.sample_ids(index).values(), ()))
        assert moved.global_totals(index) == whole.global_totals(index)
        assert mine.lr == theirs.lr
        assert mine.loss == pytest.approx(theirs.loss, rel=2e-6)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-5)
        assert mine.update_norm == pytest.approx(theirs.update_norm, rel=2e-4)


def test_the_gpt_from_four_ranks_to_three(tmp_path: Path) -> None:
    whole = torchrun(
        *(4, GPT, *SMALL, "--layout", "dp_shard=4", "--updates", 8, "--save-at", 4),
        *("--save-dir", tmp_path / "ckpt", "--trace-dir", tmp_path / "whole", "--eval-every", 4),
    )
    assert whole.returncode == 0, whole.stderr[-3000:]
    resume = (*SMALL, "--layout", "dp_shard=3", "--resume", tmp_path / "ckpt" / "step-4")
    moved = torchrun(3, GPT, *resume, "--updates", 8, "--trace-dir", tmp_path / "moved", "--eval-every", 4)
    assert moved.returncode == 0, moved.stderr[-3000:]
    there, here = sound(tmp_path / "whole"), sound(tmp_path / "moved")
    same_run(there, here, range(5, 9))
    assert here.lead.header.batch is not None
    assert {cell for row in here.lead.header.batch["microbatches"] for cell in row} == {2, 3}  # dealt unevenly
    tokens = {rank.updates[0].tokens for rank in here.ranks}
    assert len(tokens) > 1  # and with unequal numbers of valid tokens
    loaded = here.lead.state("loaded")
    assert loaded is not None
    assert loaded.update == 4
    assert loaded.body["disagreements"] == []
    assert [(line.what, line.update) for line in there.lead.boundaries] == [
        ("eval", 4),
        ("save", 4),
        ("log", 8),
        ("eval", 8),
        ("save", 8),
    ]

    launched = torchrun(
        *(3, GPT, *resume, "--updates", 20, "--save-at", 5, "--save-dir", tmp_path / "forbidden"),
        SAMERUN_STAGE="control",
        SAMERUN_TRACE_DIR=str(tmp_path / "control"),
        SAMERUN_MAX_UPDATES="2",
    )
    assert launched.returncode == 0, launched.stderr[-3000:]
    control = sound(tmp_path / "control")
    same_run(there, control, range(5, 7))
    assert [line.when for line in control.lead.states] == ["loaded", "end"]
    assert [(line.state_unchanged, line.rng_unchanged) for line in control.lead.evals] == [(True, True)]
    assert not (tmp_path / "forbidden").exists()


@pytest.mark.usefixtures("warm")
def test_the_gpt_refuses_what_would_make_it_another_run(tmp_path: Path) -> None:
    made = torchrun(1, GPT, *SMALL, "--updates", 1, "--save-dir", tmp_path)
    assert made.returncode == 0, made.stderr[-3000:]
    other = torchrun(1, GPT, *SMALL, "--updates", 2, "--resume", tmp_path / "step-1", "--lr", "0.5")
    assert other.returncode != 0
    assert "another settings" in other.stderr
    wrong = torchrun(1, GPT, *SMALL, "--layout", "dp_shard=2")
    assert wrong.returncode != 0
    assert "needs 2 ranks, but 1 were started" in wrong.stderr


@pytest.mark.usefixtures("warm")
def test_the_classifier_from_two_ranks_to_three(tmp_path: Path) -> None:
    batch = ("--batch", 10, "--at-once", 2)  # three replicas: 2 2 2 / 2 1 1
    whole = torchrun(2, DDP, *batch, "--steps", 8, "--ledger", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr[-3000:]
    first = torchrun(2, DDP, *batch, "--steps", 4, "--out", tmp_path / "ckpt")
    assert first.returncode == 0, first.stderr[-3000:]
    moved = torchrun(3, DDP, *batch, "--steps", 8, "--from", tmp_path / "ckpt" / "4", "--ledger", tmp_path / "moved")
    assert moved.returncode == 0, moved.stderr[-3000:]
    there, here = sound(tmp_path / "whole"), sound(tmp_path / "moved")
    same_run(there, here, range(5, 9))
    assert here.lead.header.layout == {"dp_replicate": 3}
    last = here.lead.update(8)
    assert last is not None
    assert last.loss is not None

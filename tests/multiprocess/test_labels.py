"""What a run may call itself: every label from a real move, a rehearsal, and bounds from analysis with an fp64 oracle.

One tiny run is trained once (4 ranks, FSDP2); the controls of the moves are run once per declaration.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samerun.formats.detect import open_checkpoint
from samerun.manifest.tolerances import METRICS
from samerun.runner.run import RunResult, run_migration
from samerun.runner.rundir import RunDirectory
from support.manifests import manifest_data, to_yaml
from support.warm_ranks import WARM_PATH, warm_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "pytorch" / "train.py"
TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node {world_size}"
ARGUMENTS = "--size tiny --layout {layout} --global-batch {global_batch} --max-microbatch {max_microbatch}"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{WARM_PATH}"}
RESUME = f"{ARGUMENTS} --resume {{checkpoint}} --updates 100"
CLEAN = f"{TORCHRUN} {TRAIN} {RESUME}"
ORACLE = f"{TORCHRUN} {TRAIN} {RESUME} --precision float64"
VARIED = {"control__vary_microbatch": 2}
UPDATES = 8  # 13..20 contain a logging and an evaluation boundary


def with_fault(name: str) -> str:
    return f"{TORCHRUN} -m samerun.demo.sabotage {name} {TRAIN} {RESUME}"


def train(folder: Path, *arguments: str, ranks: int = 4, updates: int = 12) -> Path:
    words = f"{TORCHRUN} {TRAIN} --layout {{layout}} --global-batch 32 --max-microbatch 4 --save-dir {folder}"
    command = words.format(python=sys.executable, world_size=ranks, layout=f"dp_shard={ranks}").split()
    command += ["--updates", str(updates), *arguments]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, timeout=300, capture_output=True)
    return folder / f"step-{updates}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Every job of this module forks its ranks from one process that has torch imported."""
    with warm_launches():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("source"), "--size", "tiny")


@pytest.fixture(scope="module")
def recorded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two controls with the script as it is, run once; the moves below take them as recorded traces."""
    folder = tmp_path_factory.mktemp("controls")
    result = move(folder, checkpoint, VARIED, until="control")
    assert result.stopped_at == "02-control", result.verdict.reasons
    place = RunDirectory(folder / "move.run").stage("02-control")
    return {"control__kind": "trace", "control__trace": str(place)}


def move(
    folder: Path, checkpoint: Path, control: dict[str, Any], *, until: str | None = None, **changes: Any
) -> RunResult:
    """Moves the run to three ranks as declared."""
    folder.mkdir(exist_ok=True)
    base = {
        "run__checkpoint": str(checkpoint),
        "batch__max_microbatch": 4,
        "control__vary_microbatch": None,
        "progress__tokens": open_checkpoint(checkpoint).state.progress.tokens,
        "window__updates": UPDATES,
        "launch__command": CLEAN,
        "launch__source_command": CLEAN,  # controls never have a fault
        "launch__environment": ENVIRONMENT,
        "launch__timeout_seconds": 300.0,
        **{
            f"tolerances__{metric}": {"from": "control", "factor": 10, "floor": floor}
            for metric, floor in (("grad_norm", 8e-6), ("update_norm", 4e-6), ("parameter_delta", 1.6e-5))
        },
    }
    (folder / "move.yaml").write_text(to_yaml(manifest_data(**{**base, **control, **changes})))
    return run_migration(folder / "move.yaml", until=until)


def record(folder: Path) -> dict[str, Any]:
    return json.loads(RunDirectory(folder / "move.run").verdict.read_text())


def again(folder: Path, command: str, reason: str) -> RunResult:
    """Runs the move again with another command."""
    text = (folder / "move.yaml").read_text().splitlines(keepends=True)
    place = next(number for number, line in enumerate(text) if line.startswith("  command:"))
    text[place] = f"  command: {json.dumps(command)}\n"
    (folder / "move.yaml").write_text("".join(text))
    return run_migration(folder / "move.yaml", reseal_reason=reason)


def restate(folder: Path, before: str, after: str, reason: str) -> RunResult:
    """Runs the candidates again under another tolerance."""
    text = (folder / "move.yaml").read_text()
    assert text.count(before) == 1
    (folder / "move.yaml").write_text(text.replace(before, after))
    return run_migration(folder / "move.yaml", reseal_reason=reason)


def codes(result: RunResult) -> set[str]:
    return {problem.code for problem in result.verdict.reasons}


def test_an_approximate_continuation_names_its_samples_and_keeps_its_bound(
    checkpoint: Path, recorded: dict[str, Any], tmp_path: Path
) -> None:
    declared = {
        "transition__label": "approximate-continuation",
        "transition__reason": "the loader's last prefetched sample is lost",
        "transition__omission_bound": 3,  # one on each of three ranks
        "transition__replay_bound": 3,
        "launch__command": with_fault("one-sample-changed"),
    }
    result = move(tmp_path / "a", checkpoint, recorded, **declared)
    assert result.verdict.decision == "promote", result.verdict.reasons
    body = record(tmp_path / "a")
    assert body["label"] == "approximate-continuation"
    assert body["equivalence"] == "the uninterrupted run, up to the samples that are listed"
    samples = {row["what"]: row for row in body["changes"] if row["part"] == "samples"}
    assert [len(samples[what]["ids"]) for what in ("replayed", "omitted")] == [3, 3]
    assert body["numbers_compared"] == 0  # the first update has another sample: no number after it can be compared
    wider = again(tmp_path / "a", with_fault("update-omitted"), "a whole update is lost")
    assert wider.verdict.decision == "reject"
    assert "SR-SAMPLE-OMITTED" in codes(wider)


def test_a_clean_move_to_tensor_parallel_ranks_is_promoted(
    checkpoint: Path, recorded: dict[str, Any], tmp_path: Path
) -> None:
    layout = {"dp_shard": 2, "tp": 2}
    there = {"destination__layout": layout, "destination__world_size": 4, "batch__option": "uniform"}
    result = move(tmp_path / "t", checkpoint, recorded, **there)
    assert result.verdict.decision == "promote", result.verdict.reasons
    body = record(tmp_path / "t")
    assert body["validated"]["layout"] == layout
    assert (body["label"], body["first_divergence"]) == ("continuation", None)
    assert body["numbers_compared"] == UPDATES
    assert all(criterion["pass"] for criterion in body["criteria"])


def test_an_intentional_change_is_judged_by_what_was_declared_for_it(
    checkpoint: Path, recorded: dict[str, Any], tmp_path: Path
) -> None:
    expected = {"from": "user", "limit": 0.25, "reason": "a quarter fewer samples, the same model and schedule"}
    declared = {
        "transition__label": "intentional-change",
        "transition__reason": "three of four machines are left",
        "batch__option": "changed-batch",
        "batch__invariant": "schedule-position",
        "batch__changed": {
            "global_batch": 24,
            "learning_rate": {"policy": "keep"},
            "reason": "the batch follows the machines",
        },
        "declare__batch": "expected-to-change",
        "declare__objects": "expected-to-change",
        "declare__order": "expected-to-change",
        "tolerances__loss": expected,
    }
    result = move(tmp_path / "c", checkpoint, recorded, **declared)
    assert result.verdict.decision == "promote", result.verdict.reasons
    body = record(tmp_path / "c")
    assert body["label"] == "intentional-change"
    assert body["equivalence"] is None
    assert "to the end of training" in body["owed"]
    assert {"part": "batch", "before": 32, "after": 24} in body["changes"]
    assert body["numbers_compared"] == UPDATES
    used = {row["name"]: row["value"] for row in body["criteria"] if row["name"].startswith("numerics.")}
    assert 1e-4 < used["numerics.loss"] < 0.25  # other samples: another loss, within what was stated
    assert "numerics.grad_norm" not in used
    narrow = restate(tmp_path / "c", "limit: 0.25", "limit: 1.0e-6", "as if nothing were to change")
    assert (narrow.verdict.decision, codes(narrow)) == ("reject", {"SR-UPD-LOSS"})
    broken = again(tmp_path / "c", with_fault("weights-swapped"), "the same, with a fault")
    assert broken.verdict.decision == "reject"
    assert "SR-LOAD-PARAM" in codes(broken)


def test_a_warm_start_keeps_the_model_and_owes_a_run(
    checkpoint: Path, recorded: dict[str, Any], tmp_path: Path
) -> None:
    declared = {
        "transition__label": "warm-start",
        "transition__reason": "the optimizer's state was lost",
        "declare__optimizer": "expected-to-change",
        "launch__command": with_fault("optimizer-reset"),
    }
    result = move(tmp_path / "w", checkpoint, recorded, **declared)
    assert result.verdict.decision == "promote", result.verdict.reasons
    body = record(tmp_path / "w")
    assert (body["label"], body["equivalence"]) == ("warm-start", None)
    assert "not where it leads" in body["owed"]
    assert {"part": "optimizer", "declared": "expected-to-change"} in body["changes"]
    assert any(row.get("code") == "SR-LOAD-OPT-RESET" for row in body["changes"])
    broken = again(tmp_path / "w", with_fault("rows-out-of-order"), "the model is not the one that was saved")
    assert broken.verdict.decision == "reject"
    assert "SR-LOAD-PARAM" in codes(broken)


def test_another_environment_is_listed_and_decides_nothing(
    checkpoint: Path, recorded: dict[str, Any], tmp_path: Path
) -> None:
    result = move(tmp_path / "e", checkpoint, recorded, launch__command=f"env NCCL_ALGO=Ring {CLEAN}")
    assert result.verdict.decision == "promote", result.verdict.reasons
    body = record(tmp_path / "e")
    (listed,) = [item for item in body["remarks"] if item["code"] == "SR-JOB-ENVIRONMENT"]
    assert listed["found"].endswith("variables.NCCL_ALGO Ring")
    assert (body["equivalence"], body["owed"], body["changes"]) == (
        "the uninterrupted run", None, [{"part": "rng", "declared": "expected-to-change"}],
    )  # fmt: skip


def test_a_rehearsal_says_that_it_is_one(checkpoint: Path, recorded: dict[str, Any], tmp_path: Path) -> None:
    real = train(tmp_path / "real", "--size", "slim", updates=1)
    rehearsal = {
        "of": str(real),
        "reduced": {"layers": "5 to 2", "data": "the same text, shorter samples"},
        "kept": ["code", "layouts", "optimizer", "schedule"],
    }
    result = move(tmp_path / "r", checkpoint, VARIED, control__rehearsal=rehearsal)
    assert result.verdict.decision == "promote", result.verdict.reasons
    body = record(tmp_path / "r")
    assert body["validated"]["rehearsal"] == rehearsal == body["rehearsal"]
    assert body["equivalence"] is None  # the copy resumed; the real run has not
    assert "the real move" in body["owed"]
    assert any(item["code"] == "SR-RUN-REHEARSED" for item in body["remarks"])
    command = [sys.executable, "-m", "samerun", "judge", str(tmp_path / "r" / "move.run")]
    shown = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300)
    assert (shown.returncode, "REHEARSAL" in shown.stdout) == (0, True)
    other = train(tmp_path / "other", "--size", "slim", ranks=2, updates=1)
    unlike = move(tmp_path / "u", checkpoint, VARIED, control__rehearsal={**rehearsal, "of": str(other)})
    assert (unlike.verdict.decision, codes(unlike)) == ("abstain", {"SR-RUN-REHEARSAL"})


def test_bounds_from_analysis_need_no_second_control(
    checkpoint: Path, recorded: dict[str, Any], tmp_path: Path
) -> None:
    analysed = {
        **{f"tolerances__{metric}": {"from": "analysis"} for metric in METRICS},
        "control__repeats": 1,
        "control__vary_microbatch": None,
        "control__oracle": ORACLE,
    }
    result = move(tmp_path / "n", checkpoint, analysed)
    assert result.verdict.decision == "promote", result.verdict.reasons
    place = RunDirectory(tmp_path / "n" / "move.run")
    seal = json.loads(place.sealed.read_text())["seals"][-1]
    assert seal["tolerances"]["loss"]["origin"] == "analysis"
    assert "Higham" in seal["tolerances"]["loss"]["reason"]
    assert set(seal["controls"]) == {"first", "oracle"}
    beside = place.read_results()["05-update"].measured["oracle"]
    assert {"loss", "grad_norm", "parameter_gradient"} == set(beside)
    for row in beside.values():  # both are rounding away from the truth, and not more
        assert 0 < row["control"] < 1e-4
        assert row["candidate"] < 10 * row["control"] + 1e-7
    for fault, code in (("gradient-a-thousandth", "SR-UPD-GRADNORM"), ("epsilon-changed", "SR-EVAL-LOGITS")):
        broken = again(tmp_path / "n", with_fault(fault), fault)
        assert broken.verdict.decision == "reject"
        assert code in codes(broken)
    single = move(tmp_path / "o", checkpoint, {**analysed, "control__oracle": CLEAN})
    assert (single.verdict.decision, codes(single)) == ("abstain", {"SR-CONTROL-ORACLE"})

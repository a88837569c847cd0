"""The whole sequence on the real example: four ranks to three, killed and resumed, then broken in many ways."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from samerun.errors import StalePlan
from samerun.runner.judging import judge_run
from samerun.runner.launch import find_processes
from samerun.runner.run import RunResult, run_migration
from samerun.runner.rundir import RunDirectory
from support.manifests import manifest_data, to_yaml
from support.warm_ranks import WARM_PATH, warm_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pytorch"
TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node {world_size}"
ARGUMENTS = "--size tiny --layout {layout} --global-batch {global_batch} --max-microbatch {max_microbatch}"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{WARM_PATH}"}
UPDATES = 8  # 13..20 contain a logging and an evaluation boundary


@dataclass(frozen=True)
class Workspace:
    """A folder with the manifest, the script that its launch command starts, and the run directory."""

    folder: Path
    checkpoint: Path
    ledger: Path

    @property
    def manifest(self) -> Path:
        return self.folder / "move.yaml"

    @property
    def rundir(self) -> RunDirectory:
        return RunDirectory(self.folder / "move.run")

    def set_fault(self, name: str) -> None:
        (self.folder / "fault.txt").write_text(name)

    def run(self, **arguments: str) -> RunResult:
        return run_migration(self.manifest, **arguments)

    def copy(self, folder: Path) -> Workspace:
        shutil.copytree(self.folder, folder)
        return Workspace(folder, self.checkpoint, self.ledger)


def train(folder: Path) -> None:
    """Trains past the checkpoint on four ranks and keeps a ledger: the uninterrupted run."""
    words = f"{TORCHRUN} {EXAMPLE}/train.py {ARGUMENTS} --updates 20 --save-at 12 --save-dir {folder}/saved"
    values = {"python": sys.executable, "world_size": 4, "layout": "dp_shard=4", "global_batch": 32}
    command = [*words.format(**values, max_microbatch=4).split(), "--trace-dir", f"{folder}/ledger"]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, timeout=300, capture_output=True)


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """The jobs here fork their ranks from one process that has torch imported; the interrupted one does not."""
    with warm_launches():
        yield


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A clean move, interrupted during its second control, resumed and promoted."""
    source = tmp_path_factory.mktemp("source")
    train(source)
    workspace = Workspace(tmp_path_factory.mktemp("move"), source / "saved" / "step-12", source / "ledger")
    shutil.copy(ROOT / "tests" / "support" / "faulty.py", workspace.folder)
    (workspace.folder / "example.txt").write_text(str(EXAMPLE))
    workspace.set_fault("none")
    ledger = [json.loads(line) for line in (source / "ledger" / "rank-00000.jsonl").read_text().splitlines()]
    tokens = sum(
        line["tokens"]
        for rank in range(4)
        for line in map(json.loads, (source / "ledger" / f"rank-{rank:05d}.jsonl").read_text().splitlines())
        if line["kind"] == "update" and line["update"] <= 12
    )
    assert ledger[0]["kind"] == "header"
    data = manifest_data(
        run__checkpoint=str(workspace.checkpoint),
        batch__max_microbatch=4,
        control__vary_microbatch=2,
        progress__tokens=tokens,
        window__updates=UPDATES,
        launch__command=f"{TORCHRUN} faulty.py {ARGUMENTS} --resume {{checkpoint}} --updates 100",
        launch__environment=ENVIRONMENT,
        launch__timeout_seconds=300.0,
        tolerances__grad_norm={"from": "control", "factor": 10, "floor": 4e-6},
        tolerances__update_norm={"from": "control", "factor": 10, "floor": 4e-6},
        tolerances__parameter_delta={"from": "control", "factor": 10, "floor": 1.6e-5},
    )
    workspace.manifest.write_text(to_yaml(data))
    interrupt(workspace)
    result = workspace.run()
    assert result.verdict.decision == "promote", result.verdict.reasons
    return workspace


def interrupt(workspace: Workspace) -> None:
    """Runs until the second control job is under way, and ends samerun there with SIGTERM. The launcher is torchrun."""
    command = [sys.executable, "-m", "samerun", "run", str(workspace.manifest)]
    environment = {**os.environ, **ENVIRONMENT}
    del environment["WARM_RANKS"]
    runner = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    under_way = workspace.rundir.stage("02-control") / "repeat-2" / "log.txt"
    deadline = time.monotonic() + 300
    while not under_way.exists() and runner.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    token = workspace.rundir.read_state()["job"]["token"]
    runner.send_signal(signal.SIGTERM)
    said = runner.communicate(timeout=300)[1]
    assert runner.returncode == 3, said
    assert "run the same command again to resume" in said
    assert find_processes(token) == []
    assert workspace.rundir.read_result("01-inspect") is not None
    assert workspace.rundir.read_result("02-control") is None
    assert not workspace.rundir.sealed.exists()


@pytest.fixture
def workspace(promoted: Workspace, tmp_path: Path) -> Iterator[Workspace]:
    """A copy of the promoted run, to be broken."""
    yield promoted.copy(tmp_path / "move")
    (promoted.checkpoint / "latest").unlink(missing_ok=True)


def test_a_clean_move_is_promoted_and_says_for_what(promoted: Workspace) -> None:
    body = json.loads(promoted.rundir.verdict.read_text())
    assert body["verdict"] == "promote"
    assert body["label"] == "continuation"
    assert body["validated"]["layout"] == {"dp_shard": 3}
    assert body["validated"]["batch"]["microbatches"] == [[4, 4, 4], [4, 4, 3], [3, 3, 3]]
    assert all(item["pass"] is True for item in body["criteria"])
    assert body["sealed"] == json.loads(promoted.rundir.sealed.read_text())["sealed"]
    assert body["state"]["source"] == body["state"]["destination"]
    audit = json.loads((promoted.rundir.stage("06-window") / "result.json").read_text())["measured"]["audit"]
    assert audit["exactly_once"]
    assert audit["compared_samples"] == 32 * UPDATES
    assert {path.name for path in promoted.rundir.root.iterdir()} >= {"manifest.yaml", "sealed.json", "verdict.json"}


def test_running_and_judging_again_start_no_job(promoted: Workspace) -> None:
    before = promoted.rundir.read_state()["attempts"]
    assert promoted.run().exit_code == 0
    assert [a for a in promoted.rundir.read_state()["attempts"] if a["stage"] != "07-judge"] == [
        a for a in before if a["stage"] != "07-judge"
    ]
    assert judge_run(promoted.rundir).decision == "promote"


@pytest.mark.parametrize(
    ("fault", "stage", "code"),
    [
        ("stretch-gradient", "05-update", "SR-UPD-GRADNORM"),
        ("skip-an-update", "05-update", "SR-SAMPLE-OMITTED"),
        ("hold-a-parameter", "05-update", "SR-UPD-STILL"),
        ("thaw-the-frozen", "05-update", "SR-UPD-FROZEN-MOVED"),
        ("step-schedule-twice", "06-window", "SR-UPD-LR"),
        ("decay-a-little-more", "06-window", "SR-UPD-SETTING"),
        ("draw-while-evaluating", "04-eval", "SR-EVAL-CHANGED"),
        ("write-into-the-checkpoint", "03-load", "SR-JOB-WROTE"),
        ("fall-over", "03-load", "SR-JOB-FAILED"),
        ("one-stream-for-all", "03-load", "SR-RNG-SAME"),
    ],
)
def test_a_fault_in_the_job_is_rejected_by_name(workspace: Workspace, fault: str, stage: str, code: str) -> None:
    workspace.set_fault(fault)
    workspace.rundir.drop_stages([stage])
    result = workspace.run()
    assert result.verdict.decision == "reject", (result.verdict.reasons, result.verdict.remarks)
    assert code in {problem.code for problem in result.verdict.reasons}
    assert result.verdict.first_divergence is not None
    assert result.verdict.first_divergence["stage"] == stage


def test_a_crash_after_the_trace_was_closed_takes_nothing_away(workspace: Workspace) -> None:
    """As torch's threads crash now and then while Python ends; what was recorded is whole."""
    workspace.set_fault("die-at-exit")
    workspace.rundir.drop_stages(["05-update"])
    result = workspace.run()
    assert result.verdict.decision == "promote", result.verdict.reasons
    assert "SR-JOB-EXIT" in {problem.code for problem in result.verdict.remarks}
    workspace.set_fault("die-before-closing")
    workspace.rundir.drop_stages(["05-update"])
    result = workspace.run()
    assert (result.verdict.decision, result.verdict.reasons[0].code) == ("reject", "SR-JOB-FAILED")


def test_a_silent_job_is_no_pass(workspace: Workspace) -> None:
    workspace.set_fault("say-nothing")
    workspace.rundir.drop_stages(["03-load"])
    result = workspace.run()
    assert (result.verdict.decision, result.exit_code) == ("abstain", 4)
    assert [problem.code for problem in result.verdict.reasons] == ["SR-JOB-SILENT"]


def test_what_was_sealed_may_not_change_without_a_reason(workspace: Workspace) -> None:
    text = workspace.manifest.read_text()
    workspace.manifest.write_text(text.replace("floor: 4.0e-06", "floor: 4.0e-03", 1))
    with pytest.raises(StalePlan, match=r"SR-SEAL-CHANGED.*tolerances\.grad_norm\.floor"):
        workspace.run()
    assert workspace.rundir.manifest.read_text() == text
    result = workspace.run(reseal_reason="the gradient is in bf16", until="load")
    assert result.stopped_at == "03-load"
    record = workspace.rundir.read_seals()
    assert record is not None
    assert [item.reason for item in record.seals] == [None, "the gradient is in bf16"]
    assert set(result.results) == {"01-inspect", "02-control", "03-load"}
    assert judge_run(workspace.rundir).decision == "abstain"  # the other stages are to be run again


def test_edited_evidence_is_seen(workspace: Workspace) -> None:
    trace = workspace.rundir.stage("06-window") / "trace" / "rank-00000.jsonl"
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "update" and line["update"] == 17:
            line["loss"] += 1e-3
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert judge_run(workspace.rundir).decision == "reject"


def test_an_edited_control_or_seal_abstains(workspace: Workspace, tmp_path: Path) -> None:
    other = workspace.copy(tmp_path / "other")
    control = workspace.rundir.stage("02-control") / "trace" / "rank-00000.jsonl"
    control.write_text(control.read_text().replace('"update": 15', '"update": 15 ', 1))
    verdict = judge_run(workspace.rundir)
    assert (verdict.decision, verdict.reasons[0].code) == ("abstain", "SR-SEAL-CHANGED")
    other.rundir.sealed.write_text(other.rundir.sealed.read_text().replace('"factor": 10.0', '"factor": 99.0', 1))
    verdict = judge_run(other.rundir)
    assert (verdict.decision, verdict.reasons[0].code) == ("abstain", "SR-SEAL-BROKEN")


def test_a_missing_trace_is_no_pass(workspace: Workspace) -> None:
    shutil.rmtree(workspace.rundir.stage("06-window") / "trace")
    verdict = judge_run(workspace.rundir)
    assert (verdict.decision, verdict.reasons[0].code) == ("abstain", "SR-JUDGE-EVIDENCE")


def test_a_damaged_checkpoint_is_named_before_any_job_is_started(workspace: Workspace, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(workspace.checkpoint, saved)
    workspace.manifest.write_text(workspace.manifest.read_text().replace(str(workspace.checkpoint), str(saved)))
    result = workspace.run(reseal_reason="a copy, to be damaged", until="inspect")
    assert result.stopped_at == "01-inspect"
    shard = saved / "__2_0.distcp"
    shard.rename(tmp_path / "lost")
    again = workspace.run(reseal_reason="a copy, to be damaged")
    assert again.verdict.decision == "reject"
    assert "SR-FILE-MISSING" in {problem.code for problem in again.verdict.reasons}


def test_the_uninterrupted_run_and_a_resume_of_it_are_controls(workspace: Workspace, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    shutil.copytree(workspace.ledger, recorded / "a-uninterrupted")
    shutil.copytree(workspace.rundir.stage("02-control") / "trace", recorded / "b-resumed")
    text = workspace.manifest.read_text()
    text = text.replace("kind: original-layout", f'kind: trace\n  trace: "{recorded}"')
    text = text.replace("  vary_microbatch: 2\n", "")
    workspace.manifest.write_text(text)
    result = workspace.run(reseal_reason="the old machines are gone", until="control")
    control = result.results["02-control"]
    assert control.passed, control.problems
    assert control.jobs == ()
    assert control.measured["controls"] == ["recorded-1", "recorded-2"]


def test_the_candidate_resumes_from_the_converted_checkpoint(workspace: Workspace) -> None:
    with workspace.manifest.open("a") as file:
        file.write("\nconvert: {to: dcp}\n")
    before = workspace.rundir.read_state()["attempts"]
    result = workspace.run(reseal_reason="cut for the destination first")
    assert result.verdict.decision == "promote", result.verdict.reasons
    assert [item.passed for item in result.verdict.criteria if item.name == "conversion"] == [True]
    redone = [item["stage"] for item in workspace.rundir.read_state()["attempts"][len(before) :]]
    assert redone == ["02-convert", "03-load", "04-eval", "05-update", "06-window", "07-judge"]
    converted = workspace.rundir.stage("02-convert") / "checkpoint"
    assert str(converted) in result.results["03-load"].jobs[0]["command"]
    assert len(list(converted.glob("*.distcp"))) == 3
    shard = next(converted.glob("__1_*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    workspace.rundir.drop_stages(["06-window"])
    again = workspace.run()
    assert again.verdict.decision == "reject"
    assert "SR-FILE-CHANGED" in {problem.code for problem in again.verdict.reasons}


def test_calibrating_shows_the_bands_that_the_controls_give(promoted: Workspace) -> None:
    command = [sys.executable, "-m", "samerun", "calibrate", str(promoted.manifest), "--dir", str(promoted.rundir.root)]
    environment = {**os.environ, **ENVIRONMENT}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    of_each = ("parameter_gradient", "parameter_delta", "gradient_direction", "change_direction")
    for metric in ("loss", "grad_norm", "update_norm", "eval_loss", *(f"{name}, widest of" for name in of_each)):
        assert metric in shown.stdout
    told = json.loads(subprocess.run([*command, "--json"], env=environment, capture_output=True, timeout=300).stdout)
    sealed = json.loads(promoted.rundir.sealed.read_text())["seals"][-1]["tolerances"]
    bands = {band["metric"]: band for band in told["bands"] if band["tensor"] is None}
    assert bands["loss"]["limits"] == sealed["loss"]["limits"]
    assert max(bands["loss"]["observed"]) > 0


def test_the_verbs(promoted: Workspace) -> None:
    command = [sys.executable, "-m", "samerun", "judge", str(promoted.rundir.root)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "PROMOTE  continuation on dp_shard=3" in done.stdout
    as_json = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=300)
    assert json.loads(as_json.stdout)["schema"] == "samerun/judge/1"
    nowhere = subprocess.run([*command[:-1], "/nowhere"], env=environment, capture_output=True, text=True, timeout=300)
    assert nowhere.returncode == 2
    assert "SR-RUN-DIRECTORY" in nowhere.stderr

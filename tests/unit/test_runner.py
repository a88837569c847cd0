"""The run directory and everything around the stages that needs no job."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samerun.core.tolerance import band_from_controls, band_from_user, bands_from_json, bands_to_json
from samerun.errors import Problem, Severity, UsageError
from samerun.runner.assess import (
    assess_evaluation,
    assess_updates,
    check_autocast,
    check_environment,
    check_resumed_at,
    control_microbatches,
    note_resumed_controls,
)
from samerun.runner.evidence import (
    control_traces,
    find_recorded,
    hash_folder,
    judged_bands,
    keep_recorded,
    num_control_jobs,
    read_controls,
    read_observed,
    throughput,
)
from samerun.runner.guarded import check_untouched, fingerprint_watched, read_fingerprint, write_fingerprint
from samerun.runner.jobs import check_scripts
from samerun.runner.launch import TOKEN, find_processes
from samerun.runner.progress import Silent
from samerun.runner.run import default_directory, parse_stage, run_migration
from samerun.runner.rundir import RunDirectory, check_place
from samerun.runner.stages import about_control, check_resumable
from samerun.runner.work import Work
from samerun.stores.local import fingerprint_tree
from samerun.trace import TraceWriter
from samerun.verify.evidence.observed import Observed
from samerun.verify.evidence.stage import STAGES, StageResult
from samerun.verify.evidence.window import WindowPlan
from samerun.verify.updates.controls import Controls
from support.manifests import manifest, manifest_data, to_yaml
from support.observations import BATCH, COUNT, FIRST, make_evaluation, make_observed, make_state, make_update


class Notes(Silent):
    def __init__(self) -> None:
        self.codes: list[str] = []

    def note(self, problems: Any) -> None:
        self.codes += [problem.code for problem in problems]


def codes(error: pytest.ExceptionInfo[UsageError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    (tmp_path / "ckpt").mkdir()
    directory = RunDirectory(tmp_path / "move.run")
    directory.create(checkpoint=tmp_path / "ckpt")
    return directory


# --- the run directory ---


def test_a_result_and_the_state_survive(rundir: RunDirectory) -> None:
    problem = Problem("SR-JOB-LEFTOVER", "two", Severity.WARNING, where={"stage": "load"})
    rundir.begin_stage("03-load")
    result = StageResult(stage="03-load", status="pass", problems=(problem,), measured={"x": 1}, seconds=1.5)
    rundir.write_result(result)
    assert rundir.read_result("03-load") == result
    assert rundir.read_results() == {"03-load": result}
    assert rundir.read_state()["stages"] == {"03-load": "pass"}
    assert rundir.read_state()["attempts"][0]["codes"] == ["SR-JOB-LEFTOVER"]


def test_a_stage_begins_in_an_empty_folder(rundir: RunDirectory) -> None:
    (rundir.begin_stage("04-eval") / "half-written").write_text("x")
    assert list(rundir.begin_stage("04-eval").iterdir()) == []
    rundir.verdict.write_text("{}")
    rundir.drop_stages(STAGES[STAGES.index("04-eval") :])
    assert not rundir.stage("04-eval").exists()
    assert not rundir.verdict.exists()


def test_numbers_that_json_does_not_have_are_text(rundir: RunDirectory) -> None:
    rundir.write_json(rundir.root / "state.json", {"worst": float("inf"), "path": Path("a")})
    assert json.loads((rundir.root / "state.json").read_text()) == {"worst": "inf", "path": "a"}


def test_one_samerun_at_a_time(rundir: RunDirectory) -> None:
    with rundir.lock(), pytest.raises(UsageError) as error, RunDirectory(rundir.root).lock():
        pass
    assert codes(error) == ["SR-RUN-BUSY"]
    with rundir.lock():
        pass


def test_places_that_are_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "ckpt"
    checkpoint.mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("x")
    for place in (checkpoint, checkpoint / "run", tmp_path, tmp_path / "file", tmp_path / "theirs"):
        assert [problem.code for problem in check_place(place, checkpoint)] == ["SR-RUN-DIRECTORY"], place
    assert check_place(tmp_path / "new", checkpoint) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_an_edited_result_is_named(rundir: RunDirectory, text: str) -> None:
    (rundir.begin_stage("03-load") / "result.json").write_text(text)
    with pytest.raises(UsageError) as error:
        rundir.read_result("03-load")
    assert codes(error) == ["SR-RUN-GARBLED"]


def test_an_edited_seal_file_is_named(rundir: RunDirectory) -> None:
    assert rundir.read_seals() is None
    rundir.sealed.write_text("{}")
    with pytest.raises(UsageError) as error:
        rundir.read_seals()
    assert codes(error) == ["SR-RUN-GARBLED"]


def test_what_is_no_run_directory(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError) as error:
            RunDirectory(place).require()
        assert codes(error) == ["SR-RUN-DIRECTORY"]


# --- before the first stage ---


def test_stages_by_either_name() -> None:
    assert parse_stage("load") == parse_stage("03-load") == "03-load"
    with pytest.raises(UsageError) as error:
        parse_stage("lode")
    assert codes(error) == ["SR-RUN-STAGE"]
    assert default_directory(Path("a/move.yaml")) == Path("a/move.run")


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "move.yaml").write_text(to_yaml(manifest_data()))
    with pytest.raises(UsageError) as error:
        run_migration(tmp_path / "move.yaml")
    assert codes(error) == ["SR-RUN-CHECKPOINT"]
    assert not (tmp_path / "move.run").exists()


def test_the_job_of_a_killed_run_is_ended(tmp_path: Path) -> None:
    (tmp_path / "ckpt" / "step-12").mkdir(parents=True)
    (tmp_path / "move.yaml").write_text(to_yaml(manifest_data()))
    rundir = RunDirectory(tmp_path / "move.run")
    rundir.create(checkpoint=tmp_path / "ckpt")
    rundir.write_state(job={"stage": "03-load", "token": "left-by-a-test"})
    left = subprocess.Popen(["sleep", "300"], env={**os.environ, TOKEN: "left-by-a-test"}, start_new_session=True)
    deadline = time.monotonic() + 10
    while not find_processes("left-by-a-test") and time.monotonic() < deadline:
        time.sleep(0.02)
    notes = Notes()
    result = run_migration(tmp_path / "move.yaml", progress=notes)
    assert left.wait(timeout=10) != 0
    assert result.verdict.decision == "reject"  # the folder is empty
    assert notes.codes == ["SR-RUN-LEFTOVER"]
    assert rundir.read_state()["job"] is None


# --- what stages find by themselves ---


def test_a_checkpoint_without_optimizer_is_not_resumed() -> None:
    report = {"resumable": {"verdict": "no", "lack": ["optimizer"]}}
    (found,) = check_resumable(manifest(), report)
    assert (found.code, "optimizer" in found.message) == ("SR-RUN-UNRESUMABLE", True)
    assert check_resumable(manifest(), {"resumable": {"verdict": "partial"}}) == []
    warm = manifest(
        transition__label="warm-start", transition__reason="new data", declare__optimizer="expected-to-change"
    )
    assert check_resumable(warm, report) == []


def test_scripts_that_change_between_control_and_candidate() -> None:
    control = StageResult(stage="02-control", status="pass", jobs=({"scripts": {"train.py": "a", "x.sh": "b"}},))
    assert check_scripts(control, {"scripts": {"train.py": "a"}}, "load") == []
    assert check_scripts(None, {"scripts": {"train.py": "a"}}, "load") == []
    (found,) = check_scripts(control, {"scripts": {"train.py": "c", "x.sh": "b"}}, "load")
    assert (found.code, found.severity, found.where["file"]) == ("SR-RUN-SCRIPT", Severity.WARNING, "train.py")


def test_what_goes_wrong_in_a_control_says_nothing_about_a_candidate() -> None:
    assert about_control(Problem("SR-JOB-WORLD", "two"), "first").code == "SR-CONTROL-JOB"
    assert about_control(Problem("SR-JOB-WROTE", "a file"), "first").code == "SR-JOB-WROTE"
    warning = Problem("SR-JOB-LEFTOVER", "x", Severity.WARNING)
    assert about_control(warning, "first").code == "SR-JOB-LEFTOVER"


def test_environments_are_listed_and_decide_nothing() -> None:
    one = make_observed()
    header = replace(one.headers[0], environment={"threads": 2})
    (found,) = check_environment(one, replace(one, headers={0: header}), "load")
    assert (found.code, found.severity) == ("SR-JOB-ENVIRONMENT", Severity.NOTE)
    assert "threads" in found.message
    assert check_environment(one, one, "load") == []
    parts = [
        replace(one, headers={0: replace(one.headers[0], environment={"attention": {"flash": on, "math": True}})})
        for on in (True, False)
    ]
    (found,) = check_environment(parts[0], parts[1], "load")
    assert (found.expected, found.found) == ("attention.flash True", "attention.flash False")


def test_another_autocast_is_listed() -> None:
    def job(autocast: str | None) -> Observed:
        return make_observed(make_update(FIRST, inputs=(12, 7), autocast=autocast))

    assert check_autocast(job(None), job(None), "update") == []
    (found,) = check_autocast(job(None), job("bfloat16"), "update")
    assert (found.severity, found.expected, found.found) == (Severity.NOTE, "off", "bfloat16")


def test_files_that_a_job_touches(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    paths = [tmp_path, tmp_path / "not-there-yet"]
    before = fingerprint_watched(paths)
    assert check_untouched(before, fingerprint_watched(paths), "load") == []
    (tmp_path / "latest").write_text("step-13")
    (found,) = check_untouched(before, fingerprint_watched(paths), "load")
    assert found.code == "SR-JOB-WROTE"
    assert found.where["file"].endswith("latest")


def test_a_kept_fingerprint_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("1")
    tree = fingerprint_tree(tmp_path / "data")
    write_fingerprint(tmp_path / "fingerprint.json", tree)
    assert read_fingerprint(tmp_path / "fingerprint.json") == tree


# --- evidence ---


def write_trace(folder: Path, updates: range, *, kind: str = "a") -> None:
    with TraceWriter(folder, 0) as writer:
        writer.write(
            "header", {"schema": "samerun/trace/1", "stage": None, "rank": 0, "world_size": 1, "coordinate": {}}
        )
        for index in updates:
            body = {"update": index, "loss": 1.0, "lr": [0.1], "samples": 1, "sample_ids": [index], "finite": True}
            writer.write("update", {**body, "seconds": float(index), "tokens": 10})
            if index % 10 == 0:
                writer.write("boundary", {"what": "log", "update": index})
        writer.write("end", {"reason": kind, "updates": len(updates)})


def test_of_a_ledger_the_window_is_kept(tmp_path: Path) -> None:
    write_trace(tmp_path / "ledger", range(1, 101))
    stage = tmp_path / "stage"
    assert keep_recorded(tmp_path / "ledger", stage, first_update=13, num_updates=8) == ["recorded-1"]
    traces = control_traces(manifest(control__kind="trace", control__trace="x", control__vary_microbatch=None), stage)
    assert list(traces) == ["recorded-1"]
    observed = read_observed(traces["recorded-1"])
    assert observed is not None
    assert [item.update for item in observed.updates] == list(range(12, 21))
    assert observed.boundaries == {("log", 20)}
    assert observed.ended
    assert throughput(observed) == {"samples_per_second": 1.0, "tokens_per_second": 10.0}


def test_several_recorded_controls_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_trace(tmp_path / "recorded" / name, range(13, 15), kind=name)
    kept = keep_recorded(tmp_path / "recorded", tmp_path / "stage", first_update=13, num_updates=2)
    assert kept == ["recorded-1", "recorded-2"]
    assert '"reason": "a"' in (tmp_path / "stage" / "recorded-1" / "trace" / "rank-00000.jsonl").read_text()
    assert keep_recorded(tmp_path / "nowhere", tmp_path / "other", first_update=13, num_updates=2) == []


def test_no_control_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read_controls({"first": tmp_path / "trace"})
    assert codes(error) == ["SR-CONTROL-MISSING"]


def test_controls_that_are_resumes_are_called_so() -> None:
    (note,) = note_resumed_controls(manifest())
    assert (note.code, note.severity) == ("SR-CONTROL-RESUMED", Severity.NOTE)
    assert (
        note_resumed_controls(
            manifest(control__kind="continuation", control__trace="ledger", control__vary_microbatch=None)
        )
        == []
    )


def test_how_many_controls_are_run() -> None:
    recorded = {"control__trace": "ledger", "control__vary_microbatch": None}
    assert num_control_jobs(manifest()) == 2
    assert num_control_jobs(manifest(control__kind="continuation", **recorded)) == 1
    assert num_control_jobs(manifest(control__kind="trace", **recorded)) == 0
    assert control_microbatches(manifest(), 2) == [2, 1]


def test_a_trace_cannot_be_changed_unnoticed(tmp_path: Path) -> None:
    write_trace(tmp_path / "a", range(13, 15))
    before = hash_folder(tmp_path / "a")
    path = tmp_path / "a" / "rank-00000.jsonl"
    path.write_text(path.read_text().replace("1.0", "1.5", 1))
    assert hash_folder(tmp_path / "a") != before


def test_bands_survive_their_seal() -> None:
    bands = (
        band_from_user("loss", 13, 2, limit=1e-3, reason="because"),
        band_from_controls("parameter_delta", 13, [[0.0, 0.0]], factor=10, floor=1e-5, tensor="w"),
    )
    body = json.loads(json.dumps(bands_to_json(bands, ["noisy.bias"])))
    assert bands_from_json(body) == bands
    assert body["noise"] == ["noisy.bias"]


def test_an_intentional_change_is_held_to_what_was_stated_for_it() -> None:
    bands = tuple(
        band_from_controls(metric, 13, [[0.0]], factor=10, floor=1e-6) for metric in ("loss", "grad_norm", "eval_loss")
    )
    assert judged_bands(manifest(), bands) == bands
    stated = {"from": "user", "limit": 0.1, "reason": "a tenth fewer samples"}
    changed = manifest(transition__label="intentional-change", transition__reason="why not", tolerances__loss=stated)
    assert [band.metric for band in judged_bands(changed, bands)] == ["loss", "eval_loss"]


def test_an_evaluation_that_was_not_made() -> None:
    controls = Controls(names=("first",), observed=(make_observed(),), evaluations=(make_evaluation(),))
    found = assess_evaluation(manifest(), controls, None, ())
    assert [problem.code for problem in found.problems] == ["SR-EVAL-MISSING"]
    bands = (band_from_controls("eval_loss", FIRST - 1, [[0.0]], factor=10, floor=1e-6),)
    clean = assess_evaluation(manifest(), controls, make_evaluation(losses=(3.0 + 1e-6, 2.5)), bands)
    assert clean.problems == ()
    assert 0.3 < clean.measured["worst"]["eval_loss"]["used"] < 0.4


def test_replicas_are_compared_beside_numbers_that_left_their_band() -> None:
    controls = Controls(names=("first",), observed=(make_observed(),), evaluations=())
    band = band_from_controls("loss", FIRST, [[0.0] * COUNT], factor=10, floor=1e-6)
    plan = WindowPlan(stage="window", first_update=FIRST, num_updates=COUNT, bands=(band,), global_batch=BATCH)
    off = make_update(FIRST + 3, loss=9.0)
    odd = make_state("end", odd=[{"rank": 2, "digest": "1" * 16}])
    found = assess_updates(controls, make_observed(off, states=(make_state("loaded"), odd)), plan)
    assert {problem.code for problem in found.problems} == {"SR-UPD-LOSS", "SR-UPD-REPLICA"}
    cut = assess_updates(controls, make_observed(off, states=(make_state("loaded"),)), plan)
    assert {problem.code for problem in cut.problems} == {"SR-UPD-LOSS"}  # no end state: the reason is named already


def test_where_a_job_says_that_it_stands() -> None:
    observed = make_observed()
    assert check_resumed_at(observed, FIRST, "load") == []
    later = replace(observed, states=(replace(observed.states[0], update=FIRST),))
    assert [problem.code for problem in check_resumed_at(later, FIRST, "load")] == ["SR-UPD-INDEX"]
    silent = replace(observed, states=())
    assert [problem.code for problem in check_resumed_at(silent, FIRST, "load")] == ["SR-JOB-SILENT"]


def test_paths_are_relative_to_the_manifest() -> None:
    work = Work(RunDirectory(Path("x")), manifest(watch=["../logs"]), Path("/base/moves"), Silent())
    assert work.checkpoint == Path("/base/moves/ckpt/step-12")
    assert work.watched("03-load") == [work.checkpoint, Path("/base/logs")]


def test_recorded_controls_are_found_as_they_lie(tmp_path: Path) -> None:
    for name in ("trace", "repeat-2/trace", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ("notes.txt" if name == "other" else "rank-00000.jsonl")).write_text("")
    assert find_recorded(tmp_path) == [tmp_path / "trace", tmp_path / "repeat-2" / "trace"]
    assert find_recorded(tmp_path / "trace") == [tmp_path / "trace"]
    assert find_recorded(tmp_path / "absent") == []

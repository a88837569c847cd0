"""`samerun draft`, `plan` and `memory` on a checkpoint that FSDP2 wrote on four ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from samerun.cli import main
from samerun.manifest.read import parse_document
from support.checkpoints import write_fsdp2_checkpoint

ANSWERS = {
    "run.model_commit": "abc123",
    "source.layout": "{dp_shard: 4}",
    "batch.invariant": "samples-per-update",
    "batch.max_microbatch": "2",
    "batch.option": "ragged",
    "transition.label": "continuation",
    "control.kind": "original-layout",
    "launch.command": '"{python} train.py --resume {checkpoint} --layout {layout}"',
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "step-2"
    write_fsdp2_checkpoint(path)
    return path


@pytest.fixture
def samerun(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(done.value.code or 0), captured.out, captured.err

    return call


def answer(text: str, answers: dict[str, str]) -> str:
    """Returns the manifest's text with values replaced by dotted key."""
    section, lines, left = "", [], dict(answers)
    for line in text.splitlines():
        if heading := re.match(r"(\w+):$", line):
            section = heading[1]
        if (field := re.match(r"  (\w+): ", line)) and (key := f"{section}.{field[1]}") in left:
            line = f"  {field[1]}: {left.pop(key)}"
        lines.append(line)
    assert not left
    return "\n".join(lines) + "\n"


@pytest.fixture
def drafted(checkpoint: Path, tmp_path: Path, samerun: Any) -> Path:
    path = tmp_path / "move.yaml"
    assert samerun("draft", checkpoint, "--to", "dp=3", "-o", path)[0] == 0
    return path


@pytest.mark.multiprocess
def test_a_draft_fills_in_what_the_checkpoint_tells_and_asks_the_rest(drafted: Path) -> None:
    document = parse_document(drafted.read_text())
    assert document.problems == ()
    assert {question.key for question in document.questions} == set(ANSWERS)
    told = {
        "run.format": "dcp",
        "run.optimizer": "AdamW",
        "run.precision": "float32",
        "source.world_size": 4,
        "destination.layout": {"dp_shard": 3},
        "destination.world_size": 3,
        "progress.update": 2,
        "progress.samples": 64,
        "progress.tokens": 4000,
        "progress.scheduler": {"last_epoch": 2},
        "batch.global_batch": 32,
        "declare.parameters": "exact",
        "declare.rng": "expected-to-change",
        "window.log_every": 10,
        "window.eval_every": 20,
    }
    assert {key: document.value(key) for key in told} == told
    assert (drafted.parent / document.value("run.checkpoint")).resolve().name == "step-2"


@pytest.mark.multiprocess
def test_a_draft_never_replaces_a_file(checkpoint: Path, drafted: Path, samerun: Any) -> None:
    before = drafted.read_text()
    code, _, err = samerun("draft", checkpoint, "--to", "dp=3", "-o", drafted)
    assert code == 2
    assert "SR-DRAFT-EXISTS" in err
    assert drafted.read_text() == before
    dangling = drafted.parent / "link.yaml"
    dangling.symlink_to(drafted.parent / "nowhere")
    assert samerun("draft", checkpoint, "--to", "dp=3", "-o", dangling)[0] == 2
    assert not (drafted.parent / "nowhere").exists()


@pytest.mark.multiprocess
def test_a_draft_can_go_to_stdout_or_bring_its_schema(checkpoint: Path, tmp_path: Path, samerun: Any) -> None:
    code, out, _ = samerun("draft", checkpoint, "--to", "dp_shard=3")
    assert code == 0
    assert parse_document(out).problems == ()
    code, out, _ = samerun("draft", checkpoint, "--to", "dp=3", "-o", tmp_path / "s.yaml", "--schema", "--json")
    body = json.loads(out)
    assert body["schema"] == "samerun/draft/1"
    assert {question["key"] for question in body["questions"]} == set(ANSWERS)
    assert "$schema=./manifest-1.schema.json" in (tmp_path / "s.yaml").read_text().splitlines()[0]
    assert json.loads((tmp_path / "manifest-1.schema.json").read_text())["title"].startswith("samerun")
    assert samerun("draft", checkpoint, "--to", "dp=3", "--schema")[0] == 2


@pytest.mark.multiprocess
def test_a_source_layout_that_is_told_is_not_asked(checkpoint: Path, samerun: Any) -> None:
    code, out, _ = samerun("draft", checkpoint, "--to", "dp=6", "--from", "dp_replicate=2,dp_shard=2")
    document = parse_document(out)
    assert code == 0
    assert document.value("source.layout") == {"dp_replicate": 2, "dp_shard": 2}
    assert document.value("destination.layout") == {"dp_replicate": 3, "dp_shard": 2}
    assert "source.layout" not in {question.key for question in document.questions}


@pytest.mark.multiprocess
def test_layouts_that_cannot_be_understood_are_usage_errors(checkpoint: Path, samerun: Any) -> None:
    for arguments in (("--to", "3"), ("--to", "dp=3", "--from", "x")):
        code, _, err = samerun("draft", checkpoint, *arguments)
        assert code == 2
        assert "SR-USAGE-OPTION" in err


@pytest.mark.multiprocess
def test_plan_lists_every_open_question_and_what_can_be_said_already(drafted: Path, samerun: Any) -> None:
    code, out, _ = samerun("plan", drafted)
    assert code == 1
    assert out.count("SR-PLAN-ASK") == len(ANSWERS)
    assert "Memory per rank" in out
    code, out, _ = samerun("plan", drafted, "--json")
    body = json.loads(out)
    assert code == 1
    assert (body["schema"], body["decided"]) == ("samerun/plan/1", False)
    assert {question["key"] for question in body["questions"]} == set(ANSWERS)
    lines = drafted.read_text().splitlines()
    assert all("ASK" in lines[question["line"] - 1] for question in body["questions"])
    drafted.write_text(answer(drafted.read_text(), {"batch.max_microbatch": "2"}))
    body = json.loads(samerun("plan", drafted, "--json")[1])
    assert {option["kind"] for option in body["options"]} == {"ragged", "fewer-replicas", "changed-batch"}
    assert "Batch options" in samerun("plan", drafted)[1]


@pytest.mark.multiprocess
def test_a_decided_manifest_becomes_a_plan(drafted: Path, tmp_path: Path, samerun: Any) -> None:
    drafted.write_text(answer(drafted.read_text(), ANSWERS))
    code, out, _ = samerun("plan", drafted, "-o", tmp_path / "plan.json")
    assert code == 0
    assert "> ragged" in out
    assert "updates 3 to 22" in out
    stored = json.loads((tmp_path / "plan.json").read_text())
    code, out, _ = samerun("plan", drafted, "--json")
    body = json.loads(out)
    assert body["decided"]
    assert body["batch"] == stored["batch"]
    assert body["batch"]["microbatches"][0] == [2, 2, 2]
    assert stored["schema"] == "samerun/plan/1"


@pytest.mark.multiprocess
def test_findings_that_block_name_their_lines(drafted: Path, samerun: Any) -> None:
    drafted.write_text(answer(drafted.read_text(), {**ANSWERS, "batch.option": "uniform", "progress.update": "3"}))
    code, out, _ = samerun("plan", drafted)
    assert code == 1
    assert "SR-PLAN-BATCH-IMPOSSIBLE" in out
    assert "SR-PLAN-PROGRESS" in out
    number = next(n for n, line in enumerate(drafted.read_text().splitlines(), 1) if "option: uniform" in line)
    assert f"line {number}, key batch.option" in out


@pytest.mark.multiprocess
def test_an_invalid_manifest_is_a_usage_error_in_text_and_in_json(drafted: Path, samerun: Any) -> None:
    drafted.write_text(drafted.read_text().replace("declare:", "declar:"))
    code, _, err = samerun("plan", drafted)
    assert code == 2
    assert "did you mean declare?" in err
    assert "SR-PLAN-ASK" in err
    code, out, _ = samerun("plan", drafted, "--json")
    assert code == 2
    assert "SR-MAN-KEY" in {problem["code"] for problem in json.loads(out)["problems"]}
    assert samerun("plan", drafted.parent / "absent.yaml")[0] == 2


@pytest.mark.multiprocess
def test_memory_of_a_checkpoint_at_a_layout(checkpoint: Path, samerun: Any) -> None:
    code, out, _ = samerun("memory", checkpoint, "--layout", "dp=3", "--json", "--device-memory", "1GiB")
    body = json.loads(out)
    assert code == 0
    assert (body["schema"], body["fits"], len(body["per_rank"])) == ("samerun/memory/1", True, 3)
    code, out, _ = samerun("memory", checkpoint, "--layout", "dp_replicate=2,dp_shard=2", "--device-memory", "1kB")
    assert code == 1
    assert "SR-PLAN-MEMORY" in out
    assert "0-3" in out or "0, 2" in out
    for wrong in (("--device-memory", "lots"), ("--dtype", "int3")):
        assert samerun("memory", checkpoint, "--layout", "dp=3", *wrong)[0] == 2

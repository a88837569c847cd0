"""Reading a manifest: every error at once, with its line; questions apart from errors; never an exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.errors import Problem, UndecidedError, UsageError
from samerun.manifest.models import Manifest
from samerun.manifest.read import parse_document, place_problems, read_document, read_manifest
from samerun.manifest.tolerances import METRICS
from support.manifests import COMPLETE, leaves, line_of, manifest_data, to_yaml

TEXT = to_yaml(COMPLETE)
LEAVES = leaves(COMPLETE)


def codes(text: str) -> list[str]:
    return [problem.code for problem in parse_document(text).problems]


def only(text: str) -> Problem:
    (problem,) = parse_document(text).problems
    return problem


def replaced(dotted: str, value: str) -> str:
    """Returns the complete text with the value of one leaf replaced by literal YAML."""
    rows = TEXT.splitlines()
    at = line_of(TEXT, dotted) - 1
    rows[at] = f"{rows[at].split(':')[0]}: {value}"
    return "\n".join(rows) + "\n"


def test_a_complete_manifest_reads_to_the_same_content() -> None:
    document = parse_document(TEXT)
    assert document.problems == ()
    assert document.questions == ()
    assert document.manifest == Manifest.from_data(COMPLETE)
    assert set(document.sections) == set(COMPLETE) - {"samerun"}


@pytest.mark.parametrize(
    ("dotted", "value", "code", "says"),
    [
        ("samerun", "2", "SR-MAN-VERSION", "not 2"),
        ("run.framework", "pytorhc", "SR-MAN-VALUE", "did you mean pytorch"),
        ("run.model_commit", "12e45", "SR-MAN-VALUE", "quotes"),
        ("run.precision", "fp33", "SR-MAN-VALUE", "bfloat16"),
        ("source.world_size", "3", "SR-MAN-WORLD", "4 ranks"),
        ("destination.layout.dp_shard", "0", "SR-MAN-VALUE", "at least 1"),
        ("destination.device_memory", "80 gigs", "SR-MAN-VALUE", "80GiB"),
        ("progress.samples", "-1", "SR-MAN-VALUE", "at least 0"),
        ("progress.samples", "12.5", "SR-MAN-VALUE", "whole number"),
        ("progress.samples", "true", "SR-MAN-VALUE", "whole number"),
        ("progress.samples", '"384"', "SR-MAN-VALUE", "whole number"),
        ("batch.invariant", "samples_per_update", "SR-MAN-VALUE", "did you mean samples-per-update"),
        ("batch.option", "changed-batch", "SR-MAN-BATCH", "batch.changed"),
        ("declare.order", "exactly", "SR-MAN-VALUE", "did you mean exact"),
        ("declare.order", "{bounded: -1}", "SR-MAN-VALUE", "at least 0"),
        ("declare.order", "{bound: 1}", "SR-MAN-KEY", "did you mean bounded"),
        ("tolerances.loss.factor", ".nan", "SR-MAN-VALUE", "number"),
        ("tolerances.loss.from", "usr", "SR-MAN-VALUE", "did you mean user"),
        ("tolerances.loss.factor", "0.5", "SR-MAN-VALUE", "at least 1"),
        ("transition.label", "approximate-continuation", "SR-MAN-TRANSITION", "replay_bound"),
        ("control.kind", "trace", "SR-MAN-CONTROL", "control.trace"),
        ("control.vary_microbatch", "2", "SR-MAN-CONTROL", "nothing would vary"),
        ("launch.command", '"run {checkpiont} {layout}"', "SR-MAN-LAUNCH", "did you mean {checkpoint}"),
        ("launch.command", '"run {checkpoint}"', "SR-MAN-LAUNCH", "names neither"),
        ("launch.command", '"run {checkpoint} {layout} {"', "SR-MAN-LAUNCH", "double it"),
        ("run.name", "!!python/object:os.system x", "SR-MAN-YAML", "tags"),
        ("run.name", '"half a \\ud83d"', "SR-MAN-YAML", "surrogate"),
        ("run.name", '"a\\0b"', "SR-MAN-YAML", "NUL"),
        ("run.name", "9" * 6000, "SR-MAN-YAML", "not a number"),
        ("run.name", '"\\U00110000"', "SR-MAN-YAML", "not readable"),
        ("run.name", "&a demo", None, ""),
    ],
)
def test_each_wrong_value_is_named_with_its_line(dotted: str, value: str, code: str | None, says: str) -> None:
    problems = parse_document(replaced(dotted, value), "m.yaml").problems
    if code is None:
        assert problems == ()
        return
    found = [problem for problem in problems if problem.code == code]
    assert found, problems
    texts = "\n".join(f"{problem} {problem.expected}" for problem in problems)
    assert says in texts
    assert found[0].where["file"] == "m.yaml"
    if "not readable" in says:
        return  # the whole text, not a line of it
    assert found[0].where["line"] in range(line_of(TEXT, dotted.rpartition(".")[0] or dotted), TEXT.count("\n") + 1)
    if code == "SR-MAN-VALUE":
        assert found[0].where["line"] == line_of(TEXT, dotted)


def test_all_errors_come_at_once_in_the_order_of_the_file() -> None:
    text = replaced("run.framework", "torch").replace("world_size: 3", "world_size: 6").replace("floor:", "flor:")
    problems = parse_document(text).problems
    assert {problem.code for problem in problems} == {"SR-MAN-VALUE", "SR-MAN-WORLD", "SR-MAN-KEY", "SR-MAN-MISSING"}
    assert len(problems) == 2 + 2 * len(METRICS)
    lines = [problem.where["line"] for problem in problems]
    assert lines == sorted(lines)


@pytest.mark.parametrize("section", [key for key in COMPLETE if key != "samerun"])
def test_a_missing_section_is_named(section: str) -> None:
    problems = parse_document(to_yaml(manifest_data(**{section: ...}))).problems
    assert [(problem.code, problem.where["key"]) for problem in problems] == [("SR-MAN-MISSING", section)]


@pytest.mark.parametrize("dotted", ["run.precision", "batch.invariant", "declare.rng", "tolerances.eval_logits"])
def test_a_missing_decision_is_named_at_its_section(dotted: str) -> None:
    problem = only(to_yaml(manifest_data(**{dotted.replace(".", "__"): ...})))
    assert (problem.code, problem.where["key"]) == ("SR-MAN-MISSING", dotted)
    assert problem.where["line"] == line_of(TEXT, dotted.split(".")[0])
    assert "Accepted here: " in problem.hint


def test_an_unknown_key_gets_the_closest_spelling() -> None:
    problem = only(TEXT.replace("  precision:", "  precison: x\n  precision:"))
    assert problem.code == "SR-MAN-KEY"
    assert problem.hint.startswith("did you mean precision?")
    assert problem.where["line"] == line_of(TEXT, "run.precision")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("samerun: 1\nrun: {name: [}\n", 2),
        ("samerun: 1\n\trun: x\n", 2),
        ("samerun: 1\nsamerun: 1\n", 2),
        ("samerun: 1\nrun: &a {name: x}\nsource: *a\n", 2),
        ("samerun: 1\nrun:\n  <<: {name: x}\n", 3),
        ("samerun: 1\n---\nsamerun: 1\n", 2),
        ("samerun: 1\nbatch:\n  option: ASK: which\n", 3),
        ("- 1\n", 1),
        ("", 1),
        ("just text", 1),
    ],
)
def test_what_is_not_a_plain_mapping_is_refused_with_its_line(text: str, line: int) -> None:
    problem = next(problem for problem in parse_document(text, "m.yaml").problems if problem.code == "SR-MAN-YAML")
    assert problem.where["line"] == line
    assert parse_document(text).manifest is None


def test_tensor_parallel_ranks_are_not_batches() -> None:
    """tp 2 x dp 4 is four batches: eight ranks, and 4 x 2 x 4 = 32 samples, not 64."""
    data = manifest_data(
        source={"layout": {"dp_shard": 4, "tp": 2}, "world_size": 4, "microbatch": 2, "accumulation": 4}
    )
    problem = only(to_yaml(data))
    assert (problem.code, problem.expected, problem.found) == ("SR-MAN-WORLD", 8, 4)
    assert "4 batch replicas" in problem.message
    data["source"]["world_size"] = 8
    assert parse_document(to_yaml(data)).problems == ()
    data["batch"]["global_batch"] = 64
    problem = only(to_yaml(data))
    assert (problem.code, problem.expected, problem.found) == ("SR-MAN-BATCH", 32, 64)


UNWANTED_CHANGE = {"global_batch": 30, "learning_rate": {"policy": "keep"}, "reason": "x"}


@pytest.mark.parametrize(
    ("changes", "code", "key"),
    [
        ({"source__layout": {"dp_shard": 4, "ep": 3}}, "SR-MAN-WORLD", "source.layout"),
        ({"batch__changed": UNWANTED_CHANGE}, "SR-MAN-BATCH", "batch.changed"),
        ({"transition__replay_bound": 3}, "SR-MAN-TRANSITION", "transition.replay_bound"),
        ({"transition__label": "warm-start"}, "SR-MAN-TRANSITION", "transition.reason"),
        ({"control__trace": "x"}, "SR-MAN-CONTROL", "control.trace"),
        ({"control__repeats": 1}, "SR-MAN-CONTROL", "control.vary_microbatch"),
        ({"control__oracle": "python train.py"}, "SR-MAN-CONTROL", "control.oracle"),
        ({"window__at_least": 21}, "SR-MAN-WINDOW", "window.at_least"),
        ({"launch__source_command": "run"}, "SR-MAN-LAUNCH", "launch.source_command"),
    ],
)
def test_contradictions_between_lines(changes: dict[str, Any], code: str, key: str) -> None:
    problems = parse_document(to_yaml(manifest_data(**changes))).problems
    assert (code, key) in [(problem.code, problem.where["key"]) for problem in problems]


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"global_batch": 32, "learning_rate": {"policy": "keep"}, "reason": "x"}, "the old one"),
        ({"global_batch": 30, "learning_rate": {"policy": "value"}, "reason": "x"}, "policy value"),
        ({"global_batch": 30, "learning_rate": {"policy": "keep", "value": 0.1}, "reason": "x"}, "policy value"),
    ],
)
def test_a_changed_batch_must_make_sense(batch: dict[str, Any], says: str) -> None:
    problem = only(to_yaml(manifest_data(batch__option="changed-batch", batch__changed=batch)))
    assert problem.code == "SR-MAN-BATCH"
    assert says in problem.message


def test_questions_are_not_errors_and_come_with_their_answers() -> None:
    text = replaced("batch.option", '"ASK: how is it dealt?"').replace("kind: original-layout", "kind: ASK")
    document = parse_document(text, "m.yaml")
    assert document.problems == ()
    assert document.manifest is None
    option, control = document.questions
    assert (option.key, option.text, option.line) == ("batch.option", "how is it dealt?", line_of(TEXT, "batch.option"))
    assert option.answers == "uniform | ragged | fewer-replicas | changed-batch"
    assert (control.key, control.answers) == ("control.kind", "original-layout | continuation | trace")
    assert document.value("batch.global_batch") == 32
    assert set(document.sections) == set(COMPLETE) - {"samerun", "batch", "control"}


@settings(deadline=None)
@given(st.sets(st.sampled_from([key for key in LEAVES if key != "samerun"]), min_size=1, max_size=12))
def test_any_value_can_be_a_question(asked: set[str]) -> None:
    text = TEXT
    for dotted in asked:
        rows = text.splitlines()
        at = line_of(TEXT, dotted) - 1
        rows[at] = f'{rows[at].split(":")[0]}: "ASK: what?"'
        text = "\n".join(rows) + "\n"
    document = parse_document(text)
    assert {question.key for question in document.questions} == asked
    assert all(question.line == line_of(TEXT, question.key) for question in document.questions)
    assert document.manifest is None
    assert all(
        problem.where["key"].split(".")[0] in {key.split(".")[0] for key in asked} for problem in document.problems
    )


def test_a_whole_section_can_be_a_question() -> None:
    document = parse_document(to_yaml(manifest_data(window="ASK: how long?")))
    assert document.problems == ()
    assert document.questions[0].answers == "{updates?, at_least?, log_every, eval_every}"


@settings(deadline=None)
@given(st.data())
def test_no_text_makes_the_reader_raise(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(TEXT)))
    stop = data.draw(st.integers(start, min(len(TEXT), start + 40)))
    filler = data.draw(st.text(alphabet="{}[]&*!|>'\"%@`-:,#? \n\tAS1\x00é", max_size=12))
    document = parse_document(TEXT[:start] + filler + TEXT[stop:])
    assert document.manifest is not None or document.problems or document.questions


def test_deep_nesting_is_refused_and_does_not_crash() -> None:
    assert codes("[" * 5000)[0] == "SR-MAN-YAML"


def test_files_that_cannot_be_manifests(tmp_path: Path) -> None:
    binary, huge = tmp_path / "binary.yaml", tmp_path / "huge.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    huge.write_bytes(b"#" * (2 << 20))
    for path in (tmp_path / "absent.yaml", tmp_path, binary, huge):
        with pytest.raises(UsageError) as caught:
            read_document(path)
        assert [problem.code for problem in caught.value.problems] == ["SR-MAN-FILE"]


def test_read_manifest_raises_errors_first_then_questions(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(TEXT)
    assert read_manifest(path).run.name == "demo"
    path.write_text(replaced("batch.option", "ASK"))
    with pytest.raises(UndecidedError) as undecided:
        read_manifest(path)
    assert [problem.code for problem in undecided.value.problems] == ["SR-PLAN-ASK"]
    assert undecided.value.exit_code == 1
    path.write_text(replaced("batch.option", "ASK") + "extra: 1\n")
    with pytest.raises(UsageError) as caught:
        read_manifest(path)
    assert [problem.code for problem in caught.value.problems] == ["SR-MAN-KEY", "SR-PLAN-ASK"]


def test_later_findings_are_placed_in_the_file() -> None:
    document = parse_document(TEXT, "m.yaml")
    placed, nested, elsewhere = place_problems(
        document,
        [
            Problem("SR-PLAN-LABEL", "x", where={"key": "transition.label"}),
            Problem("SR-PLAN-TP", "x", where={"key": "destination.layout.tp"}),
            Problem("SR-PLAN-STALE", "x", where={"key": "memory"}),
        ],
    )
    assert placed.where == {"file": "m.yaml", "line": line_of(TEXT, "transition.label"), "key": "transition.label"}
    assert nested.where["line"] == line_of(TEXT, "destination.layout")
    assert elsewhere.where == {"key": "memory"}

"""What stands on a trace's lines: every field damaged in turn is a finding with its line, never a crash."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.cli.audit import command as audit
from samerun.cli.trace import command as trace_verb
from samerun.errors import UsageError
from samerun.trace import check_trace, read_trace
from samerun.verify.order.runs import audit_runs, check_runs

TENSOR = {"shape": [3, 2], "dtype": "float32", "digest": "0123456789abcdef", "replicas": 2, "nonfinite": 0}
LINES: list[dict[str, Any]] = [
    {
        "kind": "header", "schema": "samerun/trace/1", "stage": "window", "rank": 0, "world_size": 1,
        "coordinate": {"dp_shard": 0}, "layout": {"dp_shard": 1}, "declared_layout": None,
        "batch": {"global_batch": 2, "max_microbatch": 1, "passes": 2, "replicas": 1, "microbatches": [[1], [1]]},
        "versions": {"torch": "2.13.0"}, "environment": {"device": "cpu"},
    },
    {
        "kind": "state", "when": "loaded", "update": 12, "world_size": 1, "layout": None, "state": "00" * 8,
        "tensors": {"param:w": {**TENSOR, "nonzero": 6, "odd": [{"rank": 1, "digest": "00" * 8}], "lead": 0}},
        "counters": {"optim.step:w": {"value": 12}}, "optimizers": [{"class": "AdamW", "decay": "decoupled"}],
        "groups": [{"params": ["w"], "hyperparameters": {"lr": 0.1}}], "learning_rates": [0.1], "scheduler": None,
        "objects": {}, "config": None, "rng": {"0": "ab" * 8}, "broken_ties": [["a", "b"]],
        "disagreements": [{"what": "param:w", "rank": 1, "expected": "a", "found": "b"}],
        "rank_rng": {"0": {"policy": "keyed", "update": 12, "kept": [], "seeded": ["torch"], "stream": 0, "seed": 5}},
    },
    {
        "kind": "eval", "update": 12, "num_examples": 2, "losses": [1.0, "nan"], "state_unchanged": True,
        "logits": {"file": "eval-000-logits.npy", "shape": [2, 3], "stored_elements": 6}, "rng_unchanged": True,
        "changed": [], "modules": [["layer", 1.5, 6]], "details": {"layer": [0.5, "float32"]},
    },
    {
        "kind": "update", "update": 13, "loss": 1.5, "grad_norm": 2.0, "update_norm": 0.25, "lr": [0.1], "steps": 1,
        "loss_scale": 2.0, "skipped": False, "samples": 2, "tokens": 20, "sample_ids": [3, "four"], "finite": True,
        "ids_digest": "ab" * 16, "deltas": {"w": 0.5}, "moved": {"w": 0.5}, "gradients": {"w": 0.1}, "seconds": 0.2,
        "moved_direction": {"w": [0.5, -1.0] * 4}, "gradients_direction": {"w": [0.25, 1.5] * 4},
        "step_norm": 1.0, "inputs": {"rows": 2, "digest": "00ab00ab00ab00ab"},
    },
    {"kind": "boundary", "what": "log", "update": 13},
    {"kind": "digest", "update": 13, "state": "00" * 8},
    {"kind": "end", "reason": "finished", "updates": 1},
]  # fmt: skip
NUMBER = {line["kind"]: number for number, line in enumerate(LINES, start=1)}


def write(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rank-00000.jsonl").write_text("".join(text + "\n" for text in texts))
    return folder


def lines(changes: dict[str, dict[str, Any]] | None = None) -> list[str]:
    return [json.dumps({**line, **(changes or {}).get(line["kind"], {})}) for line in LINES]


def named(folder: Path) -> list[tuple[str, Any]]:
    return [(problem.code, problem.where.get("line")) for problem in read_trace(folder).problems]


def test_the_lines_as_they_are_have_no_finding(tmp_path: Path) -> None:
    assert check_trace(read_trace(write(tmp_path, lines()))) == []


MAY_BE_NULL = {"stage", "declared_layout", "layout", "coordinate", "batch", "versions", "environment", "scheduler"}
MAY_BE_NULL |= {"config", "rank_rng", "logits", "changed", "modules", "loss", "grad_norm", "update_norm", "steps"}
MAY_BE_NULL |= {
    "loss_scale",
    "skipped",
    "tokens",
    "ids_digest",
    "deltas",
    "moved",
    "gradients",
    "seconds",
    "moved_direction",
    "gradients_direction",
    "step_norm",
    "inputs",
    "details",
}
FREE = {"schema", "kind", "scheduler", "config"}  # of any kind, or looked at before the fields
ANY_OBJECT = {"environment", "batch", "objects"}
FIELDS = [(line["kind"], name) for line in LINES for name in line if name not in FREE]
FIELDS.remove(("digest", "state"))
NEED = [(kind, name) for kind, name in FIELDS if name not in MAY_BE_NULL or (kind, name) == ("state", "layout")]


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_field_of_another_kind(kind: str, name: str, tmp_path: Path) -> None:
    value = next(line for line in LINES if line["kind"] == kind)[name]
    wrong: list[Any] = [[{"b": -1}], [[[]]], {"a": [None]}]
    match value:
        case bool():
            wrong += [1, 0, "true"]
        case str():
            wrong += [7, True] + (["x"] if name in ("state", "ids_digest", "when") else [])
        case _:
            wrong += [True, "x"] + ([-1, -0.5] if name != "loss" else [])
    if name in ANY_OBJECT:
        wrong.remove({"a": [None]})
    for item in wrong:
        damaged = lines({kind: {name: item}})
        folder = write(tmp_path, damaged) if kind != "header" else _beside(tmp_path, name, item)
        assert named(folder) == [("SR-TRACE-LINE", NUMBER[kind])], item


def _beside(folder: Path, name: str, item: Any) -> Path:
    """A damaged header beside a whole one: a trace of which no header can be read is refused as a whole."""
    write(folder, lines({"header": {name: item}}))
    (folder / "rank-00001.jsonl").write_text("".join(text + "\n" for text in lines()))
    return folder


@pytest.mark.parametrize(("kind", "name"), NEED)
def test_a_field_that_is_missing(kind: str, name: str, tmp_path: Path) -> None:
    texts = [json.dumps({n: v for n, v in line.items() if (line["kind"], n) != (kind, name)}) for line in LINES]
    if kind == "header":
        (tmp_path / "rank-00001.jsonl").write_text("".join(text + "\n" for text in lines()))
    assert named(write(tmp_path, texts)) == [("SR-TRACE-LINE", NUMBER[kind])]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("update", '{"kind": "update", "update": 13, "loss": NaN, "lr": [], "samples": 0}', "NaN is no JSON number"),
        ("update", '{"kind": "update", "update": 13, "loss": 1e999, "lr": []}', "1e999 is no JSON number"),
        ("update", '{"kind": "update", "update": 13, "update": 14}', "'update' is given twice"),
        ("update", "[" * 100_000, "nested too deeply"),
        ("update", '"update"', "no JSON object"),
        ("update", '{"kind": 5}', "no JSON object"),
        ("update", "\udce9", "not JSON"),
    ],
)  # fmt: skip
def test_texts_that_no_recorder_writes(kind: str, text: str, says: str, tmp_path: Path) -> None:
    texts = lines()
    texts[NUMBER[kind] - 1] = text
    (tmp_path / "rank-00000.jsonl").write_bytes(b"".join(t.encode("utf-8", "surrogateescape") + b"\n" for t in texts))
    (problem,) = read_trace(tmp_path).problems
    assert (problem.code, problem.where["line"]) == ("SR-TRACE-LINE", NUMBER[kind])
    assert says in problem.message


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("update", {"loss": "nan"}, "finite is true, but loss is nan"),
        ("update", {"grad_norm": "inf"}, "finite is true, but grad_norm is inf"),
        ("update", {"samples": 10**400}, None),  # a whole number, however long
        ("update", {"loss": 10**400}, "is no number"),
        ("update", {"update": 0}, "0 is no whole number of at least 1"),
        ("eval", {"num_examples": 3}, "2 losses of 3 examples"),
        ("eval", {"logits": {"file": "../up.npy", "shape": [1], "stored_elements": 1}}, "no file beside the trace"),
        ("eval", {"modules": [["layer", 1.5]]}, "not 2 values"),
        ("update", {"inputs": {"rows": 2, "digest": "-1"}}, "no digest of 16"),
        ("eval", {"details": {"layer": [1.0]}}, "not 1 values"),
        ("state", {"when": "later"}, "neither 'loaded' nor 'end'"),
        ("state", {"tensors": {"param:w": {**TENSOR}}}, "'nonzero' is missing"),
        ("state", {"rank_rng": {"0": None}}, None),
    ],
)
def test_values_that_cannot_be(kind: str, change: dict[str, Any], says: str | None, tmp_path: Path) -> None:
    problems = read_trace(write(tmp_path, lines({kind: change}))).problems
    assert [problem.where["line"] for problem in problems] == ([NUMBER[kind]] if says else [])
    assert says is None or says in problems[0].message


def test_lines_that_come_twice(tmp_path: Path) -> None:
    texts = lines()
    update, end = NUMBER["update"] - 1, NUMBER["end"] - 1
    again = [*texts[: update + 1], texts[update], *texts[update + 1 :]]
    assert [(p.code, p.where.get("line")) for p in check_trace(read_trace(write(tmp_path / "a", again)))] == [
        ("SR-TRACE-COUNT", None),
        ("SR-TRACE-INDEX", update + 2),
    ]
    headers = [texts[0], *texts]
    assert named(write(tmp_path / "b", headers)) == [("SR-TRACE-LINE", 2)]
    late = [*texts, texts[update], texts[end]]
    assert named(write(tmp_path / "c", late)) == [("SR-TRACE-LINE", end + 2), ("SR-TRACE-LINE", end + 3)]


def test_a_last_update_that_was_taken_out(tmp_path: Path) -> None:
    texts = [text for text in lines() if '"kind": "update"' not in text]
    assert [problem.code for problem in check_trace(read_trace(write(tmp_path, texts)))] == ["SR-TRACE-COUNT"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, lines())
    (tmp_path / "rank-00001.jsonl").mkdir()
    assert [code for code, _ in named(tmp_path)] == ["SR-TRACE-LINE", "SR-TRACE-HEADER"]


def paths(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for name, below in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from paths(below, (*at, name))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(where=st.sampled_from([(n, at) for n, line in enumerate(LINES) for at in paths(line)]), value=json_values)
def test_whatever_stands_in_one_place_nothing_crashes(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[int, tuple[Any, ...]], value: Any
) -> None:
    number, (*above, last) = where
    damaged = copy.deepcopy(LINES)
    node: Any = damaged[number]
    for name in above:
        node = node[name]
    node[last] = value
    folder = write(tmp_path_factory.mktemp("trace"), [json.dumps(line) for line in damaged])
    (folder / "rank-00001.jsonl").write_text("".join(text + "\n" for text in lines({"header": {"rank": 1}})))
    trace = read_trace(folder)
    check_trace(trace)
    check_runs([trace], audit_runs([trace]))
    for verb, *options in ((audit,), (audit, "--order", "keyed:samples=9", "--last-batch", "drop"), (trace_verb,)):
        done = CliRunner().invoke(verb, [str(folder), *options, "--json"])
        if isinstance(done.exception, UsageError):
            continue
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        json.loads(done.stdout)

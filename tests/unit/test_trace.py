"""Traces: what is written is read back, a cut line costs only itself, and every finding is provoked and silent."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.mesh import Layout
from samerun.errors import Severity, UsageError
from samerun.trace import TraceWriter, check_trace, file_name, read_trace
from samerun.verify.evidence.observed import observe
from support.traces import empty_state

LAYOUT = Layout(dp_shard=2, tp=2)
IDS = {0: [3, 1], 1: [7]}  # by batch replica


def header(rank: int, layout: Layout = LAYOUT, **changes: Any) -> dict[str, Any]:
    return {
        "schema": "samerun/trace/1",
        "stage": "window",
        "rank": rank,
        "world_size": layout.world_size,
        "coordinate": layout.coordinate(rank),
        "layout": layout.to_dict(short=True),
        "declared_layout": None,
        "batch": {"global_batch": 3, "max_microbatch": 2, "passes": 1, "replicas": 2, "microbatches": [[2, 1]]},
        "versions": {"torch": "2.13.0"},
        "environment": {"device": "cpu"},
    } | changes


def update(index: int, replica: int, **changes: Any) -> dict[str, Any]:
    return {
        "update": index,
        "loss": 1.5,
        "grad_norm": 2.0,
        "update_norm": 0.25,
        "lr": [0.1, 0.2],
        "loss_scale": None,
        "skipped": False,
        "samples": len(IDS[replica]),
        "tokens": 10 * len(IDS[replica]),
        "sample_ids": [id + 100 * index for id in IDS[replica]],
        "finite": True,
        "deltas": {"w": 0.5},
    } | changes


Change = Callable[[int, int], dict[str, Any]]  # (rank, update) -> fields to change


def write(
    directory: Path,
    updates: list[int] | None = None,
    *,
    change: Change = lambda rank, index: {},
    header_change: Callable[[int], dict[str, Any]] = lambda rank: {},
    ranks: range = range(LAYOUT.world_size),
    end: bool = True,
) -> Path:
    for rank in ranks:
        with TraceWriter(directory, rank) as writer:
            writer.write("header", header(rank, **header_change(rank)))
            for index in updates if updates is not None else [13, 14]:
                writer.write("update", update(index, LAYOUT.batch_replica(rank), **change(rank, index)))
            if end:
                count = len(updates) if updates is not None else 2
                writer.write("end", {"reason": "finished", "updates": count})
    return directory


def codes(directory: Path) -> list[str]:
    return [problem.code for problem in check_trace(read_trace(directory))]


def test_a_sound_trace_is_read_back_without_findings(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path))
    assert check_trace(trace) == []
    assert trace.layout == LAYOUT
    assert trace.update_indices == (13, 14)
    assert trace.lead.header.batch is not None
    assert trace.lead.header.batch["microbatches"] == [[2, 1]]
    line = trace.lead.update(13)
    assert line is not None
    assert (line.loss, line.lr, line.deltas, line.moved, line.steps) == (1.5, (0.1, 0.2), {"w": 0.5}, None, 1)
    assert trace.lead.update(99) is None


def test_one_rank_per_batch_replica_counts(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path))
    assert {replica: rank.header.rank for replica, rank in trace.replicas().items()} == {0: 0, 1: 2}
    assert trace.sample_ids(13) == {0: (1303, 1301), 1: (1307,)}
    assert trace.global_totals(13) == (3, 30)


def test_tokens_are_unknown_if_one_replica_did_not_count_them(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, change=lambda rank, _: {"tokens": None} if rank == 2 else {}))
    assert trace.global_totals(13) == (3, None)


def test_other_kinds_of_lines(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, 0) as writer:
        writer.write("header", header(0, Layout()))
        writer.write("state", empty_state(12))
        writer.write(
            "eval",
            {
                "update": 12,
                "num_examples": 2,
                "losses": [1.0, math.nan],
                "logits": {"file": "eval-000-logits.npy", "shape": [2, 3], "stored_elements": 6},
                "state_unchanged": False,
                "rng_unchanged": True,
                "changed": ["param:w"],
            },
        )
        writer.write("boundary", {"what": "log", "update": 20})
        writer.write("digest", {"update": 20, "state": "00aa"})
        writer.write("end", {"reason": "finished", "updates": 0})
    rank = read_trace(tmp_path).lead
    state = rank.state("loaded")
    assert state is not None
    assert (state.update, state.body["tensors"]) == (12, {})
    assert rank.state("end") is None
    assert rank.evals[0].losses[0] == 1.0
    assert math.isnan(rank.evals[0].losses[1])
    assert (rank.evals[0].changed, rank.evals[0].state_unchanged) == (("param:w",), False)
    assert (rank.boundaries[0].what, rank.boundaries[0].update) == ("log", 20)
    assert rank.digests[0]["state"] == "00aa"
    assert rank.end is not None
    assert rank.end.reason == "finished"


def test_lines_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / file_name(0)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:1], '{"kind": "weather", "sun": true}', *lines[1:]]) + "\n")
    assert codes(tmp_path) == []


numbers = st.one_of(st.none(), st.floats(allow_nan=False), st.just(math.inf), st.just(-math.inf))
sizes = st.one_of(st.none(), st.floats(min_value=0.0, allow_nan=False), st.just(math.inf))


@settings(max_examples=60, deadline=None)
@given(loss=numbers, norm=sizes, ids=st.lists(st.one_of(st.integers(0, 2**40), st.text(max_size=5)), max_size=6))
def test_numbers_and_ids_survive(
    tmp_path_factory: pytest.TempPathFactory, loss: Any, norm: Any, ids: list[Any]
) -> None:
    directory = tmp_path_factory.mktemp("trace")
    with TraceWriter(directory, 0) as writer:
        writer.write("header", header(0, Layout()))
        finite = all(value is None or math.isfinite(value) for value in (loss, norm))
        body = update(1, 0, loss=loss, grad_norm=norm, sample_ids=ids, samples=len(ids), finite=finite)
        writer.write("update", body)
    for text in (directory / file_name(0)).read_bytes().split(b"\n")[:-1]:  # ids may hold other kinds of line break
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    line = read_trace(directory).lead.updates[0]
    assert (line.loss, line.grad_norm, line.sample_ids) == (loss, norm, tuple(ids))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_wherever_a_crash_cuts_the_file_everything_before_counts(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = write(tmp_path_factory.mktemp("trace"), ranks=range(1), header_change=lambda _: {"world_size": 1})
    file = directory / file_name(0)
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    length = data.draw(st.integers(first, len(whole)))
    file.write_bytes(whole[:length])
    trace = read_trace(directory)
    whole_lines = whole[:length].count(b"\n")
    lead = trace.lead
    assert 1 + len(lead.updates) + (lead.end is not None) == whole_lines
    is_cut = not whole[:length].endswith(b"\n")
    assert [problem.code for problem in trace.problems] == (["SR-TRACE-CUT"] if is_cut else [])
    assert all(problem.severity is Severity.WARNING for problem in trace.problems)


def test_a_trace_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / file_name(1)).read_bytes()
    with pytest.raises(UsageError, match="SR-TRACE-EXISTS"):
        TraceWriter(tmp_path, 1)
    assert (tmp_path / file_name(1)).read_bytes() == before
    TraceWriter(tmp_path / "another", 1).close()


def test_only_known_kinds_are_written(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, 0) as writer, pytest.raises(ValueError, match="weather"):
        writer.write("weather", {})


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_no_trace(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="SR-TRACE-NONE"):
        read_trace(tmp_path / name)


def test_a_file_without_a_header_is_reported_and_left_out(tmp_path: Path) -> None:
    write(tmp_path, ranks=range(1, 4))
    (tmp_path / file_name(0)).write_text('{"kind": "header", "schema": "samerun/trace/9"}\n')
    assert codes(tmp_path) == ["SR-TRACE-HEADER", "SR-TRACE-RANKS"]
    for rank in range(1, 4):
        (tmp_path / file_name(rank)).unlink()
    with pytest.raises(UsageError, match="SR-TRACE-HEADER"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    "line", ["{not json}", "[1]", '{"no": "kind"}', '{"kind": "update", "update": 13}', '{"kind": "end"}']
)
def test_a_damaged_line_in_the_middle(tmp_path: Path, line: str) -> None:
    write(tmp_path)
    file = tmp_path / file_name(3)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    problems = check_trace(read_trace(tmp_path))
    assert [(problem.code, problem.where["line"]) for problem in problems] == [("SR-TRACE-LINE", 2)]


def test_a_missing_rank(tmp_path: Path) -> None:
    write(tmp_path, ranks=range(3))
    assert codes(tmp_path) == ["SR-TRACE-RANKS"]


def test_an_absurd_number_of_ranks_is_named_not_counted(tmp_path: Path) -> None:
    write(tmp_path, header_change=lambda rank: {"world_size": 10**12})
    (problem,) = [found for found in check_trace(read_trace(tmp_path)) if found.code == "SR-TRACE-RANKS"]
    assert problem.message.endswith("missing: 4, 5, 6, 7, 8, 9, 10, 11 and more")


def test_a_rank_that_comes_twice_and_one_that_the_job_does_not_have(tmp_path: Path) -> None:
    write(tmp_path)
    for number, rank in ((2, 1), (3, 7)):
        file = tmp_path / file_name(number)
        file.write_text(file.read_text().replace(f'"rank": {number}', f'"rank": {rank}'))
    (problem,) = [found for found in check_trace(read_trace(tmp_path)) if found.code == "SR-TRACE-RANKS"]
    assert problem.message == "the job had 4 ranks; files: missing: 2, 3; repeated: 1; no ranks of it: 7"


def test_files_of_two_jobs(tmp_path: Path) -> None:
    write(tmp_path, header_change=lambda rank: {"world_size": 3} if rank < 3 else {})
    assert codes(tmp_path) == ["SR-TRACE-RANKS"]


def test_a_job_that_was_killed(tmp_path: Path) -> None:
    write(tmp_path, end=False)
    problems = check_trace(read_trace(tmp_path))
    assert [(problem.code, problem.severity) for problem in problems] == [("SR-TRACE-OPEN", Severity.WARNING)]


@pytest.mark.parametrize("indices", [[13, 15], [13, 13], [13, 12]])
def test_indices_that_do_not_follow(tmp_path: Path, indices: list[int]) -> None:
    write(tmp_path, indices)
    assert set(codes(tmp_path)) == {"SR-TRACE-INDEX"}


def test_a_skipped_update_may_be_repeated(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, 0) as writer:
        writer.write("header", header(0, Layout()))
        writer.write("update", update(13, 0, skipped=True, finite=False, loss=math.nan))
        writer.write("update", update(13, 0))
        writer.write("end", {"reason": "finished", "updates": 1})
    assert codes(tmp_path) == []
    line = read_trace(tmp_path).lead.update(13)
    assert line is not None
    assert not line.skipped


@pytest.mark.parametrize("field", [{"loss": 1.51}, {"grad_norm": 2.1}, {"update_norm": 1.0}, {"lr": [0.1, 0.3]}])
def test_global_values_that_differ_between_ranks(tmp_path: Path, field: dict[str, Any]) -> None:
    write(tmp_path, change=lambda rank, index: field if (rank, index) == (3, 14) else {})
    problems = check_trace(read_trace(tmp_path))
    assert [problem.code for problem in problems] == ["SR-TRACE-DISAGREE"]
    assert problems[0].where == {"rank": 3, "update": 14}


def test_the_rounding_of_a_reduction_and_unknown_values_are_no_disagreement(tmp_path: Path) -> None:
    write(tmp_path, change=lambda rank, _: {1: {"loss": 1.5 * (1 + 1e-8)}, 2: {"loss": None}}.get(rank, {}))
    assert codes(tmp_path) == []


def test_ranks_that_recorded_another_number_of_updates(tmp_path: Path) -> None:
    write(tmp_path, [13, 14], ranks=range(3))
    write(tmp_path, [13], ranks=range(3, 4))
    assert codes(tmp_path) == ["SR-TRACE-DISAGREE"]


def test_ranks_of_one_replica_with_other_samples(tmp_path: Path) -> None:
    write(tmp_path, change=lambda rank, _: {"sample_ids": [5, 6]} if rank == 1 else {})
    assert codes(tmp_path) == ["SR-TRACE-SAMPLES"]


def test_a_sample_that_two_replicas_consumed(tmp_path: Path) -> None:
    write(tmp_path, [13], change=lambda rank, _: {"sample_ids": [1303]} if rank >= 2 else {})
    problems = check_trace(read_trace(tmp_path))
    assert [(problem.code, problem.severity) for problem in problems] == [("SR-TRACE-OVERLAP", Severity.WARNING)]


def test_a_value_that_is_not_finite(tmp_path: Path) -> None:
    write(tmp_path, change=lambda _, index: {"loss": math.nan, "finite": False} if index == 14 else {})
    problems = check_trace(read_trace(tmp_path))
    assert [problem.code for problem in problems] == ["SR-TRACE-NONFINITE"]
    assert problems[0].where["update"] == 14


def test_four_times_the_updates_take_about_four_times_as_long(tmp_path: Path) -> None:
    """CPU time, as a ratio; reading that looked at every line for every update would take sixteen times as long."""

    def seconds(count: int) -> float:
        folder = write(tmp_path / str(count), list(range(13, 13 + count)))
        began = time.process_time()
        observe(read_trace(folder))
        return time.process_time() - began

    seconds(200)
    assert seconds(8_000) < 9 * seconds(2_000)

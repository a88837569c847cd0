"""Audits of whole runs: several starts, seams, padding, ledgers of digests; every finding provoked, and silent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.catalog import load_catalog
from samerun.cli.audit import command
from samerun.core.batch import deal
from samerun.core.idset import add_ids_digests, ids_digest
from samerun.core.order import ExplicitOrder, GlobalOrder
from samerun.core.orders import (
    DistributedSamplerOrder,
    KeyedOrder,
    MegatronCyclicOrder,
    RangeOrder,
    RemainderOrder,
    ShardRange,
    order_spec,
    parse_order,
)
from samerun.core.packing import PackedOrder
from samerun.core.progress import Committed, after, next_update, replica_ids
from samerun.core.tokens import MeasuredSamples
from samerun.errors import UsageError
from samerun.trace import TraceWriter, read_trace
from samerun.train.draw import torch_draw
from samerun.verify.order.runs import audit_runs, check_runs

Updates = list[tuple[int, list[list[int]]]]


def updates(order: GlobalOrder, start: int, stop: int, replicas: int, batch: int = 6) -> Updates:
    """What a correct job consumes in updates start+1..stop, by replica."""
    at, found = Committed(), Updates()
    while at.update < stop:
        span = next_update(order, at, batch)
        at = after(at, span)
        dealing = deal(span.num_samples, replicas, 2)
        ids = [[int(i) for part in replica_ids(span.ids(order), dealing, r) for i in part] for r in range(replicas)]
        found.append((at.update, ids))
    return found[start:]


def write(directory: Path, what: Updates, *, keep: bool = True, digest: bool = True, batch: int | None = 6) -> Path:
    replicas = len(what[0][1])
    for rank in range(replicas):
        with TraceWriter(directory, rank) as writer:
            dealt = None if batch is None else {"global_batch": batch}
            layout = {"dp_shard": replicas}
            writer.write(
                "header",
                {"schema": "samerun/trace/1", "rank": rank, "world_size": replicas, "batch": dealt, "layout": layout}
                | {"coordinate": {"dp_shard": rank}},
            )
            for update, ids in what:
                body: dict[str, Any] = {"update": update, "loss": 1.0, "lr": [0.1], "samples": len(ids[rank])}
                body |= {"sample_ids": ids[rank] if keep else [], "finite": True}
                writer.write("update", body | ({"ids_digest": ids_digest(ids[rank])} if digest else {}))
            writer.write("end", {"reason": "closed", "updates": len(what)})
    return directory


def run(paths: Iterable[Path], *options: str) -> tuple[int, dict[str, Any], list[str]]:
    done = CliRunner().invoke(command, [*map(str, paths), *options, "--json"], catch_exceptions=False)
    body = json.loads(done.stdout)
    return done.exit_code, body, sorted(problem["code"] for problem in body["problems"])


TEXT = "distributed:samples=50,seed=4,replicas=4"
ORDER = DistributedSamplerOrder(50, 4, num_replicas=4)


def moved(folder: Path, degrees: Sequence[int] = (4, 3, 5, 2), **more: Any) -> list[Path]:
    """Starts of five updates each, the first three of which run two updates beyond the next one's checkpoint."""
    return [
        write(folder / f"start-{n}", updates(ORDER, 5 * n, 5 * n + 7, replicas), **more)
        for n, replicas in enumerate(degrees)
    ]


def test_a_run_moved_three_times_is_exactly_once(tmp_path: Path) -> None:
    paths = moved(tmp_path)
    code, body, codes = run(paths, "--order", TEXT)
    assert (code, body["exactly_once"], body["bound"], body["updates"]) == (0, True, 0, 22)
    assert codes == ["SR-AUDIT-PADDING"] + ["SR-AUDIT-ROLLBACK"] * 3
    assert [seam["update"] for seam in body["seams"]] == [5, 10, 15]
    assert [seam["rolled_back"] for seam in body["seams"]] == [2, 2, 2]
    assert len(body["padding"]) == 2 * 2  # 52 positions for 50 samples, two epochs
    assert body["end"]["epoch"] == 2
    for name in ("replayed", "omitted", "overlap"):
        assert body[name] == []
    shown = CliRunner().invoke(command, [*map(str, paths), "--order", TEXT])
    assert "exactly once" in shown.output
    assert "seam after update 5, 2 updates (12 samples) rolled back" in shown.output


def test_a_ledger_of_digests_is_as_good_against_the_order(tmp_path: Path) -> None:
    assert run(moved(tmp_path / "a", keep=False), "--order", TEXT)[1]["exactly_once"]
    wrong = updates(ORDER, 0, 5, 2)
    wrong[3][1][0][1] += 1
    code, body, codes = run([write(tmp_path / "b", wrong, keep=False)], "--order", TEXT)
    assert (code, body["wrong_updates"], body["bound"], codes) == (1, [[4, 6]], 6, ["SR-AUDIT-SET"])


def test_a_replay_at_the_seam_is_named_with_its_ids(tmp_path: Path) -> None:
    first, again = updates(ORDER, 0, 4, 4), updates(ORDER, 2, 6, 3)
    again = [(update + 2, ids) for update, ids in again]  # resumed at 4, with the position of 2
    code, body, codes = run([write(tmp_path / "a", first), write(tmp_path / "b", again)], "--order", TEXT)
    replayed = sorted(item for _, item in body["replayed"])
    assert replayed == sorted(ORDER.ids(0, 12, 24).tolist())
    assert (code, body["bound"], body["exactly_once"]) == (1, 12, False)
    assert "SR-SAMPLE-REPLAYED" in codes
    assert run([tmp_path / "a", tmp_path / "b"])[1]["bound"] == 12  # ids among themselves tell as much
    code, body, _ = run([tmp_path / "a", tmp_path / "b"], "--order", TEXT, "--replay-bound", "12")
    assert (code, body["exactly_once"]) == (0, False)


SHARDS = {"a": 20, "b": 3, "c": 30}
BY_DOCUMENT: dict[str, GlobalOrder] = {
    "shards": RangeOrder(SHARDS, [ShardRange("a", 4, 20), ShardRange("c", 0, 30)], lanes=2, seed=3),
    "packed": PackedOrder(KeyedOrder(60, 1), [1 + place % 5 for place in range(60)], 7),
    "measured": MeasuredSamples(KeyedOrder(60, 1), [1 + place % 5 for place in range(60)]),
    "remainder": RemainderOrder(MegatronCyclicOrder(53, 2, 3), 0, MegatronCyclicOrder(53, 2, 4).ids(0, 0, 16)),
    "explicit": ExplicitOrder(range(40, 0, -1), range(50)),
}


@pytest.mark.parametrize("kind", BY_DOCUMENT)
def test_orders_from_a_file(tmp_path: Path, kind: str) -> None:
    order = BY_DOCUMENT[kind]
    (tmp_path / "order.json").write_text(json.dumps(order_spec(order)))
    starts = [updates(order, 5 * n, 5 * n + 6, replicas) for n, replicas in enumerate((4, 3, 5, 2))]
    paths = [write(tmp_path / f"start-{n}", what) for n, what in enumerate(starts)]
    code, body, _ = run(paths, "--order", str(tmp_path / "order.json"))
    assert (code, body["exactly_once"], body["updates"]) == (0, True, 21)
    assert body["order"] == order.identity()
    starts[0][2][1][0][0] = starts[0][0][1][0][0]  # one sample of the first update comes again in the third
    again = write(tmp_path / "again", starts[0])
    code, body, codes = run([again], "--order", str(tmp_path / "order.json"))
    assert (code, body["bound"]) == (1, 1)
    assert {"SR-SAMPLE-REPLAYED", "SR-SAMPLE-OMITTED"} <= set(codes)


@pytest.mark.parametrize("text", ["{", '"keyed"', '{"kind": "cards"}', None])
def test_files_of_no_order(tmp_path: Path, text: str | None) -> None:
    path, trace = tmp_path / "order.json", write(tmp_path / "trace", updates(ORDER, 0, 2, 2))
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(command, [str(trace), "--order", str(path)])
    assert isinstance(done.exception, UsageError)
    assert {problem.code for problem in done.exception.problems} == {"SR-ORDER-TEXT"}


def test_samples_passed_over_are_named(tmp_path: Path) -> None:
    late = [(update - 1, ids) for update, ids in updates(ORDER, 4, 7, 3)]
    code, body, codes = run(
        [write(tmp_path / "a", updates(ORDER, 0, 3, 4)), write(tmp_path / "b", late)], "--order", TEXT
    )
    assert code == 1
    assert sorted(item for _, item in body["omitted"]) == sorted(ORDER.ids(0, 18, 24).tolist())
    assert "SR-SAMPLE-OMITTED" in codes


def test_a_sample_given_to_two_ranks(tmp_path: Path) -> None:
    what = updates(ORDER, 0, 3, 3)
    what[1][1][0][0] = what[1][1][1][0]
    _, body, codes = run([write(tmp_path / "a", what)], "--order", TEXT)
    assert [item for _, item in body["overlap"]] == [what[1][1][1][0]]
    assert "SR-SAMPLE-OVERLAP" in codes
    assert [item for _, item in run([tmp_path / "a"])[1]["overlap"]] == [what[1][1][1][0]]


def test_the_same_samples_in_other_updates(tmp_path: Path) -> None:
    what = updates(ORDER, 0, 4, 2)
    what[1], what[2] = (what[1][0], what[2][1]), (what[2][0], what[1][1])
    code, body, codes = run([write(tmp_path / "a", what)], "--order", TEXT)
    assert (code, body["out_of_order"], body["bound"], codes) == (1, 2, 0, ["SR-SAMPLE-ORDER"])


def test_an_order_that_reshuffled_itself_at_the_new_degree_is_bounded(tmp_path: Path) -> None:
    """Megatron's cyclic sampler at another data-parallel size, same count of samples."""
    old, new = MegatronCyclicOrder(60, 2, 3), MegatronCyclicOrder(60, 2, 2)
    paths = [write(tmp_path / "a", updates(old, 0, 4, 3)), write(tmp_path / "b", updates(new, 4, 10, 2))]
    _, body, codes = run(paths, "--order", "megatron-cyclic:samples=60,micro=2,dp=3")
    again = set(old.ids(0, 0, 24).tolist()) & set(new.ids(0, 24, 60).tolist())
    assert {item for _, item in body["replayed"]} == again
    assert body["bound"] == len(again)
    assert "SR-SAMPLE-REPLAYED" in codes


def test_evidence_that_is_missing_or_damaged(tmp_path: Path) -> None:
    gap = [write(tmp_path / "a", updates(ORDER, 0, 3, 2)), write(tmp_path / "b", updates(ORDER, 5, 7, 2))]
    assert "SR-AUDIT-GAP" in run(gap, "--order", TEXT)[2]
    silent = write(tmp_path / "c", updates(ORDER, 0, 3, 2), keep=False, digest=False)
    code, body, codes = run([silent], "--order", TEXT)
    assert (code, body["unchecked_updates"], codes) == (1, 3, ["SR-AUDIT-IDS"])
    damaged = write(tmp_path / "d", updates(ORDER, 0, 3, 2))
    file = damaged / "rank-00000.jsonl"
    first = str(updates(ORDER, 0, 1, 2)[0][1][0][0])
    file.write_text(file.read_text().replace(f'"sample_ids": [{first},', '"sample_ids": [49,', 1))
    assert "SR-AUDIT-DIGEST" in run([damaged])[2]
    late = write(tmp_path / "e", updates(ORDER, 2, 4, 2), batch=None)
    done = CliRunner().invoke(command, [str(late), "--order", TEXT])
    assert [p.code for p in done.exception.problems] == ["SR-AUDIT-BEGIN"]  # type: ignore[union-attr]
    assert run([late], "--order", TEXT, "--from-sample", "12")[1]["exactly_once"]
    assert run([write(tmp_path / "f", updates(ORDER, 2, 4, 2))], "--order", TEXT)[1]["exactly_once"]


@pytest.mark.parametrize(
    ("field", "value"), [("sample_ids", "[1.5]"), ("sample_ids", "7"), ("ids_digest", '"12"'), ("ids_digest", "3")]
)
def test_a_garbled_line_is_told_and_no_crash(tmp_path: Path, field: str, value: str) -> None:
    directory = write(tmp_path / "a", updates(ORDER, 0, 2, 1))
    file = directory / "rank-00000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1][field] = json.loads(value)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, codes = run([directory], "--order", TEXT)
    assert code == 1
    assert "SR-TRACE-LINE" in codes


@pytest.mark.parametrize("options", [(), ("--order", TEXT)])
def test_a_trace_without_updates_proves_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    with TraceWriter(tmp_path, 0) as writer:
        writer.write("header", {"schema": "samerun/trace/1", "rank": 0, "world_size": 1})
    code, body, found = run([tmp_path], *options)
    assert (code, body["exactly_once"], found) == (1, False, ["SR-AUDIT-EMPTY"])


def test_an_order_that_is_empty_or_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (trace,) = moved(tmp_path, degrees=(4,))
    for text in ("", str(tmp_path / "deep.json")):
        with pytest.raises(UsageError, match="SR-ORDER-TEXT"):
            run([trace], "--order", text)


def test_every_code_is_in_the_catalogue() -> None:
    names = ("BEGIN", "GAP", "ROLLBACK", "DIGEST", "SET", "IDS", "PADDING")
    assert {f"SR-AUDIT-{name}" for name in names} <= set(load_catalog())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
@settings(max_examples=15, deadline=None)
def test_any_degrees_and_save_points(
    tmp_path_factory: pytest.TempPathFactory, degrees: list[int], data: st.DataObject
) -> None:
    order = KeyedOrder(41, 2)
    folder, begin, paths = tmp_path_factory.mktemp("runs"), 0, list[Path]()
    for number, replicas in enumerate(degrees):
        stop = begin + data.draw(st.integers(1, 6))
        paths.append(write(folder / str(number), updates(order, begin, stop, replicas)))
        begin = data.draw(st.integers(begin, stop))
    traces = [read_trace(path) for path in paths]
    audit = audit_runs(traces, order)
    assert audit.exactly_once
    assert [p for p in check_runs(traces, audit) if p.code != "SR-AUDIT-ROLLBACK"] == []


@given(st.lists(st.integers(-(2**63), 2**64) | st.text(max_size=5), max_size=20), st.integers(0, 20))
def test_digests_add_up(ids: list[int | str], cut: int) -> None:
    assert add_ids_digests([ids_digest(ids[:cut]), ids_digest(reversed(ids[cut:]))]) == ids_digest(ids)
    assert ids_digest([*ids, 7]) != ids_digest(ids)


def test_digest_vectors() -> None:
    assert ids_digest([0, 1, 2]) == "ae707bca386d84f0e3290532fe4ee1d5"
    assert ids_digest(["a", "b", 1]) == "d34bea187b2a908a3c430cb8c14154cc"
    assert ids_digest([1]) != ids_digest(["1"])
    with pytest.raises(ValueError, match="32 hexadecimal"):
        add_ids_digests(["12"])


@pytest.mark.parametrize(
    ("order", "options", "code"),
    [
        ("distributed:samples=99999999999", (), "SR-ORDER-DRAW"),
        ("random:samples=99999999999", (), "SR-ORDER-DRAW"),
        ("accelerate:samples=99999999999,batch=2,processes=3", (), "SR-ORDER-DRAW"),
        ("megatron-cyclic:samples=99999999999,micro=2,dp=3", (), "SR-ORDER-DRAW"),
        ("keyed:samples=5", ("--from-sample", "99999999999"), "SR-AUDIT-BEGIN"),
    ],
)
def test_orders_of_no_use_here_are_refused(order: str, options: tuple[str, ...], code: str, tmp_path: Path) -> None:
    path = write(tmp_path, updates(KeyedOrder(50, 1), 0, 2, 2))
    done = CliRunner().invoke(command, [str(path), "--order", order, *options])
    assert isinstance(done.exception, UsageError)
    assert [problem.code for problem in done.exception.problems] == [code]
    assert code in load_catalog()


def test_orders_of_any_size_that_hold_nothing_are_audited(tmp_path: Path) -> None:
    for number, text in enumerate(("keyed:samples=99999999999", "distributed:samples=99999999999,shuffle=no")):
        path = write(tmp_path / str(number), updates(parse_order(text), 0, 3, 2))
        assert run([path], "--order", text)[0] == 0
    order, begin = parse_order("keyed:samples=99999999999"), Committed(samples_in_epoch=(10**9 - 1) * 6)
    ahead = order.ids(0, begin.samples_in_epoch, begin.samples_in_epoch + 6).tolist()
    again = order.ids(0, 5_999_000_000, 5_999_000_001).tolist()
    right = write(tmp_path / "right", [(10**9, [ahead[:3], ahead[3:]])])
    assert run([right], "--order", "keyed:samples=99999999999")[1]["exactly_once"]
    wrong = write(tmp_path / "wrong", [(10**9, [[*again, *ahead[1:3]], [*ahead[3:5], 10**12]])])
    body = run([wrong], "--order", "keyed:samples=99999999999")[1]
    assert (body["replayed"], body["other"]) == ([[10**9, again[0]]], [[10**9, 10**12]])


def test_what_was_consumed_before_the_window_in_a_shuffle_that_is_drawn(tmp_path: Path) -> None:
    ahead, again = ORDER.ids(0, 30, 36).tolist(), ORDER.ids(0, 11, 12).tolist()
    path = write(tmp_path, [(6, [[*again, *ahead[1:3]], ahead[3:]])])
    body = run([path], "--order", TEXT)[1]
    assert body["replayed"] == [[6, again[0]]]


def test_a_long_permutation_is_torchs_own(tmp_path: Path) -> None:
    order = DistributedSamplerOrder(1_200_000, 3, num_replicas=4, draw=torch_draw)
    path = write(tmp_path, updates(order, 0, 2, 4))
    assert run([path], "--order", "distributed:samples=1200000,seed=3,replicas=4")[:1] == (0,)


def test_an_update_larger_than_its_order(tmp_path: Path) -> None:
    """It can be no update of the order; with `drop` neither can one that an epoch does not hold."""
    for number, count in enumerate((10**15, 20)):
        path = write(tmp_path / str(number), [(1, [[0], [1]])])
        for file in path.iterdir():
            file.write_text(file.read_text().replace('"samples": 1', f'"samples": {count}'))
        code, body, codes = run([path], "--order", "keyed:samples=7", "--last-batch", "drop")
        assert (code, body["exactly_once"], codes) == (1, False, ["SR-AUDIT-SET"])

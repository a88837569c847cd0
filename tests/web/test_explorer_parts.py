"""Tables, treemaps, running migrations, places and findings, without a server."""

from __future__ import annotations

import doctest
import fcntl
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.errors import UsageError
from samerun.formats.detect import open_checkpoint
from samerun.web.explorer import table
from samerun.web.explorer.answers import Answers
from samerun.web.explorer.findings import explain
from samerun.web.explorer.live import TRACE_BYTES, is_locked, read_live, read_updates
from samerun.web.explorer.places import Places
from samerun.web.explorer.stream import encode
from samerun.web.explorer.table import Choice, Row, Table, children, natural, sizes, sort_rows, squarify, treemap
from support.explorer import GOLDEN, WHOLE
from support.runs import enlarge_run, unpack_run

# ------------------------------------------------------------------------------------------------ tables


def rows(*names: str, part: str = "param", num_bytes: int = 8) -> list[Row]:
    return [Row(f"{part}:{name}", part, name, (2,), "float32", 2, num_bytes, 1) for name in names]


def test_numbers_in_names_sort_by_value_and_chains_are_one_node() -> None:
    assert doctest.testmod(table).failed == 0
    found = children(rows("model.layers.10.w", "model.layers.9.w", "model.layers.9.b", "model.head"), "model")
    assert [(node.label, node.tensors, node.leaf) for node in found] == [("head", 1, True), ("layers", 3, False)]
    below = children(rows("model.layers.10.w", "model.layers.9.w", "model.layers.9.b"), "")
    assert [node.prefix for node in below] == ["model.layers"]
    assert [node.label for node in children(rows("m.l.10.w", "m.l.9.w", "m.l.9.b"), "m.l")] == ["9", "10.w"]
    assert children(rows("w"), "w") == []


def test_the_tree_loses_no_tensor() -> None:
    state = open_checkpoint(WHOLE).state
    every = Table.of(state, {}).rows
    assert len(every) == len(state.tensors)
    assert every[0].part == "param"

    def leaves(under: str) -> int:
        chosen = Table(every).choose(Choice(under=under))
        own = sum(1 for row in chosen if row.name == under)
        return own + sum(leaves(node.prefix) for node in children(chosen, under))

    assert leaves("") == len(every)
    assert sum(row["tensors"] for row in sizes(every, "part")) == len(every)
    assert sum(row["bytes"] for row in sizes(every, "dtype")) == sum(row.num_bytes for row in every)


def test_a_choice_narrows_by_every_part_of_it() -> None:
    every = Table(tuple(rows("a.w", "a.b", "ab.w") + rows("a.w", part="optim.step")))
    assert [row.key for row in every.choose(Choice(under="a", part="param"))] == ["param:a.w", "param:a.b"]
    assert [row.key for row in every.choose(Choice(find="STEP a.w"))] == ["optim.step:a.w"]
    assert every.choose(Choice(broken=True)) == []
    assert [row.name for row in sort_rows(every.rows[:3], "name", descending=True)] == ["ab.w", "a.w", "a.b"]
    assert natural("a2") < natural("a10")


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=40))
def test_a_treemap_gives_each_its_share_and_overlaps_nothing(amounts: list[int]) -> None:
    ordered = sorted(amounts, reverse=True)
    boxes = squarify(ordered)
    for amount, (left, top, width, height) in zip(ordered, boxes, strict=True):
        assert width * height == pytest.approx(10_000 * amount / sum(ordered), rel=0.05, abs=0.5)
        assert left >= -1e-6
        assert top >= -1e-6
        assert left + width <= 100.01
        assert top + height <= 100.01
    for at, one in enumerate(boxes):
        for other in boxes[at + 1 :]:
            across = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
            down = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
            assert min(across, down) < 0.01


def test_many_small_nodes_share_a_tile() -> None:
    nodes = children(rows(*(f"n{i}" for i in range(100))), "")
    tiles = treemap(nodes)
    assert len(tiles) == table.MAX_TILES + 1
    assert [size for node, size, _ in tiles if node is None] == [40 * 8]


# ------------------------------------------------------------------------------------------------ live runs


@pytest.fixture
def half_done(tmp_path: Path) -> Path:
    """The golden run as it was in the middle of its last job."""
    root = unpack_run("promote", tmp_path)
    for name in ("stages/06-window/result.json", "stages/07-judge", "verdict.json"):
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    state = json.loads((root / "state.json").read_text())
    state["job"] = {"stage": "06-window", "token": "x"}
    (root / "state.json").write_text(json.dumps(state))
    trace = root / "stages/06-window/trace/rank-00000.jsonl"
    lines = trace.read_bytes().split(b"\n")
    updates = [number for number, line in enumerate(lines) if b'"kind": "update"' in line]
    trace.write_bytes(b"\n".join(lines[: updates[7]]) + b"\n" + lines[updates[7]][:40])  # seven, and a part of one
    return root


def test_a_running_migration_is_followed(half_done: Path) -> None:
    with (half_done / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(half_done / "lock")
        found = read_live(half_done)
    job = found["running"]
    assert (job["stage"], job["updates"], job["expected"], job["job"]) == ("06-window", 7, 20, True)
    assert job["last"]["update"] == 19
    assert math.isfinite(job["last"]["loss"])
    assert [line["style"] for line in job["chart"]["lines"]] == ["control", "candidate"]
    assert job["log"]
    states = {stage["name"]: stage["status"] for stage in found["stages"]}
    assert states["05-update"] == "pass"
    assert states["06-window"] == "running"
    assert states["07-judge"] == "waiting"
    assert found["verdict"] is None


def test_of_a_long_trace_the_end_is_read(tmp_path: Path) -> None:
    root = enlarge_run(unpack_run("promote", tmp_path), num_updates=3000, num_tensors=5)
    for name in ("stages/06-window/result.json", "stages/07-judge/result.json", "verdict.json"):
        (root / name).unlink()
    with (root / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        job = read_live(root)["running"]
    trace = root / "stages/06-window/trace/rank-00000.jsonl"
    assert trace.stat().st_size > TRACE_BYTES
    assert (job["updates"], job["last"]["update"]) == (3000, 3012)
    assert len(list(read_updates(trace))) < 3000


def test_a_killed_run_is_not_shown_as_running(half_done: Path) -> None:
    (half_done / "lock").touch()
    found = read_live(half_done)
    assert found["running"] is None
    assert found["busy"] is False
    assert {stage["name"]: stage["status"] for stage in found["stages"]}["06-window"] == "interrupted"


@pytest.mark.parametrize("name", ["promote", "reject"])
def test_a_finished_run_shows_its_verdict_and_reasons(tmp_path: Path, name: str) -> None:
    root = unpack_run(name, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    found = read_live(root)
    assert found["verdict"] == name
    verdict = json.loads((root / "verdict.json").read_text())
    told = {group["code"] for group in found["findings"]}
    assert told == {item["code"] for item in (*verdict["reasons"], *verdict["remarks"])}
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_what_is_no_run_is_refused_and_a_damaged_state_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read_live(tmp_path)
    assert refused.value.problems[0].code == "SR-RUN-DIRECTORY"
    root = unpack_run("promote", tmp_path)
    (root / "state.json").write_text("{")
    with pytest.raises(UsageError) as garbled:
        read_live(root)
    assert garbled.value.problems[0].code == "SR-RUN-GARBLED"
    assert list(read_updates(root / "nothing")) == []


# ------------------------------------------------------------------------------------------------ places, findings


def test_everything_inside_a_folder_is_found_and_links_out_of_it_are_not(tmp_path: Path) -> None:
    folder, outside = tmp_path / "all", tmp_path / "outside"
    folder.mkdir()
    shutil.copytree(WHOLE, outside)
    shutil.copytree(WHOLE, folder / "step-9")
    shutil.copytree(WHOLE, folder / "step-10")
    unpack_run("promote", folder)
    (folder / "link").symlink_to(outside)
    unfinished = folder / "step-11"
    shutil.copytree(WHOLE, unfinished)
    (unfinished / ".metadata").unlink()
    found = Places([folder]).find()
    assert [(place.name, place.kind) for place in found] == [
        ("0/promote", "run"),
        ("0/step-9", "checkpoint"),
        ("0/step-10", "checkpoint"),
        ("0/step-11", "unreadable"),
    ]
    assert "the save never finished" in found[-1].about
    assert found[1].about.startswith("dcp: ")
    places = Places([folder, WHOLE])
    assert places.resolve("1") == WHOLE
    for name in ("0/link", "0/../outside", "0/step-9/../../outside", "2", "", "x", "0//etc", "0/a\0b", "1/.."):
        with pytest.raises(UsageError) as refused:
            places.resolve(name)
        assert refused.value.problems[0].code == "SR-UI-OUTSIDE", name
    with pytest.raises(UsageError) as missing:
        places.resolve("0/step-12")
    assert missing.value.problems[0].code == "SR-PATH-NONE"


def test_findings_that_follow_are_counted_under_their_cause() -> None:
    from samerun.errors import Problem, Severity

    cause = Problem("SR-UI-EXTRA", "gone", where={"tensor": "raw"})
    found = explain(
        [
            Problem("SR-UI-OUTSIDE", "outside", Severity.NOTE),
            Problem("SR-COV-GAP", "hole", follows_from="SR-UI-EXTRA"),
            cause,
        ],
        {"raw": "param:w"},
    )
    assert [group["code"] for group in found] == ["SR-UI-EXTRA", "SR-UI-OUTSIDE"]
    assert found[0]["consequences"] == {"SR-COV-GAP": 1}
    assert found[0]["instances"][0]["tensor"] == "param:w"
    assert found[1]["instances"][0]["tensor"] is None


def test_every_golden_checkpoint_can_be_shown() -> None:
    """Whatever framework wrote it: its page, tree, tensors and values, with as much drawn missing as is missing."""
    shown = 0
    for family in ("dcp", "deepspeed", "maps", "megatron", "statedict", "wrapped"):
        answers = Answers(Places([GOLDEN / family]))
        for place in answers.places.find():
            asked = {"place": place.name}
            assert answers.checkpoint(asked)["counts"]["tensors"] > 0
            rows = answers.tensors({**asked, "count": "500"})["rows"]
            assert sum(node["tensors"] for node in answers.tree(asked)["nodes"]) == len(rows)
            for row in rows[:: max(1, len(rows) // 6)]:
                tensor = answers.tensor({**asked, "key": row["key"]})
                drawn = tensor["picture"]
                heights = [span["rows"][1] - span["rows"][0] for span in drawn["gaps"]]
                widths = [span["columns"][1] - span["columns"][0] for span in drawn["gaps"]]
                if drawn["exact"] and len(row["shape"]) <= 2:
                    assert sum(a * b for a, b in zip(heights, widths, strict=True)) == drawn["missing_elements"]
                told: list[dict[str, Any]] = []
                answers.values({**asked, "key": row["key"]}, told.append)
                assert json.loads(encode(told[-1]))["elements"] == row["elements"]
            shown += 1
    assert shown > 20

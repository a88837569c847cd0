"""Several processes convert together: the same bytes as one, and no commit without all of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.convert.convert import convert
from samerun.core.dtype import parse_dtype
from samerun.core.mesh import Layout
from samerun.errors import UsageError
from samerun.execute.engine import Settings
from samerun.execute.journal import Journal
from samerun.execute.meeting import Meeting
from samerun.execute.partial import leftovers, meeting_place
from samerun.execute.ranks import Launch, divide, parse_launch
from samerun.formats.detect import open_checkpoint
from support.exports import tree_bytes, write_export
from support.launches import Hook, Ranks, can_go_apart, run_together

pytestmark = pytest.mark.multiprocess
FAILED = {"SR-LAUNCH-FAILED", "SR-LAUNCH-LOST"}


def alone(source: Path, dest: Path, to: str = "safetensors", **options: object) -> None:
    checkpoint = open_checkpoint(source)
    convert(checkpoint, dest, to=to, settings=Settings(threads=1), **options)  # type: ignore[arg-type]
    checkpoint.close()


def payload(dest: Path) -> dict[str, bytes]:
    """The destination without its proof, which names it."""
    return {name: data for name, data in tree_bytes(dest).items() if name != "samerun-proof.json"}


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def expected(shared_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    dest = tmp_path_factory.mktemp("alone") / "dest"
    alone(shared_source, dest)
    return payload(dest)


# --- equal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("to", "options"), [("safetensors", {}), ("dcp", {"layout": Layout(dp_shard=3)}),
                                             ("torch", {"dtype": {"param": parse_dtype("bfloat16")}})])  # fmt: skip
def test_the_same_bytes_as_one_process_writes(
    world_size: int, to: str, options: dict[str, object], shared_source: Path, tmp_path: Path
) -> None:
    asked = {"allow": {"SR-CONVERT-OBJECT", "SR-WRITE-OBJECT"}, **options}
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    alone(shared_source, tmp_path / "one" / "dest", to, **asked)
    ended = run_together(world_size, shared_source, tmp_path / "many" / "dest", tmp_path / "log", to=to, **asked)
    assert [(end.code, end.problems) for end in ended] == [(0, ())] * world_size
    assert tree_bytes(tmp_path / "many") == tree_bytes(tmp_path / "one")


def test_more_processes_than_work(tmp_path: Path) -> None:
    source = write_export(tmp_path / "source" / "ckpt", rows=2)
    ended = run_together(4, source, tmp_path / "dest", tmp_path / "log")
    assert [end.code for end in ended] == [0] * 4
    assert payload(tmp_path / "dest")["state.safetensors"]


@given(st.lists(st.integers(0, 1000)), st.integers(1, 9))
def test_shares_are_contiguous_and_about_equal(sizes: list[int], parts: int) -> None:
    shares = divide(sizes, parts)
    assert [i for share in shares for i in share] == list(range(len(sizes)))
    assert len(shares) == parts
    for share in shares:
        assert sum(sizes[i] for i in share) <= sum(sizes) / parts + max(sizes, default=0)


# --- killed -------------------------------------------------------------------------------------------------------


def kill_at(event: int) -> Hook:
    """Kills the process at its n-th message or line of a journal."""

    def hook() -> None:
        count = 0
        put, append = Meeting._put, Journal._append

        def step() -> None:
            nonlocal count
            count += 1
            if count == event:
                os.kill(os.getpid(), signal.SIGKILL)
                os._exit(128 + signal.SIGKILL)  # the first process of a process table cannot kill itself

        def counted_put(self: Meeting, name: str, body: dict[str, object]) -> None:
            if not name.startswith("beat"):
                step()
            put(self, name, body)

        def counted_append(self: Journal, entry: dict[str, object]) -> None:
            append(self, entry)
            step()

        Meeting._put, Journal._append = counted_put, counted_append  # type: ignore[method-assign,assignment]

    return hook


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_every_step(victim: int, shared_source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    before = tree_bytes(shared_source)
    survived = 0
    for event in range(1, 60):
        folder = tmp_path / f"event{event}"
        folder.mkdir()
        dest = folder / "dest"
        began = time.monotonic()
        ended = run_together(2, shared_source, dest, tmp_path / f"log{event}", hooks={victim: kill_at(event)})
        assert time.monotonic() - began < 15
        killed, other = ended[victim], ended[1 - victim]
        if killed.code == 0:
            break
        assert killed.code == -signal.SIGKILL
        if other.code == 0:
            survived += 1
            assert dest.exists()  # it was killed when all was done
        else:
            assert (other.code, other.codes <= FAILED, len(other.codes)) == (3, True, 1), other
        if not dest.exists():
            assert [name for name in visible(folder) if not name.startswith(".")] == []
            alone(shared_source, dest)  # one process goes on with what two began
        assert payload(dest) == expected
        assert "tensors" in json.loads((dest / "samerun-proof.json").read_text())
        assert visible(folder) == ["dest"] or victim == 0
    assert event > 10
    assert survived <= 3
    assert tree_bytes(shared_source) == before


@pytest.mark.parametrize("victim", [0, 2, 3])
def test_four_processes_and_one_is_killed_while_copying(
    victim: int, shared_source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "place").mkdir()
    dest = tmp_path / "place" / "dest"
    ended = run_together(4, shared_source, dest, tmp_path / "log", hooks={victim: kill_at(4)})
    assert ended[victim].code == -signal.SIGKILL
    assert {end.code for rank, end in enumerate(ended) if rank != victim} == {3}
    assert all(end.codes <= FAILED for end in ended)
    (folder,) = leftovers(dest)
    written = sum(name.read_bytes().count(b'{"unit"') for name in folder.glob("journal*"))
    assert written > 0
    units: list[int] = []

    def count() -> None:
        unit = Journal.unit
        log = tmp_path / "units"

        def noted(self: Journal, number: int, segments: list[tuple[int, int, int, int]]) -> None:
            with open(log, "a") as file:
                file.write(f"{number}\n")
            unit(self, number, segments)

        Journal.unit = noted  # type: ignore[method-assign]

    again = run_together(3, shared_source, dest, tmp_path / "again", hooks=dict.fromkeys(range(3), count))
    assert [end.code for end in again] == [0] * 3
    units = [int(line) for line in (tmp_path / "units").read_text().split()]
    assert len(set(units)) == len(units)
    assert payload(dest) == expected
    assert visible(tmp_path / "place") == ["dest"]


def test_a_process_that_falls_silent(shared_source: Path, tmp_path: Path) -> None:
    """Stopped, not killed: only its silence tells. When it wakes up it finds that it was given up."""
    dest = tmp_path / "dest"
    stop = Path(tmp_path / "stopped")

    def stopped() -> None:
        unit = Journal.unit

        def once(self: Journal, number: int, segments: list[tuple[int, int, int, int]]) -> None:
            unit(self, number, segments)
            Journal.unit = unit  # type: ignore[method-assign]
            stop.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

        Journal.unit = once  # type: ignore[method-assign]

    ranks = Ranks(3, shared_source, dest, tmp_path / "log", hooks={1: stopped}, timeout=1.5)
    while not stop.exists():
        time.sleep(0.05)
    time.sleep(5)
    ranks.signal(1, signal.SIGCONT)
    ended = ranks.wait()
    assert [end.code for end in ended] == [3, 3, 3]
    assert ended[0].codes | ended[2].codes <= FAILED
    assert any("nothing was heard of it" in message for end in ended for _, message in end.problems)
    assert not dest.exists()
    alone(shared_source, dest)


@pytest.mark.skipif(not can_go_apart(), reason="no namespaces here")
def test_hosts_of_their_own(shared_source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Each process with a network and a process table of its own, without any interface up: only files are shared."""
    (tmp_path / "place").mkdir()
    dest = tmp_path / "place" / "dest"
    ended = run_together(3, shared_source, dest, tmp_path / "log", hooks={1: kill_at(3)}, apart=True, timeout=2.0)
    assert [end.code for end in ended] == [3, 128 + signal.SIGKILL, 3]
    assert not dest.exists()
    ended = run_together(3, shared_source, dest, tmp_path / "again", apart=True)
    assert [end.code for end in ended] == [0, 0, 0]
    assert payload(dest) == expected
    assert visible(tmp_path / "place") == ["dest"]


# --- refused ------------------------------------------------------------------------------------------------------


def test_processes_that_plan_different_things(shared_source: Path, tmp_path: Path) -> None:
    other = {1: {"dtype": {"param": parse_dtype("bfloat16")}}}
    ended = run_together(2, shared_source, tmp_path / "dest", tmp_path / "log", each=other)
    assert [end.codes for end in ended] == [{"SR-LAUNCH-PLAN"}] * 2
    assert visible(tmp_path) == ["log"]


def test_a_source_that_is_cut_off_before_one_of_them(tmp_path: Path) -> None:
    source = write_export(tmp_path / "source" / "ckpt")

    def cut() -> None:
        unit = Journal.unit

        def after(self: Journal, number: int, segments: list[tuple[int, int, int, int]]) -> None:
            unit(self, number, segments)
            os.truncate(source / "state.safetensors", 1_000)

        Journal.unit = after  # type: ignore[method-assign]

    ended = run_together(2, source, tmp_path / "dest", tmp_path / "log", hooks={1: cut})
    assert {"SR-FILE-TRUNCATED"} <= ended[0].codes | ended[1].codes
    assert all(end.code in (2, 3) for end in ended)
    assert visible(tmp_path) == ["log", "source"]


def test_bytes_that_one_of_them_writes_wrong(shared_source: Path, tmp_path: Path) -> None:
    from samerun.execute.move import Mover

    def flip() -> None:
        copy = Mover.copy

        def flipped(self: Mover, source: int, offset: int, target: int, at: int, length: int, name: str) -> None:
            copy(self, source, offset, target, at, length, name)
            os.pwrite(target, bytes([os.pread(target, 1, at)[0] ^ 1]), at)

        Mover.copy = flipped  # type: ignore[method-assign]

    ended = run_together(2, shared_source, tmp_path / "dest", tmp_path / "log", hooks={1: flip})
    assert (ended[0].code, ended[0].codes) == (1, {"SR-CONVERT-DIFFERS"})
    assert (ended[1].code, ended[1].codes) == (3, {"SR-LAUNCH-FAILED"})
    assert visible(tmp_path) == ["log"]


def test_a_journal_that_does_not_arrive(shared_source: Path, tmp_path: Path) -> None:
    def lose() -> None:
        start = Journal.start

        def lost(self: Journal, header: dict[str, object]) -> None:
            start(self, header)
            for path in tmp_path.glob(".dest.samerun-partial-*/journal-*"):
                path.unlink()

        Journal.start = lost  # type: ignore[method-assign,assignment]

    ended = run_together(2, shared_source, tmp_path / "dest", tmp_path / "log", hooks={1: lose})
    assert ended[0].codes == {"SR-LAUNCH-JOURNAL"}
    assert ended[1].codes == {"SR-LAUNCH-FAILED"}
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("here", [0, 1])
def test_a_process_that_never_comes(here: int, shared_source: Path, tmp_path: Path) -> None:
    def stay_away() -> None:
        os._exit(0)

    hooks = {1 - here: stay_away}
    ended = run_together(2, shared_source, tmp_path / "dest", tmp_path / "log", hooks=hooks, timeout=0.5)
    assert (ended[here].code, ended[here].codes) == (3, {"SR-LAUNCH-MISSING"})
    assert visible(tmp_path) == ["log"]


def test_processes_of_two_launches_do_not_meet(shared_source: Path, tmp_path: Path) -> None:
    each = {1: {"key": "MASTER_PORT=1"}}
    ended = run_together(2, shared_source, tmp_path / "dest", tmp_path / "log", each=each, timeout=1.0)
    assert [end.codes for end in ended] == [{"SR-LAUNCH-MISSING"}] * 2


def test_two_processes_of_one_rank(shared_source: Path, tmp_path: Path) -> None:
    meeting_place(tmp_path / "dest").mkdir()
    hooks = {0: lambda: time.sleep(1.5), 2: lambda: time.sleep(0.5)}
    ranks = Ranks(3, shared_source, tmp_path / "dest", tmp_path / "log", hooks=hooks, timeout=4.0, as_rank={2: 1})
    ended = ranks.wait()
    assert ended[1].codes == {"SR-LAUNCH-TWICE"}


def test_environments_that_describe_no_launch(shared_source: Path, tmp_path: Path) -> None:
    assert parse_launch({"WORLD_SIZE": "8"}) is parse_launch({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert parse_launch({"RANK": "3", "WORLD_SIZE": "4"}) == Launch(3, 4)
    for rank, size in [("4", "4"), ("-1", "4"), ("x", "2"), ("0", "")]:
        with pytest.raises(UsageError, match="SR-LAUNCH-ENV"):
            parse_launch({"RANK": rank, "WORLD_SIZE": size})
    ended = run_together(2, shared_source, tmp_path / "dest", tmp_path / "log", each={1: {"size": 3}}, timeout=4.0)
    assert [end.codes for end in ended] == [{"SR-LAUNCH-ENV"}] * 2
    assert visible(tmp_path) == ["log"]


def test_what_a_killed_launch_left_is_in_nobodys_way(shared_source: Path, tmp_path: Path) -> None:
    place = meeting_place(tmp_path / "dest")
    (place / "0123456789abcdef").mkdir(parents=True)
    (place / "session.json").write_text('{"session": "0123456789abcdef", "hellos": [], "whole": true}')
    (place / "hello-00001").write_text('{"nonce": "x", "key": "", "world_size": 2, "whole": true}')
    assert [end.code for end in run_together(2, shared_source, tmp_path / "dest", tmp_path / "log")] == [0, 0]
    assert visible(tmp_path) == ["dest", "log"]
    place.mkdir()
    alone(shared_source, tmp_path / "other")
    alone(shared_source, tmp_path / "log" / "dest")

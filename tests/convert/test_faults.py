"""What can go wrong outside: full disks, unreadable files, a source that changes, places that cannot be."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from samerun.convert.convert import Converted, carry_out, convert
from samerun.convert.prepare import prepare
from samerun.errors import (
    CorruptCheckpoint,
    ExecutionError,
    PlanError,
    SamerunError,
    StalePlan,
    UndecidedError,
    UsageError,
    VerificationError,
)
from samerun.execute import engine, move
from samerun.execute.engine import Progress, Settings
from samerun.execute.journal import Journal
from samerun.execute.move import Mover
from samerun.execute.partial import leftovers, open_partial
from samerun.formats.detect import open_checkpoint
from support.exports import in_child, tree_bytes, write_export

ONE = Settings(threads=1)


def run(source: Path, dest: Path, **options: object) -> Converted:
    checkpoint = open_checkpoint(source)
    try:
        return convert(checkpoint, dest, to="safetensors", settings=ONE, **options)  # type: ignore[arg-type]
    finally:
        checkpoint.close()


def codes(error: pytest.ExceptionInfo[SamerunError]) -> set[str]:
    return {problem.code for problem in error.value.problems}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 768 KiB; the test is left out where none can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, small_disk: Path) -> None:
    source = write_export(tmp_path / "big", rows=3000)
    with pytest.raises(UndecidedError) as error:
        run(source, small_disk / "dest")
    assert codes(error) == {"SR-CONVERT-SPACE"}
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_runs_full_can_be_gone_on_with(tmp_path: Path, small_disk: Path) -> None:
    source = write_export(tmp_path / "big", rows=1000)
    before = tree_bytes(source)
    with pytest.raises(ExecutionError) as error:
        run(source, small_disk / "dest", allow={"SR-CONVERT-SPACE"})
    assert codes(error) == {"SR-CONVERT-SPACE"}
    assert error.value.exit_code == 3
    assert [path.name[0] for path in small_disk.iterdir()] == ["."]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    run(source, small_disk / "dest")
    assert [path.name for path in small_disk.iterdir()] == ["dest"]
    assert tree_bytes(source) == before


def test_a_file_that_may_not_grow(shared_source: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE gives EFBIG in the middle of writing, whatever the file system."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        run(shared_source, tmp_path / "dest")

    assert in_child(work) == 3
    assert not (tmp_path / "dest").exists()
    run(shared_source, tmp_path / "dest")
    assert leftovers(tmp_path / "dest") == []


def test_a_source_that_cannot_be_read(shared_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/self/mem returns EIO where no memory lies: a real error of a real read."""
    good = move.open_source
    monkeypatch.setattr(engine, "open_source", lambda path: os.open("/proc/self/mem", os.O_RDONLY))
    with pytest.raises(ExecutionError) as error:
        run(shared_source, tmp_path / "dest")
    assert codes(error) == {"SR-CONVERT-READ"}
    assert error.value.exit_code == 3
    assert not (tmp_path / "dest").exists()
    monkeypatch.setattr(engine, "open_source", good)
    run(shared_source, tmp_path / "dest")


def test_a_source_that_is_cut_off_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_export(tmp_path / "source" / "ckpt")
    unit = Journal.unit

    def cut(self: Journal, number: int, segments: list[tuple[int, int, int, int]]) -> None:
        unit(self, number, segments)
        if number == 3:
            os.truncate(source / "state.safetensors", 200_000)

    monkeypatch.setattr(Journal, "unit", cut)
    with pytest.raises(CorruptCheckpoint) as error:
        run(source, tmp_path / "dest")
    assert codes(error) == {"SR-FILE-TRUNCATED"}
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("change", ["value", "touch", "new", "gone", "sidecar"])
def test_a_source_that_changes_meanwhile(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_export(tmp_path / "source" / "ckpt")
    (source / "notes.txt").write_text("of the run")
    stage = Journal.stage

    def changed(self: Journal, name: str) -> None:
        stage(self, name)
        if name != "written":
            return
        if change == "value":
            with open(source / "state.safetensors", "r+b") as file:
                file.write(b"\x08")
        elif change == "touch":
            os.utime(source / "state.safetensors")
        elif change == "new":
            (source / "new.txt").write_text("x")
        elif change == "gone":
            (source / "notes.txt").unlink()
        else:
            (source / "state.json").write_text((source / "state.json").read_text() + " ")

    monkeypatch.setattr(Journal, "stage", changed)
    with pytest.raises(StalePlan) as error:
        run(source, tmp_path / "dest")
    assert codes(error) == {"SR-FILE-CHANGED"}
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_old_attempt_is_not_used_for_a_source_that_changed(tmp_path: Path) -> None:
    source = write_export(tmp_path / "source" / "ckpt")
    dest = tmp_path / "dest"

    def killed() -> None:
        Journal.stage = lambda self, name: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        run(source, dest)

    assert in_child(killed) == -signal.SIGKILL
    (old,) = leftovers(dest)
    (source / "state.safetensors").unlink()
    (source / "state.json").unlink()
    source.rmdir()
    write_export(source, seed=1)
    done = run(source, dest)
    assert "SR-CONVERT-STALE" in {problem.code for problem in done.problems}
    assert not old.exists()


def test_bytes_that_change_on_their_way_are_found(
    shared_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Mover.copy

    def flipped(self: Mover, source: int, offset: int, target: int, at: int, length: int, name: str) -> None:
        copy(self, source, offset, target, at, length, name)
        if at > 200_000:
            os.pwrite(target, bytes([os.pread(target, 1, at)[0] ^ 1]), at)

    monkeypatch.setattr(Mover, "copy", flipped)
    with pytest.raises(VerificationError) as error:
        run(shared_source, tmp_path / "dest")
    assert codes(error) == {"SR-CONVERT-DIFFERS"}
    assert list(tmp_path.iterdir()) == []


def test_interrupted_and_gone_on_with(shared_source: Path, tmp_path: Path) -> None:
    cancel = Event()

    def stop(now: Progress) -> None:
        if now.stage == "copying" and now.done_bytes > now.total_bytes // 2:
            cancel.set()

    with pytest.raises(ExecutionError) as error:
        run(shared_source, tmp_path / "dest", progress=stop, cancel=cancel)
    assert codes(error) == {"SR-CONVERT-INTERRUPTED"}
    assert error.value.exit_code == 3
    (folder,) = leftovers(tmp_path / "dest")
    assert list(tmp_path.iterdir()) == [folder]
    seen: list[Progress] = []
    run(shared_source, tmp_path / "dest", progress=seen.append)
    assert seen[0].done_bytes > seen[0].total_bytes // 2
    assert seen[-1].stage == "proving"
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_places_that_a_destination_cannot_have(shared_source: Path, tmp_path: Path) -> None:
    def refused(source: Path, dest: Path) -> set[str]:
        with pytest.raises(UsageError) as error:
            run(source, dest)
        return codes(error)

    copy = write_export(tmp_path / "source" / "ckpt")
    before = tree_bytes(tmp_path)
    (tmp_path / "link").symlink_to(copy)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "taken").mkdir()
    assert refused(copy, copy) == {"SR-CONVERT-NESTED"}
    assert refused(copy, copy / "dest") == {"SR-CONVERT-NESTED"}
    assert refused(copy, tmp_path / "link" / "dest") == {"SR-CONVERT-NESTED"}
    assert refused(tmp_path / "link", copy / "dest") == {"SR-CONVERT-NESTED"}
    assert refused(copy, tmp_path / "source") == {"SR-CONVERT-NESTED"}
    assert refused(copy, tmp_path / "taken") == {"SR-CONVERT-EXISTS"}
    assert refused(copy, tmp_path / "dangling") == {"SR-CONVERT-EXISTS"}
    assert refused(copy, tmp_path / "link") == {"SR-CONVERT-EXISTS"}
    assert refused(copy, tmp_path / "missing" / "dest") == {"SR-CONVERT-DEST"}
    assert refused(copy, tmp_path / "taken" / "..") == {"SR-CONVERT-DEST"}
    assert {name: data for name, data in tree_bytes(tmp_path).items() if "source" in name} == before


def test_a_place_that_may_not_be_written(shared_source: Path) -> None:
    with pytest.raises(UsageError) as error:
        run(shared_source, Path("/proc/self/dest"), allow={"SR-CONVERT-SPACE"})
    assert codes(error) == {"SR-CONVERT-DEST"}


def test_two_at_once(shared_source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shared_source)
    prepared = prepare(checkpoint, tmp_path / "dest", to="safetensors", settings=ONE)
    plan = prepared.plan
    files = [file.path for file in plan.destination.files]
    held = open_partial(
        prepared.place, shared_source, plan.source_fingerprint, plan.hash, files=files, single_file=False
    )
    with pytest.raises(UsageError) as error:
        carry_out(prepared, settings=ONE)
    assert codes(error) == {"SR-CONVERT-BUSY"}
    held.discard()
    carry_out(prepared, settings=ONE)
    checkpoint.close()


def test_something_that_takes_the_place_meanwhile(
    shared_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Journal.stage

    def taken(self: Journal, name: str) -> None:
        stage(self, name)
        if name == "proved":
            (tmp_path / "dest").mkdir()

    monkeypatch.setattr(Journal, "stage", taken)
    with pytest.raises(UsageError) as error:
        run(shared_source, tmp_path / "dest")
    assert codes(error) == {"SR-CONVERT-EXISTS"}
    assert list((tmp_path / "dest").iterdir()) == []


def test_findings_block_until_they_are_allowed(tmp_path: Path) -> None:
    source = write_export(tmp_path / "source")
    (source / "state.json").unlink()
    with pytest.raises(UndecidedError) as error:
        run(source, tmp_path / "dest")
    assert "SR-META-MISSING" in codes(error)
    done = run(source, tmp_path / "dest", allow=codes(error))
    proof = json.loads(done.proof.read_text())
    assert "SR-META-MISSING" in {decision["code"] for decision in proof["decisions"]}


def test_values_that_the_source_lacks(tmp_path: Path) -> None:
    source = write_export(tmp_path / "source")
    os.truncate(source / "state.safetensors", (source / "state.safetensors").stat().st_size - 40_000)
    with pytest.raises(UndecidedError) as error:
        run(source, tmp_path / "dest")
    assert codes(error) >= {"SR-FILE-TRUNCATED", "SR-COV-GAP"}
    with pytest.raises(PlanError) as again:
        run(source, tmp_path / "dest", allow=codes(error))
    assert codes(again) == {"SR-COPY-VALUES"}
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_no_such_format(shared_source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shared_source)
    for name in ("pickle", "../torch", ""):
        with pytest.raises(UsageError) as error:
            convert(checkpoint, tmp_path / "dest", to=name)
        assert codes(error) == {"SR-CONVERT-FORMAT"}
    checkpoint.close()

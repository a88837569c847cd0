"""A conversion killed anywhere: the source is whole, and what is visible is nothing, or proved."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from samerun.convert.convert import Converted, convert
from samerun.execute import partial as partial_module
from samerun.execute.engine import Settings
from samerun.execute.journal import Journal, read_journal
from samerun.execute.partial import leftovers
from samerun.formats.detect import open_checkpoint
from support.exports import in_child, tree_bytes


def run(source: Path, dest: Path) -> Converted:
    checkpoint = open_checkpoint(source)
    try:
        return convert(checkpoint, dest, to="safetensors", settings=Settings(threads=1))
    finally:
        checkpoint.close()


def finish(source: Path, dest: Path, before: dict[str, bytes]) -> None:
    """After a kill: the source is whole; there is no destination or a proved one; running it again gives one."""
    assert tree_bytes(source) == before
    if not dest.exists():
        assert [path.name for path in dest.parent.iterdir() if not path.name.startswith(".")] == []
        run(source, dest)
    proof = json.loads((dest / "samerun-proof.json").read_text())
    assert len(proof["tensors"]) == 12
    checkpoint = open_checkpoint(dest)
    assert checkpoint.state.progress.update == 5
    checkpoint.close()
    assert tree_bytes(source) == before
    assert [path.name for path in dest.parent.iterdir() if not path.name.startswith(".")] == [dest.name]


def test_killed_at_every_line_of_the_journal(shared_source: Path, tmp_path: Path) -> None:
    before = tree_bytes(shared_source)
    append = Journal._append

    def killed_at(line: int, *, after: bool, dest: Path) -> int:
        count = 0

        def counted(self: Journal, entry: object) -> None:
            nonlocal count
            count += 1
            if count == line and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            append(self, entry)  # type: ignore[arg-type]
            if count == line:
                os.kill(os.getpid(), signal.SIGKILL)

        def work() -> None:
            Journal._append = counted  # type: ignore[method-assign]
            run(shared_source, dest)

        return in_child(work)

    line, ended = 0, False
    while not ended:
        line += 1
        folder = tmp_path / f"line{line}"
        folder.mkdir()
        code = killed_at(line, after=bool(line % 2), dest=folder / "dest")
        ended = code == 0
        assert ended or code == -signal.SIGKILL
        finish(shared_source, folder / "dest", before)
    assert line > 12  # header, units, written, proved, committing


@pytest.mark.parametrize("call", ["replace", "rename", "fsync", "ftruncate", "unlink", "rmdir"])
def test_killed_at_every_call_that_changes_names(call: str, shared_source: Path, tmp_path: Path) -> None:
    before = tree_bytes(shared_source)
    real = getattr(os, call)
    for number in range(1, 30):
        folder = tmp_path / f"call{number}"
        folder.mkdir()

        def work(number: int = number, folder: Path = folder) -> None:
            count = 0

            def counted(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            setattr(os, call, counted)
            run(shared_source, folder / "dest")

        code = in_child(work)
        assert code in (0, -signal.SIGKILL)
        finish(shared_source, folder / "dest", before)
        if code == 0:
            return


def test_killed_at_random_times(shared_source: Path, tmp_path: Path) -> None:
    before = tree_bytes(shared_source)
    (tmp_path / "warm").mkdir()
    began = time.monotonic()
    run(shared_source, tmp_path / "warm" / "dest")
    whole = time.monotonic() - began
    chance = random.Random(4)
    for number in range(8):
        folder = tmp_path / f"time{number}"
        folder.mkdir()
        code = in_child(lambda folder=folder: run(shared_source, folder / "dest"), kill_after=chance.random() * whole)
        assert code in (0, -signal.SIGKILL)
        finish(shared_source, folder / "dest", before)


def test_what_was_written_is_not_written_again(
    shared_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "dest"

    def work() -> None:
        append = Journal._append

        def counted(self: Journal, entry: dict[str, object]) -> None:
            append(self, entry)
            if entry.get("unit") == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        Journal._append = counted  # type: ignore[method-assign,assignment]
        run(shared_source, dest)

    assert in_child(work) == -signal.SIGKILL
    (folder,) = leftovers(dest)
    assert set(read_journal(folder / "journal").units) == set(range(7))
    units: list[int] = []
    unit = Journal.unit
    monkeypatch.setattr(Journal, "unit", lambda self, n, s: (units.append(n), unit(self, n, s))[1])
    run(shared_source, dest)
    assert min(units) == 7
    assert leftovers(dest) == []


@pytest.mark.parametrize("damage", ["value", "journal", "boot", "torn", "extra", "unplanned", "link"])
def test_leftovers_are_never_mixed_in(
    damage: str, shared_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happened to what a killed conversion left: the next one is right, or refuses and is right after that."""
    dest = tmp_path / "dest"

    def work() -> None:
        stage = Journal.stage

        def killed(self: Journal, name: str) -> None:
            stage(self, name)
            os.kill(os.getpid(), signal.SIGKILL)

        Journal.stage = killed  # type: ignore[method-assign]
        run(shared_source, dest)

    assert in_child(work) == -signal.SIGKILL
    (folder,) = leftovers(dest)
    data = folder / "dest" / "state.safetensors"
    if damage == "value":
        with open(data, "r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\xff" * 8)
        with pytest.raises(Exception, match="SR-CONVERT-DIFFERS"):
            run(shared_source, dest)
        assert list(tmp_path.iterdir()) == []
    elif damage == "journal":
        (folder / "journal").write_bytes(b"00000000 {}\n")
    elif damage == "torn":
        journal = folder / "journal"
        journal.write_bytes(journal.read_bytes()[:-30])
    elif damage == "boot":
        monkeypatch.setattr(partial_module, "boot_id", lambda: "another")
    elif damage == "extra":
        other = tmp_path / ".dest.samerun-partial-0123456789ab"
        (other / "dest").mkdir(parents=True)
        (other / "dest" / "state.json").write_text("{}")
    elif damage == "unplanned":
        (folder / "dest" / "left-by-another").write_text("x")
    elif damage == "link":
        data.rename(tmp_path.parent / "elsewhere")
        data.symlink_to(tmp_path.parent / "elsewhere")
    done = run(shared_source, dest)
    codes = [problem.code for problem in done.problems]
    assert ("SR-CONVERT-STALE" in codes) == (damage in ("journal", "boot", "extra", "unplanned", "link"))
    assert sorted(path.name for path in dest.iterdir()) == ["samerun-proof.json", "state.json", "state.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["dest"]

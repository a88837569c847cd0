"""Files: mapped read-only, fingerprinted, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samerun.errors import CorruptCheckpoint
from samerun.stores.local import SMALL_FILE_BYTES, MappedFiles, compare_trees, fingerprint_tree, write_atomic


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "small").write_bytes(b"abc")
    (tmp_path / "tree" / "inner" / "large").write_bytes(os.urandom(2 * SMALL_FILE_BYTES))
    (tmp_path / "tree" / "link").symlink_to("small")
    return tmp_path / "tree"


def messages(tree: Path, before: object) -> list[str]:
    return [problem.message for problem in compare_trees(before, fingerprint_tree(tree))]  # type: ignore[arg-type]


def test_an_untouched_tree_is_equal(tree: Path):
    before = fingerprint_tree(tree)
    (tree / "small").read_bytes()
    assert messages(tree, before) == []
    assert before.digest.startswith("sha256:")
    assert before.digest == fingerprint_tree(tree).digest
    assert set(before.files) == {"small", "inner/large", "link"}


def test_every_kind_of_change_is_named(tree: Path):
    before = fingerprint_tree(tree)
    (tree / "new").touch()
    assert "a file appeared" in messages(tree, before)[0]
    (tree / "new").unlink()
    (tree / "small").write_bytes(b"abd")
    assert "content" in messages(tree, before)[0]
    (tree / "small").write_bytes(b"abcd")
    assert "from 3 to 4 bytes" in messages(tree, before)[0]
    (tree / "small").unlink()
    assert "disappeared" in messages(tree, before)[0]


def test_a_file_written_again_with_the_same_content_is_named_but_has_the_same_digest(tree: Path):
    before = fingerprint_tree(tree)
    os.utime(tree / "small", ns=(1, 1))
    assert "written again" in messages(tree, before)[0]
    assert fingerprint_tree(tree).digest == before.digest


def test_a_change_at_the_end_of_a_large_file_is_seen(tree: Path):
    before = fingerprint_tree(tree)
    with open(tree / "inner" / "large", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x" if file.read(1) != b"x" else b"y")
    assert len(messages(tree, before)) == 1


def test_a_link_that_points_elsewhere_is_seen(tree: Path):
    before = fingerprint_tree(tree)
    (tree / "link").unlink()
    (tree / "link").symlink_to("inner/large")
    assert len(messages(tree, before)) == 1


def test_a_single_file_is_a_tree(tree: Path):
    before = fingerprint_tree(tree / "small")
    assert set(before.files) == {"small"}
    assert messages(tree / "small", before) == []
    with pytest.raises(FileNotFoundError):
        fingerprint_tree(tree / "absent")


def test_writing_replaces_whole_files_only(tmp_path: Path):
    path = tmp_path / "file.json"
    write_atomic(path, "one")
    write_atomic(path, b"two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()
    with pytest.raises(FileNotFoundError) as missing:
        write_atomic(tmp_path / "absent" / "file", "x")
    assert missing.value.filename == str(tmp_path / "absent" / "file")  # and not a temporary name
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError) as taken:
        write_atomic(tmp_path / "taken", "x")
    assert taken.value.filename == str(tmp_path / "taken")
    (tmp_path / "taken").rmdir()
    assert sorted(os.listdir(tmp_path)) == ["file.json"]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_maps_are_read_only_and_bounded(tmp_path: Path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 3)
    maps = MappedFiles(limit=2)
    views = [memoryview(maps.map(tmp_path / name)) for name in "abc"]
    assert [bytes(view) for view in views] == [b"aaa", b"bbb", b"ccc"]
    assert all(view.readonly for view in views)
    maps.close()
    assert bytes(views[0]) == b"aaa"
    (tmp_path / "empty").touch()
    assert maps.map(tmp_path / "empty") == b""


def test_only_ordinary_files_are_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(CorruptCheckpoint, match="SR-FILE-SPECIAL"):
            MappedFiles().map(path)

"""A mapped file that is cut off while it is read: one clear error, where the system would end the process."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from samerun.convert import prove
from samerun.convert.convert import convert
from samerun.errors import CorruptCheckpoint, VerificationError
from samerun.execute.engine import Settings
from samerun.formats.detect import open_checkpoint
from samerun.stores import guard
from samerun.stores.guard import guard_maps, require_whole_maps
from samerun.stores.local import MappedFiles
from samerun.verify.state.digest import digest_checkpoint
from support.exports import in_child, tree_bytes, write_export

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is guarded")
SIZE = 4 << 20


def mapped(file: Path) -> tuple[MappedFiles, np.ndarray[Any, np.dtype[np.uint8]]]:
    file.write_bytes(b"\1" * SIZE)
    files = MappedFiles()
    return files, np.frombuffer(files.map(file), np.uint8)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def room() -> None:
    """The table of maps has room for about a thousand; others of this process may still hold theirs."""
    gc.collect()
    assert len(guard._free) > 8, "maps are not given back"


def restore_default() -> None:
    signal.signal(signal.SIGBUS, signal.SIG_DFL)


@pytest.mark.parametrize("disturb", [lambda: None, restore_default], ids=["alone", "after another handler"])
def test_what_is_gone_reads_as_zeros_and_raises(disturb: Callable[[], None], tmp_path: Path) -> None:
    guard_maps()
    disturb()
    guard_maps()
    files, values = mapped(tmp_path / "cut")
    others, whole = mapped(tmp_path / "whole")
    require_whole_maps()
    os.truncate(tmp_path / "cut", 5_000)
    assert int(values.sum()) == 5_000
    assert int(whole.sum()) == SIZE
    with pytest.raises(CorruptCheckpoint, match=r"SR-FILE-TRUNCATED.*cut\]") as error:
        require_whole_maps()
    assert len(error.value.problems) == 1
    assert error.value.problems[0].found == "5000 bytes"
    del values
    files.close()
    require_whole_maps()
    assert int(whole.sum()) == SIZE
    others.close()


def test_a_fault_elsewhere_ends_the_process_as_ever(tmp_path: Path) -> None:
    def foreign() -> None:
        faulthandler.disable()  # of pytest, which would write a page about it
        guard_maps()
        (tmp_path / "foreign").write_bytes(b"\1" * SIZE)
        with open(tmp_path / "foreign", "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.truncate(tmp_path / "foreign", 0)
        print(content[9_999])

    assert in_child(foreign) == -signal.SIGBUS


def test_a_checkpoint_cut_off_at_any_moment(tmp_path: Path) -> None:
    """Digests are right, or there is an error that names the file; the process always lives."""
    source = write_export(tmp_path / "ckpt", rows=9_000)
    file = source / "state.safetensors"
    content = file.read_bytes()
    chance = random.Random(5)

    def digest() -> None:
        checkpoint = open_checkpoint(source)

        def cut() -> None:
            time.sleep(chance.random() * 0.02)
            os.truncate(file, chance.randrange(4_096, len(content) // 2))

        thread = Thread(target=cut)
        thread.start()
        try:
            while thread.is_alive():
                digest_checkpoint(checkpoint)
            digest_checkpoint(checkpoint)
        except CorruptCheckpoint as error:
            os._exit(40 if "SR-FILE-TRUNCATED" in str(error) and str(file) in str(error) else 41)

    for number in range(6):
        chance.seed(number)
        file.write_bytes(content)
        assert in_child(digest) == 40


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_conversion_whose_file_is_cut_off_while_it_is_proved(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_export(tmp_path / "ckpt", rows=9_000)
    before = tree_bytes(source)
    real = prove._prove_tensor

    def cut(mine: Any, other: Any, *rest: Any) -> Any:
        path = (mine if side == "source" else other).path / "state.safetensors"
        os.truncate(path, 2 * mmap.PAGESIZE)
        return real(mine, other, *rest)

    checkpoint = open_checkpoint(source)
    with monkeypatch.context() as patch:
        patch.setattr(prove, "_prove_tensor", cut)
        with pytest.raises(VerificationError, match="SR-FILE-TRUNCATED"):
            convert(checkpoint, tmp_path / "dest", to="safetensors", settings=Settings(threads=1))
    checkpoint.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    if side == "destination":
        assert tree_bytes(source) == before

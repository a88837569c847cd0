"""Items that torch compressed with zstd: read where a module for it is there, refused clearly where none is."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from samerun.formats.dcpfile import items as dcp_items
from samerun.formats.dcpfile.packed import find_zstd, is_zstd, unpack
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint

ZSTD = Path(__file__).parent.parent / "golden" / "dcp" / "zstd"


def test_only_version_1_of_zstd_alone_is_undone():
    assert is_zstd(("stream.zstd/1",))
    assert not is_zstd(("stream.zstd/2",))
    assert not is_zstd(("stream.cipher/1",))
    assert not is_zstd(("stream.zstd/1", "stream.zstd/1"))


def test_without_a_module_the_finding_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dcp_items, "find_zstd", lambda: None)
    report = inspect_checkpoint(open_checkpoint(ZSTD), deep=True)
    problem = next(problem for problem in report.problems if problem.code == "SR-FILE-TRANSFORM")
    assert "zstandard" in problem.hint
    assert not report.complete


@pytest.mark.framework
@pytest.mark.skipif(find_zstd() is None, reason="no module for zstd is installed")
def test_values_are_those_of_the_live_run():
    checkpoint = open_checkpoint(ZSTD)
    truth = np.load(ZSTD / "truth.npz")
    assert set(truth.files) == set(checkpoint.state.tensors)
    for key in truth.files:
        assert np.array_equal(checkpoint.read(key), truth[key]), key
    report = inspect_checkpoint(checkpoint, deep=True)
    assert (report.complete, report.intact) == (True, True)


@pytest.mark.framework
@pytest.mark.skipif(find_zstd() is None, reason="no module for zstd is installed")
def test_a_flipped_bit_is_a_finding(tmp_path: Path):
    folder = tmp_path / "zstd"
    shutil.copytree(ZSTD, folder)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    for at in range(600, len(data), 900):
        data[at] ^= 0x10
    (folder / "__0_0.distcp").write_bytes(bytes(data))
    report = inspect_checkpoint(open_checkpoint(folder), deep=True)
    assert {problem.code for problem in report.problems} & {"SR-FILE-PACKED", "SR-PKL-ZIP", "SR-PKL-CRC", "SR-FILE-CRC"}
    assert not (report.complete and report.intact is not False)


@pytest.mark.framework
@pytest.mark.skipif(find_zstd() is None, reason="no module for zstd is installed")
def test_a_bomb_is_not_unpacked():
    module = find_zstd()
    assert module is not None
    bomb = module.compress(bytes(8 << 20))
    assert unpack(module, bomb, 1 << 20) is None
    assert unpack(module, bomb, 8 << 20) == bytes(8 << 20)
    assert unpack(module, b"no frame at all", 1 << 20) is None

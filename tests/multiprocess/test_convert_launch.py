"""The command under a real torchrun, and by environment variables alone; and on a URL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.exports import tree_bytes, write_export

pytestmark = pytest.mark.multiprocess
CONVERT = ["-m", "samerun", "convert"]


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def test_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = write_export(tmp_path / "ckpt", rows=2_000)
    asked = [str(source), str(tmp_path / "dest"), "--to", "safetensors", "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *CONVERT, *asked], env=clean(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)  # rank 0 alone prints
    assert body["schema"] == "samerun/convert/1"
    asked[1] = str(tmp_path / "alone" / "dest")
    (tmp_path / "alone").mkdir()
    alone = subprocess.run([sys.executable, *CONVERT, *asked], env=clean(), capture_output=True, timeout=120)
    assert alone.returncode == 0
    assert tree_bytes(tmp_path / "dest") == tree_bytes(tmp_path / "alone" / "dest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ckpt", "dest"]


def test_a_rank_that_is_refused_ends_them_all(tmp_path: Path) -> None:
    source = write_export(tmp_path / "ckpt")
    started: list[subprocess.Popen[str]] = []
    for rank in range(2):
        more = ["--dtype", "param=bfloat16"] if rank else []
        asked = [str(source), str(tmp_path / "dest"), "--to", "safetensors", "--rank-timeout", "60", *more]
        env = {**clean(), "RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, *CONVERT, *asked]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for process in started:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (1, "")
        assert "SR-LAUNCH-PLAN" in err
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_url_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    source = write_export(tmp_path / "ckpt", rows=9_000)
    url, dest = f"file://{source}", tmp_path / "dest"
    found = subprocess.run(
        [sys.executable, "-m", "samerun", "inspect", url, "--json"], env=clean(), capture_output=True, timeout=120
    )
    body = json.loads(found.stdout)
    assert (body["path"], body["complete"]) == (url, True)
    command = [sys.executable, *CONVERT, url, str(dest), "--to", "safetensors"]
    assert subprocess.run(command, env=clean(), capture_output=True, timeout=120).returncode == 0
    assert json.loads((dest / "samerun-proof.json").read_text())["source"]["path"] == url
    command[-3] = f"file://{dest}-2"
    refused = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "SR-REMOTE-DEST" in refused.stderr

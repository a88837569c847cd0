"""A conversion that two machines share under a real torchrun: made from namespaces, with a cable between them.

They have one kernel and one file system; networks, host names and process tables are their own.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.exports import tree_bytes, write_export
from support.hosts import Host, processes_with, two_hosts, why_no_hosts

pytest.importorskip("torch")
pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    if (why := why_no_hosts()) is not None:
        pytest.skip(why)
    with two_hosts() as found:
        yield found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("source") / "ckpt", rows=4_000)


def launch(hosts: tuple[Host, ...], per_host: int, source: Path, dest: Path) -> list[subprocess.Popen[str]]:
    port = str(random.randrange(20_000, 60_000))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--nproc-per-node"]
    torchrun += [str(per_host), "--master-addr", hosts[0].address, "--master-port", port]
    asked = ["-m", "samerun", "convert", str(source), str(dest), "--to", "safetensors", "--rank-timeout", "60"]
    environ = {"GLOO_SOCKET_IFNAME": "lo", "SAMERUN_TEST": str(dest)}
    return [host.start([*torchrun, "--node-rank", str(number), *asked], **environ) for number, host in enumerate(hosts)]


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    found = [process.communicate(timeout=240) for process in processes]
    return [(process.returncode, text[1]) for process, text in zip(processes, found, strict=True)]


def test_the_bytes_of_one_process(hosts: tuple[Host, Host], source: Path, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    command = [sys.executable, "-m", "samerun", "convert", str(source), str(tmp_path / "1" / "dest")]
    subprocess.run([*command, "--to", "safetensors"], check=True, capture_output=True)
    for name, per_host in (("2", 1), ("4", 2)):
        (tmp_path / name).mkdir()
        found = ends(launch(hosts, per_host, source, tmp_path / name / "dest"))
        assert [code for code, _ in found] == [0, 0], found
    one, two, four = (tree_bytes(tmp_path / name) for name in ("1", "2", "4"))
    assert one == two == four
    assert sorted(path.name for path in (tmp_path / "4").iterdir()) == ["dest"]


def test_a_rank_on_the_other_machine_that_is_killed(hosts: tuple[Host, Host], source: Path, tmp_path: Path) -> None:
    dest, until = tmp_path / "dest", time.monotonic() + 120
    processes = launch(hosts, 2, source, dest)
    while not (tmp_path / ".dest.samerun-ranks" / "hello-00003").exists():
        assert time.monotonic() < until
        time.sleep(0.002)
    (rank,) = processes_with({"SAMERUN_TEST": str(dest), "RANK": "3"})
    os.kill(rank, signal.SIGKILL)
    found = ends(processes)
    assert all(code != 0 for code, _ in found), found
    assert "SR-LAUNCH-" in found[0][1]
    assert not dest.exists()
    again = ends(launch(hosts, 1, source, dest))
    assert [code for code, _ in again] == [0, 0], again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest"]

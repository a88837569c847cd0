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


@pytest.fixture(scope="module")
def alone(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "samerun", "convert", str(source), str(folder / "dest"), "--to", "safetensors"]
    subprocess.run(command, check=True, capture_output=True)
    return tree_bytes(folder)


def test_the_bytes_of_one_process(
    hosts: tuple[Host, Host], source: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    found = ends(launch(hosts, 2, source, tmp_path / "dest"))
    assert [code for code, _ in found] == [0, 0], found
    assert tree_bytes(tmp_path) == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest"]


def test_a_rank_on_the_other_machine_that_is_killed(
    hosts: tuple[Host, Host], source: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
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
    assert tree_bytes(tmp_path) == alone  # by one process on each
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest"]

"""Machines made from Linux namespaces: a network, a host name and a process table of their own, one file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One of them. `address` is where the others reach it."""

    name: str
    address: str

    def start(self, command: Sequence[str], **environ: str) -> subprocess.Popen[str]:
        """Starts a command there. Killing what is returned ends all of it."""
        script = f'hostname {self.name}; exec "$@"'
        unshared = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script, "sh"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *unshared, *command],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yields two hosts, joined by a cable (veth). Raises CalledProcessError where that is not allowed."""
    mark = f"{os.getpid() % 10_000:04d}"
    hosts = Host(f"sr{mark}a", "10.77.0.1"), Host(f"sr{mark}b", "10.77.0.2")
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        ends = [f"v{host.name}" for host in hosts]
        _ip("link", "add", ends[0], "netns", hosts[0].name, "type", "veth", "peer", ends[1], "netns", hosts[1].name)
        for host, end in zip(hosts, ends, strict=True):
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            for interface in ("lo", end):
                _ip("-n", host.name, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_no_hosts() -> str | None:
    """Returns why no hosts can be made here, None if they can."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs Linux with ip and unshare"
    try:
        with two_hosts() as (one, _):
            done = one.start(["true"])
            done.communicate(timeout=20)
            return None if done.returncode == 0 else "no process may have a table of its own"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr!r}"


def processes_with(environ: Mapping[str, str]) -> list[int]:
    """Returns the processes of this machine, in whatever namespace, that were started with these variables."""
    wanted = {f"{name}={value}".encode() for name, value in environ.items()}
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    held = set(file.read().split(b"\0"))
            except OSError:
                continue
            if wanted <= held:
                found.append(int(entry))
    return found

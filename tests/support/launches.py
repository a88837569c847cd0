"""Launches of several processes that convert together, forked from this one."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from samerun.convert.prepare import prepare
from samerun.convert.together import carry_out_together, meet
from samerun.errors import SamerunError
from samerun.execute.engine import Settings
from samerun.execute.ranks import Launch
from samerun.formats.detect import open_checkpoint

_NEW_NETWORK, _NEW_PIDS = 0x4000_0000, 0x2000_0000
PATIENCE_SECONDS = 60.0

Hook = Callable[[], None]


@dataclass(frozen=True)
class Ended:
    """How one process ended: its exit code (minus the signal), and the codes and messages of its findings."""

    code: int
    problems: tuple[tuple[str, str], ...]

    @property
    def codes(self) -> set[str]:
        return {code for code, _ in self.problems}


def convert_rank(
    rank: int,
    world_size: int,
    source: Path,
    dest: Path,
    *,
    timeout: float = 20.0,
    key: str = "",
    size: int | None = None,
    **options: Any,
) -> None:
    """What one rank does, as the command line does it."""
    settings = Settings(threads=1)
    with meet(Launch(rank, size or world_size, key), source, dest, Event(), timeout) as meeting:
        checkpoint = open_checkpoint(source)
        try:
            asked = {"to": "safetensors", **options}
            prepared = prepare(checkpoint, dest, settings=settings, payloads=rank == 0, **asked)
            carry_out_together(prepared, meeting, settings=settings)
        finally:
            checkpoint.close()


class Ranks:
    """Forked processes, one per rank, each of which ran `hooks[rank]` first."""

    def __init__(
        self,
        world_size: int,
        source: Path,
        dest: Path,
        logs: Path,
        *,
        hooks: Mapping[int, Hook] | None = None,
        apart: bool = False,
        each: Mapping[int, dict[str, Any]] | None = None,
        as_rank: Mapping[int, int] | None = None,
        **options: Any,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs, self.pids = logs, dict[int, int]()
        for rank in range(world_size):
            self.pids[rank] = os.fork()
            if self.pids[rank] == 0:
                mine = {**options, **(each or {}).get(rank, {})}
                ranks = world_size - len(as_rank or {})
                number = (as_rank or {}).get(rank, rank)
                work = partial(convert_rank, number, ranks, source, dest, **mine)
                self._be(rank, work, (hooks or {}).get(rank), apart=apart)

    def _be(self, rank: int, work: Callable[[], None], hook: Hook | None, *, apart: bool) -> None:
        code = 71
        try:
            if apart and (alone := _go_apart()) is not None:
                code = alone
                return
            if hook is not None:
                hook()
            work()
            code = 0
        except SamerunError as error:
            said = [(problem.code, problem.message) for problem in error.problems]
            (self.logs / f"{rank}").write_text(json.dumps(said))
            code = error.exit_code
        except BaseException as error:
            (self.logs / f"{rank}").write_text(json.dumps([["", repr(error)]]))
        finally:
            os._exit(code)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def wait(self) -> list[Ended]:
        """Waits for all of them, and kills what does not end."""
        until = time.monotonic() + PATIENCE_SECONDS
        ended: dict[int, Ended] = {}
        while len(ended) < len(self.pids):
            for rank, pid in self.pids.items():
                if rank not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    log = self.logs / f"{rank}"
                    said = json.loads(log.read_text()) if log.exists() else []
                    code = os.waitstatus_to_exitcode(found[1])
                    ended[rank] = Ended(code, tuple((code, message) for code, message in said))
            if time.monotonic() > until:
                for rank, pid in self.pids.items():
                    if rank not in ended:
                        os.kill(pid, signal.SIGKILL)
                until += 5
            time.sleep(0.01)
        return [ended[rank] for rank in range(len(self.pids))]


def can_go_apart() -> bool:
    """Whether this machine lets a process have a network and a process table of its own."""
    child = os.fork()
    if child == 0:
        os._exit(ctypes.CDLL(None).unshare(_NEW_NETWORK | _NEW_PIDS) != 0)
    return os.waitpid(child, 0)[1] == 0


def _go_apart() -> int | None:
    """Continues in a process with a network and a process table of its own, as on another host.

    Returns None there; in the process that waits for it, its exit code.
    """
    if ctypes.CDLL(None).unshare(_NEW_NETWORK | _NEW_PIDS):
        raise OSError("no namespaces")
    child = os.fork()
    if child == 0:
        return None
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def run_together(world_size: int, source: Path, dest: Path, logs: Path, **options: Any) -> list[Ended]:
    """Runs a launch to its end."""
    return Ranks(world_size, source, dest, logs, **options).wait()

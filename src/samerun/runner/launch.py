"""Starts the user's own job and sees to it that it ends: its output kept, its time limited, no process left behind.

A job marks every process that it starts with `SAMERUN_JOB=<token>` in its environment. Launchers put their workers into
sessions of their own (torchrun does), so a process group alone does not reach them; the mark does. A job also ends when
samerun itself is killed: the first process asks the kernel for SIGTERM at its parent's death, and the next `samerun
run` ends whatever still carries the mark.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from samerun.errors import Problem, UsageError
from samerun.manifest.models import fill_placeholders
from samerun.verify.evidence.job import Outcome

TOKEN = "SAMERUN_JOB"
GRACE_SECONDS = 10.0
"""How long a job may take to end after SIGTERM before it is killed."""
STRAGGLER_SECONDS = 3.0
"""How long workers may outlive their launcher before they count as left behind."""
TAIL_LINES = 400
"""Lines of output that are kept to explain a failure; all of it is in the log."""

QUIET: Mapping[str, str] = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "PYTHONUNBUFFERED": "1",
}
"""Keeps a disposable job from logging to the real run. `launch.environment` in the manifest can override each."""

INHERITED_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set by a launcher around samerun itself; a job that inherited them would believe to be one of those ranks."""

# Runs in place of the command's first process: ask for SIGTERM when samerun dies, then become the command.
_TRAMPOLINE = """
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
"""


class Watcher(Protocol):
    """Sees a job while it runs. Called in the runner's own thread."""

    def job_line(self, line: str) -> None:
        """Called with each line of output."""

    def job_tick(self, elapsed_seconds: float) -> None:
        """Called a few times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job to start: words of its command line, where, with what environment, and where its output goes."""

    command: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str]
    log: Path
    timeout_seconds: float
    token: str

    def shell_line(self) -> str:
        """Returns the command as one could type it."""
        return shlex.join(self.command)


def fill_command(template: str, values: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the words of a command line. The template is split first, so a value with spaces stays one word.

    Raises:
        UsageError: SR-RUN-COMMAND for quotes that do not close or an empty command.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise UsageError(_bad_command(template, str(error))) from error
    if not words:
        raise UsageError(_bad_command(template, "it is empty"))
    return tuple(fill_placeholders(word, values) for word in words)


def _bad_command(template: str, why: str) -> Problem:
    return Problem(
        "SR-RUN-COMMAND",
        f"the launch command cannot be split into words: {why}",
        where={"key": "launch.command"},
        found=template,
        hint="samerun runs it without a shell: quotes group words, but pipes, variables and && are not understood",
    )


def job_environment(
    base: Mapping[str, str], declared: Mapping[str, str], recorder: Mapping[str, str], token: str
) -> dict[str, str]:
    """Returns a job's environment: inherited, quietened, then the manifest's, then what the Recorder reads."""
    inherited = {
        name: value for name, value in base.items() if name not in INHERITED_RANK and not name.startswith("SAMERUN_")
    }
    return {**inherited, **QUIET, **declared, **recorder, TOKEN: token}


def new_token() -> str:
    """Returns a mark for one job's processes."""
    return uuid.uuid4().hex


def run_job(job: Job, watcher: Watcher) -> Outcome:
    """Runs a job to its end, whatever that is, and leaves no process of it behind.

    On an interrupt (Ctrl-C, or SIGTERM and SIGHUP inside `interruptible`) the job is stopped and the interrupt raised.
    """
    words = [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), *job.command]
    started = time.monotonic()
    with job.log.open("wb", buffering=0) as log:
        process = subprocess.Popen(
            words,
            cwd=job.directory,
            env=dict(job.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            reader = _Output(process, log, watcher)
            timed_out = _wait(process, reader, watcher, started, job.timeout_seconds)
            if timed_out:
                _stop(process, job.token)
            leftovers = 0 if timed_out else _end_stragglers(job.token)
            reader.drain()
        except BaseException:
            _stop(process, job.token)
            raise
        finally:
            if process.stdout:
                process.stdout.close()
    return Outcome(
        returncode=process.wait(),
        seconds=time.monotonic() - started,
        timed_out=timed_out,
        leftovers=leftovers,
        tail=tuple(reader.tail),
    )


class _Output:
    """Copies a job's output into its log and hands out whole lines."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], watcher: Watcher) -> None:
        if process.stdout is None:
            raise ValueError("the process was started without a pipe")
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._file = process.stdout
        self._log = log
        self._watcher = watcher
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._file, selectors.EVENT_READ)
        self.open = True

    def read(self, timeout_seconds: float) -> bool:
        """Waits for output; returns whether any came. `open` turns false at its end."""
        if not self.open:
            time.sleep(timeout_seconds)
            return False
        if not self._selector.select(timeout_seconds):
            return False
        chunk = os.read(self._file.fileno(), 1 << 16)
        self.open = bool(chunk)
        self._log.write(chunk)
        *lines, self._rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in lines if self.open else [*lines, self._rest]:
            self._hand_out(line)
        return bool(chunk)

    def _hand_out(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip()
        if text:
            self.tail.append(text)
            self._watcher.job_line(text)

    def drain(self) -> None:
        """Takes what is still in the pipe after the job has ended."""
        while self.open and self.read(0.0):
            pass
        self._selector.close()


def _wait(
    process: subprocess.Popen[bytes], reader: _Output, watcher: Watcher, started: float, timeout_seconds: float
) -> bool:
    """Waits for the job's first process; returns whether it ran out of time."""
    while process.poll() is None:
        reader.read(0.2)
        elapsed = time.monotonic() - started
        watcher.job_tick(elapsed)
        if elapsed > timeout_seconds:
            return True
    return False


def _end_stragglers(token: str) -> int:
    """Waits a little for workers that outlive their launcher, then ends them; returns how many had to be ended."""
    deadline = time.monotonic() + STRAGGLER_SECONDS
    while (left := find_processes(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        stop_processes(token)
    return len(left)


def _stop(process: subprocess.Popen[bytes], token: str) -> None:
    """Ends a job that still runs. A second interrupt meanwhile kills it at once."""
    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        stop_processes(token, reap=process.poll)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        _signal_all(find_processes(token), signal.SIGKILL)
        process.wait()


def find_processes(token: str) -> list[int]:
    """Returns the ids of running processes that carry `token`. Without /proc (not Linux) none can be found."""
    mark = f"{TOKEN}={token}".encode()
    found: list[int] = []
    if not os.path.isdir("/proc"):
        return found
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def stop_processes(token: str, *, reap: Callable[[], Any] | None = None) -> int:
    """Ends every process that carries `token`: SIGTERM, a grace period, SIGKILL. Returns how many there were."""
    first = find_processes(token)
    _signal_all(first, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := find_processes(token)) and time.monotonic() < deadline:
        if reap is not None:
            reap()
        time.sleep(0.05)
    _signal_all(left, signal.SIGKILL)
    return len(first)


def _signal_all(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


@contextlib.contextmanager
def interruptible() -> Generator[None]:
    """Makes SIGTERM and SIGHUP end the work like Ctrl-C does, so that jobs are stopped and the stage can be redone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

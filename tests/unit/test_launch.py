"""Jobs end, whatever they do: output kept, time limited, nothing left behind, also when samerun itself is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samerun.errors import UsageError
from samerun.runner.launch import (
    QUIET,
    TOKEN,
    Job,
    fill_command,
    find_processes,
    job_environment,
    new_token,
    run_job,
    stop_processes,
)
from samerun.runner.progress import Silent
from samerun.verify.evidence.job import Outcome


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def job_line(self, line: str) -> None:
        self.lines.append(line)


def start(folder: Path, script: str, *, timeout: float = 30.0, watcher: Silent | None = None) -> tuple[Outcome, Job]:
    token = new_token()
    job = Job(
        command=("bash", "-c", script),
        directory=folder,
        environment=job_environment(os.environ, {}, {}, token),
        log=folder / "log.txt",
        timeout_seconds=timeout,
        token=token,
    )
    return run_job(job, watcher or Silent()), job


def test_output_status_and_tail_are_kept(tmp_path: Path) -> None:
    watcher = Lines()
    outcome, job = start(tmp_path, r"echo one; echo two >&2; printf 'half\rwhole'; exit 3", watcher=watcher)
    assert (outcome.returncode, outcome.timed_out, outcome.leftovers) == (3, False, 0)
    assert watcher.lines == ["one", "two", "half", "whole"] == list(outcome.tail)
    assert job.log.read_bytes() == b"one\ntwo\nhalf\rwhole"


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    token = new_token()
    job = Job(
        command=("no-such-program",),
        directory=tmp_path,
        environment=job_environment(os.environ, {}, {}, token),
        log=tmp_path / "log.txt",
        timeout_seconds=30.0,
        token=token,
    )
    outcome = run_job(job, Silent())
    assert outcome.returncode == 1
    assert "cannot start no-such-program" in outcome.tail[-1]


def test_a_job_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome, job = start(tmp_path, "setsid sleep 300 & echo waiting; sleep 300", timeout=1.0)
    assert outcome.timed_out
    assert time.monotonic() - began < 10
    assert outcome.tail == ("waiting",)
    assert find_processes(job.token) == []


def test_workers_that_outlive_their_launcher_are_ended_and_counted(tmp_path: Path) -> None:
    outcome, job = start(tmp_path, "setsid sleep 300 >/dev/null 2>&1 & disown; exit 0")
    assert (outcome.returncode, outcome.leftovers) == (0, 1)
    assert find_processes(job.token) == []


def test_an_interrupt_ends_the_job(tmp_path: Path) -> None:
    class Impatient(Silent):
        def job_tick(self, elapsed_seconds: float) -> None:
            raise KeyboardInterrupt

    token = new_token()
    job = Job(
        command=("bash", "-c", "setsid sleep 300 & sleep 300"),
        directory=tmp_path,
        environment=job_environment(os.environ, {}, {}, token),
        log=tmp_path / "log.txt",
        timeout_seconds=60.0,
        token=token,
    )
    with pytest.raises(KeyboardInterrupt):
        run_job(job, Impatient())
    assert find_processes(token) == []


RUNNER = """
import os, sys
from pathlib import Path
from samerun.runner.launch import Job, interruptible, job_environment, run_job
from samerun.runner.progress import Silent
job = Job(command=("bash", "-c", "echo up; sleep 300"), directory=Path(sys.argv[1]),
          environment=job_environment(os.environ, {}, {}, sys.argv[2]), log=Path(sys.argv[1]) / "log.txt",
          timeout_seconds=300.0, token=sys.argv[2])
with interruptible():
    run_job(job, Silent())
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_the_job_ends_when_samerun_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    token = new_token()
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(tmp_path), token], stderr=subprocess.DEVNULL, start_new_session=True
    )
    log = tmp_path / "log.txt"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text() == "up\n") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert find_processes(token)
    runner.send_signal(how)
    runner.wait(timeout=30)
    while find_processes(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = find_processes(token)
    stop_processes(token)
    # Killed outright, samerun can do nothing: the kernel ends the job's first process, and whatever that one leaves
    # behind is ended by the next run, through its mark.
    assert left == [] if how is not signal.SIGKILL else len(left) <= 1
    assert find_processes(token) == []


def test_words_keep_their_spaces_and_braces() -> None:
    words = fill_command(
        "{python} train.py --resume {checkpoint} 'a b' --x '{{1}}'", {"python": "p", "checkpoint": "/a b"}
    )
    assert words == ("p", "train.py", "--resume", "/a b", "a b", "--x", "{1}")
    for bad in ("python 'train.py", ""):
        with pytest.raises(UsageError, match="SR-RUN-COMMAND"):
            fill_command(bad, {})


def test_the_environment_is_quiet_and_nobodys_rank() -> None:
    base = {"PATH": "/bin", "RANK": "3", "WORLD_SIZE": "8", "SAMERUN_STAGE": "old", "WANDB_MODE": "online"}
    found = job_environment(base, {"OMP_NUM_THREADS": "1", "COMET_MODE": "online"}, {"SAMERUN_STAGE": "load"}, "t")
    assert found["PATH"] == "/bin"
    assert found["SAMERUN_STAGE"] == "load"
    assert found[TOKEN] == "t"
    assert found["WANDB_MODE"] == QUIET["WANDB_MODE"] == "disabled"
    assert found["COMET_MODE"] == "online"  # the manifest may say otherwise
    assert not {"RANK", "WORLD_SIZE"} & found.keys()

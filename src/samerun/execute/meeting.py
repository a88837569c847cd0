"""How processes on several machines agree, through the file system that they share: no ports, no torch.

Every process of a launch writes small files, each whole (under another name, then renamed), into one directory beside
the destination, and looks for those of the others:

    hello-RRRRR         who this process is; rewritten until the session names it
    session.json        rank 0: a new name for this meeting, and the processes that it has seen
    <session>/said-TOPIC-RRRRR, <session>/told-TOPIC, <session>/failed-RRRRR, <session>/bye-RRRRR
    <session>/beat-RRRRR    a number that grows while the process lives, and how far it is

A process knows that a session is of its own launch because its own random name is listed there; nothing that lies there
from before can be mistaken. Clocks are never compared: whether another process lives is told by its number growing
within this process's own time, or, on the same machine, by the process table. `docs/adr/0005` says why it is so.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from samerun.errors import (
    CorruptCheckpoint,
    ExecutionError,
    Problem,
    SamerunError,
    Severity,
    StalePlan,
    UsageError,
    VerificationError,
)
from samerun.execute.journal import boot_id
from samerun.execute.partial import lock_folder
from samerun.execute.ranks import Launch

DEFAULT_TIMEOUT_SECONDS = 120.0
_LOOK_SECONDS, _BEAT_SECONDS, _LINGER_SECONDS = 0.05, 1.0, 1.0
_PIDS = Path("/proc/self/ns/pid")

SPOILED = (CorruptCheckpoint, StalePlan, VerificationError)  # after these nothing that was written can be used

Body = dict[str, Any]


class LaunchFailed(ExecutionError):
    """Another process of the launch failed, or is gone. `discard` says that nothing that was written can be used."""

    discard = False


@dataclass(slots=True)
class _Seen:
    """When another process was last seen to live, in this process's time."""

    beat: int
    at: float


class Meeting:
    """The processes of a launch, as one of them sees them. A context: leaving it by an exception tells the others.

    Args:
        folder: where to meet; its parent exists.
        launch: which process this is, of how many.
        timeout_seconds: how long another process may be silent, or late.
        cancel: is set when another process failed, so that work stops; and stops waiting when it is set.
    """

    def __init__(self, folder: Path, launch: Launch, timeout_seconds: float, cancel: Event) -> None:
        self.folder, self.launch, self.timeout, self.cancel = folder, launch, timeout_seconds, cancel
        self.session = ""
        self.failure: LaunchFailed | None = None
        self.hellos: list[Body] = []
        self.on_beat: Callable[[], None] | None = None
        self._me = {**who(), "nonce": secrets.token_hex(8), "world_size": launch.world_size, "key": launch.key}
        self._seen: dict[int, _Seen] = {}
        self._stage: Body = {}
        self._lock = -1
        self._ended = Event()
        self._watcher = Thread(target=self._watch, name="samerun-ranks", daemon=True)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which plans the shares and commits."""
        return self.launch.rank == 0

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.launch.world_size) if rank != self.launch.rank]

    def __enter__(self) -> Meeting:
        try:
            self._open() if self.first else self._join()
        except BaseException:
            self._leave()
            raise
        self._seen = {rank: _Seen(-1, time.monotonic()) for rank in self.others}
        self._watcher.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._put(f"failed-{self.launch.rank:05d}", _failure(error))
        self._put(f"bye-{self.launch.rank:05d}", {})
        if self.first:
            self._see_off()
        self._ended.set()
        self._watcher.join()
        self._leave()

    # --- meeting --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        found = self._await(lambda: lock_folder(self.folder), lambda: _busy(self.folder))
        self._lock = found
        for item in self.folder.iterdir():
            shutil.rmtree(item, ignore_errors=True) if item.is_dir() else item.unlink(missing_ok=True)
        hellos: dict[int, Body] = {0: self._me}

        def all_here() -> bool | None:
            for rank in self.others:
                hello = _read(self.folder / f"hello-{rank:05d}")
                if hello is not None and hello.get("key") == self.launch.key:
                    hellos[rank] = hello
                    self._require_same_size(rank, hello)
            return True if len(hellos) == self.launch.world_size else None

        self._await(all_here, lambda: self._missing([rank for rank in self.others if rank not in hellos]))
        self.hellos = [hellos[rank] for rank in range(self.launch.world_size)]
        session = secrets.token_hex(8)
        (self.folder / session).mkdir(mode=0o700)
        _write(self.folder / "session.json", {"session": session, "hellos": self.hellos})
        self.session = session

    def _require_same_size(self, rank: int, hello: Body) -> None:
        if hello["world_size"] == self.launch.world_size:
            return
        problem = _sizes_differ(self.launch.world_size, rank, hello["world_size"])
        _write(self.folder / "session.json", {"refused": problem.message, "hellos": [hello]})
        time.sleep(_LINGER_SECONDS)  # so that it reads this before the directory goes
        raise UsageError(problem)

    def _join(self) -> None:
        mine = self.folder / f"hello-{self.launch.rank:05d}"
        written = False

        def named() -> Body | None:
            nonlocal written
            found = _read(mine)
            if found is None or not written:
                with suppress(FileNotFoundError):  # rank 0 has not made the directory yet, or makes it anew
                    _write(mine, self._me)
                    written = True
            elif found.get("nonce") != self._me["nonce"]:
                raise UsageError(_twice(self.launch.rank))
            session = _read(self.folder / "session.json")
            here = session is not None and any(hello["nonce"] == self._me["nonce"] for hello in session["hellos"])
            return session if here else None

        session = self._await(named, lambda: self._missing([0]))
        if "refused" in session:
            raise UsageError(_of_another_size(session["refused"]))
        self.session, self.hellos = session["session"], session["hellos"]

    def _await(self, look: Callable[[], Any], late: Callable[[], Problem]) -> Any:
        """Looks again and again until there is something."""
        until = time.monotonic() + self.timeout
        while True:
            self.check()
            found = look()
            if found is not None:
                return found
            if time.monotonic() > until:
                raise ExecutionError(late())
            time.sleep(_LOOK_SECONDS)

    # --- talking --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises LaunchFailed if another process failed or is gone, InterruptedError if this one is to stop."""
        if self.failure is not None:
            raise self.failure
        if self.cancel.is_set():
            raise InterruptedError(4, "the conversion was interrupted")

    def say(self, topic: str, body: Body) -> None:
        """Tells rank 0 something. Every rank but 0 calls this once per topic."""
        self._put(f"said-{topic}-{self.launch.rank:05d}", body)

    def hear_all(self, topic: str, mine: Body) -> list[Body]:
        """Returns what every rank says, in the order of ranks; rank 0 calls this."""
        return [mine, *(self._hear(f"said-{topic}-{rank:05d}", rank) for rank in self.others)]

    def tell(self, topic: str, body: Body) -> None:
        """Tells every other rank something; rank 0 calls this."""
        self._put(f"told-{topic}", body)

    def hear(self, topic: str) -> Body:
        """Returns what rank 0 tells; every other rank calls this."""
        return self._hear(f"told-{topic}", 0)

    def exchange(self, topic: str, mine: Body) -> list[Body]:
        """Returns what every rank says to every rank. All of them call this."""
        if self.first:
            said = self.hear_all(topic, mine)
            self.tell(topic, {"said": said})
            return said
        self.say(topic, mine)
        return self.hear(topic)["said"]

    def progress(self, stage: str, done_bytes: int) -> None:
        """Notes how far this process is."""
        self._stage = {"stage": stage, "done": done_bytes}

    def done_elsewhere(self, stage: str) -> int:
        """Returns the bytes that the other processes say they have done of a stage, as of their last beat."""
        beats = [_read(self._at(f"beat-{rank:05d}")) or {} for rank in self.others]
        return sum(int(beat.get("done", 0)) for beat in beats if beat.get("stage") == stage)

    def _hear(self, name: str, rank: int) -> Body:
        # What another process says late is no failure: it is watched, and its silence ends the wait.
        while True:
            left = _read(self._at(f"bye-{rank:05d}")) is not None
            if (found := _read(self._at(name))) is not None:
                return found
            if left and self.failure is None:
                self.failure = self._look_around()
            self.check()
            if left:
                raise LaunchFailed(_lost(rank, self.hellos[rank], "it ended before it had said what was waited for"))
            time.sleep(_LOOK_SECONDS)

    def _at(self, name: str) -> Path:
        return self.folder / self.session / name

    def _put(self, name: str, body: Mapping[str, Any]) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):  # rank 0 has ended and taken the directory with it
            _write(self._at(name), body)

    # --- watching -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        count, next_beat = 0, 0.0
        while not self._ended.wait(_LOOK_SECONDS * 2):
            if time.monotonic() >= next_beat:
                count, next_beat = count + 1, time.monotonic() + min(_BEAT_SECONDS, self.timeout / 8)
                with suppress(OSError):  # a full disk: the work itself will say so
                    self._put(f"beat-{self.launch.rank:05d}", {"beat": count, **self._stage})
                if self.on_beat is not None:
                    self.on_beat()
            if self.failure is None and (failure := self._look_around()) is not None:
                self.failure = failure
                self.cancel.set()

    def _look_around(self) -> LaunchFailed | None:
        lost = {rank: why for rank in self.others if (why := self._why_lost(rank))}
        said = {rank: body for rank in self.others if (body := _read(self._at(f"failed-{rank:05d}"))) is not None}
        for rank, body in sorted(said.items(), key=lambda item: item[1]["heard"]):  # the cause before what follows
            if not body["heard"] or not lost:
                failed = LaunchFailed(_failed(rank, body))
                failed.discard = bool(body["discard"])
                return failed
        for rank, why in lost.items():
            if _read(self._at(f"bye-{rank:05d}")) is None:  # it may have said goodbye between the two looks
                return LaunchFailed(_lost(rank, self.hellos[rank], why))
        return None

    def _why_lost(self, rank: int) -> str | None:
        if _read(self._at(f"bye-{rank:05d}")) is not None:
            return None
        if not self._at("").is_dir():
            return "and so is the directory in which the processes met"
        if _is_gone(self.hellos[rank]):
            return "its process has ended without a word: killed, or out of memory"
        beat = (_read(self._at(f"beat-{rank:05d}")) or {}).get("beat", -1)
        seen = self._seen[rank]
        if beat != seen.beat:
            seen.beat, seen.at = beat, time.monotonic()
            return None
        silent = time.monotonic() - seen.at
        return f"nothing was heard of it for {silent:.0f} s" if silent > self.timeout else None

    def _see_off(self) -> None:
        """Waits until every other process has seen how it ended, and no longer than one may be silent."""
        until = time.monotonic() + self.timeout
        while time.monotonic() < until:
            if all(_read(self._at(f"bye-{rank:05d}")) or self._why_lost(rank) for rank in self.others):
                return
            time.sleep(_LOOK_SECONDS)

    def _leave(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _missing(self, ranks: list[int]) -> Problem:
        return Problem(
            "SR-LAUNCH-MISSING",
            f"{_list(ranks)} of {self.launch.world_size} did not come within {self.timeout:.0f} s",
            where={"rank": self.launch.rank, "file": str(self.folder)},
            hint="every process needs the same command and sees the same file system at the same paths. To convert in "
            "one process: env -u RANK -u WORLD_SIZE samerun convert ...",
        )


# --- files and processes ------------------------------------------------------------------------------------------


def _write(path: Path, body: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps({**body, "whole": True}, default=str), encoding="utf-8")
    os.replace(temporary, path)


def _read(path: Path) -> Body | None:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) and body.get("whole") else None


def who() -> Body:
    """Returns what tells this process from others, here and on other machines."""
    me: Body = {"host": platform.node(), "boot": boot_id(), "pids": "", "pid": os.getpid(), "started": ""}
    with suppress(OSError):
        if started := _started(os.getpid()):
            me |= {"pids": os.readlink(_PIDS), "started": started}
    return me


def is_running(hello: Mapping[str, Any]) -> bool:
    """Whether a process is one of this machine that lives; False where that cannot be told."""
    mine = who()
    here = bool(hello.get("pids")) and (hello.get("boot"), hello.get("pids")) == (mine["boot"], mine["pids"])
    return here and _started(int(hello["pid"])) == hello.get("started")


def _started(pid: int) -> str | None:
    """Returns when a process began, None if it is gone or only waits to be buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_gone(hello: Body) -> bool:
    """Whether a process of this machine has ended; False where that cannot be told."""
    mine = who()
    here = bool(hello["pids"]) and (hello["boot"], hello["pids"]) == (mine["boot"], mine["pids"])
    return here and _started(int(hello["pid"])) != hello["started"]


# --- findings -----------------------------------------------------------------------------------------------------


def _failure(error: BaseException) -> Body:
    """Returns what the others are told of an exception; `heard` says that it is another's, passed on."""
    discard = error.discard if isinstance(error, LaunchFailed) else isinstance(error, SPOILED)
    problems = error.problems if isinstance(error, SamerunError) else ()
    errors = [problem for problem in problems if problem.severity is Severity.ERROR] or list(problems)
    what = "; ".join(f"{problem.code} {problem.message}" for problem in errors[:3])
    heard = isinstance(error, LaunchFailed)
    return {"what": what or str(error) or type(error).__name__, "discard": discard, "heard": heard}


def _list(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


_GO_ON = "no destination is visible. Start all processes again: they go on where they were"


def _failed(rank: int, said: Body) -> Problem:
    return Problem("SR-LAUNCH-FAILED", f"rank {rank} failed: {said['what']}", where={"rank": rank}, hint=_GO_ON)


def _lost(rank: int, hello: Body, why: str) -> Problem:
    where = {"rank": rank, "host": hello["host"], "pid": hello["pid"]}
    return Problem("SR-LAUNCH-LOST", f"rank {rank} is gone: {why}", where=where, hint=_GO_ON)


def _twice(rank: int) -> Problem:
    return Problem(
        "SR-LAUNCH-TWICE",
        f"two processes say that they are rank {rank}",
        where={"rank": rank},
        hint="a process of an earlier launch still runs, or RANK was given twice",
    )


def _sizes_differ(mine: int, rank: int, theirs: int) -> Problem:
    return _of_another_size(f"the processes do not agree how many they are: rank 0 says {mine}, rank {rank} {theirs}")


def _of_another_size(message: str) -> Problem:
    return Problem("SR-LAUNCH-ENV", message, hint="WORLD_SIZE is the same in every process of a launch")


def _busy(folder: Path) -> Problem:
    return Problem(
        "SR-CONVERT-BUSY",
        "other processes are building this destination",
        where={"file": str(folder)},
        hint="wait for them, or stop them; the next attempt goes on where they were",
    )

"""A conversion shared by the processes of a launch: planned by all, copied and proved by each, committed by one."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from samerun.convert.convert import Converted, building, commit, converted, open_place, read_back
from samerun.convert.prepare import Prepared
from samerun.convert.prove import Evidence, ProvedTensor
from samerun.errors import PlanError, Problem, Severity, UsageError, VerificationError, has_errors
from samerun.execute.engine import Execution, Progress, ProgressCallback, Settings
from samerun.execute.journal import Journal, boot_id
from samerun.execute.meeting import DEFAULT_TIMEOUT_SECONDS, Meeting
from samerun.execute.partial import Partial, meeting_place, require_places
from samerun.execute.ranks import Launch, divide
from samerun.stores.destination import StoredPlace
from samerun.stores.remote import is_url


def meet(
    launch: Launch,
    source: Path,
    dest: str | Path,
    cancel: Event,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    folder: str | None = None,
) -> Meeting:
    """Returns the context in which the processes of a launch convert together. Every one of them calls this.

    They meet beside the destination, or in `folder`, which a destination in a store needs.

    Raises:
        UsageError: for a destination that cannot be, or a folder that is missing.
    """
    if folder is not None or is_url(dest):
        place = meeting_folder(folder, str(dest))
    else:
        place = meeting_place(require_places(source, Path(dest)))
    return Meeting(place, launch, timeout_seconds, cancel)


def meeting_folder(folder: str | None, dest: str) -> Path:
    """Returns the directory in which the processes meet that build this destination, inside the one that was given.

    Raises:
        UsageError: if none was given, or it is none.
    """
    if folder is None or not Path(folder).is_dir():
        raise UsageError(_no_meeting(folder, dest))
    name = dest.rstrip("/").rpartition("/")[2]
    return Path(folder).resolve() / f".{name}.samerun-ranks"


def carry_out_together(
    prepared: Prepared,
    meeting: Meeting,
    *,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> Converted | None:
    """Does this process's share of what `samerun.convert.convert.carry_out` does. Every rank calls this.

    Ranks copy contiguous parts of the plan that are equal in bytes, then prove contiguous parts of the tensors. Rank 0
    creates the files, writes checksums and the proof, and commits; it returns what was done, the others None.

    Raises:
        PlanError: if the ranks planned different things.
        LaunchFailed: if another rank failed or is gone; no destination is visible then.
        SamerunError: as `carry_out` does.
    """
    started, settings = time.monotonic(), settings or Settings()
    if isinstance(prepared.place, StoredPlace):
        from samerun.convert.stored import carry_out_stored_together

        return carry_out_stored_together(prepared, prepared.place, meeting, settings=settings, progress=progress)
    settings = agree(prepared, meeting, settings)
    steps = _Together(prepared, meeting, settings, progress)
    if not meeting.first:
        with building(prepared, None), told(meeting):
            steps.follow()
        return None
    partial = open_place(prepared, settings, [str(hello["boot"]) for hello in meeting.hellos])
    with building(prepared, partial), told(meeting):
        evidence = steps.lead(partial)
        commit(prepared, partial, evidence)
    done = converted(prepared, partial, evidence, started)
    with suppress(OSError):  # it is committed, whoever hears of it
        meeting.tell("committed", {})
    return done


def agree(prepared: Prepared, meeting: Meeting, settings: Settings) -> Settings:
    """Returns settings with which every rank cuts the plan into the same units."""
    mine = {"plan": prepared.plan.hash, "tile_bytes": settings.tile_bytes}
    said = meeting.exchange("plan", mine)
    plans = [str(one["plan"]) for one in said]
    if len(set(plans)) > 1:
        raise PlanError(_plans_differ(plans))
    return replace(settings, agreed_tile_bytes=min(int(one["tile_bytes"]) for one in said))


class told:
    """Turns an interruption that another rank's failure caused into that failure."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InterruptedError) and self._meeting.failure is not None:
            raise self._meeting.failure from None


class _Together:
    def __init__(
        self, prepared: Prepared, meeting: Meeting, settings: Settings, progress: ProgressCallback | None
    ) -> None:
        self.prepared, self.meeting, self.settings, self.shown = prepared, meeting, settings, progress
        self.cancel = meeting.cancel
        self.share = meeting.launch.rank, meeting.launch.world_size
        self.now: Progress | None = None
        meeting.on_beat = self.show if meeting.first else None

    def lead(self, partial: Partial) -> Evidence:
        """Rank 0: everything up to the evidence of all ranks together."""
        meeting = self.meeting
        with self.execution(partial.payload, partial.journal, partial) as execution:
            execution.make_files()
            left = execution.left()
            parts = divide([execution.work.units[number].num_bytes for number in left], meeting.launch.world_size)
            shares = [left[part.start : part.stop] for part in parts]
            places = {"payload": str(partial.payload), "journals": str(partial.folder), "header": partial.header}
            meeting.tell("begin", {"shares": shares, **places})
            execution.write_units(shares[0])
            execution.flush_units(shares[0])
            meeting.hear_all("written", {})
            execution.done.update(partial.gather())
            if missing := execution.left():
                raise PlanError(_not_written(missing))
            execution.finish_files()
        partial.journal.stage("written")
        meeting.tell("prove", {})
        mine = self.evidence(partial.payload)
        evidence = join_evidence(mine, meeting.hear_all("proved", {}))
        meeting.check()
        return evidence

    def follow(self) -> None:
        """Every other rank: its share, and the end of all."""
        meeting, rank = self.meeting, self.meeting.launch.rank
        begin = meeting.hear("begin")
        share = [int(number) for number in begin["shares"][rank]]
        payload = Path(begin["payload"])
        journal = Journal(Partial.journal_in(Path(begin["journals"]), rank, meeting.session))
        try:
            journal.start({**begin["header"], "boot": boot_id()})
            with self.execution(payload, journal, None) as execution:
                execution.write_units(share)
                execution.flush_units(share)
            journal.stage("written")
        finally:
            journal.close()
        meeting.say("written", {})
        meeting.hear("prove")
        found = self.evidence(payload)
        meeting.say("proved", evidence_to_json(found))
        meeting.hear("committed")

    def execution(self, payload: Path, journal: Journal, partial: Partial | None) -> Execution:
        done = partial.done if partial is not None else {}
        plan, view = self.prepared.plan, self.prepared.view
        return Execution(plan, view, payload, journal, done, self.settings, self.cancel, self.note)

    def evidence(self, payload: Path) -> Evidence:
        return read_back(self.prepared, payload, self.settings, self.note, self.cancel, self.share)

    # --- progress -------------------------------------------------------------------------------------------------

    def note(self, now: Progress) -> None:
        self.now = now
        self.meeting.progress(now.stage, now.done_bytes)

    def show(self) -> None:
        """Rank 0, once a second: what all of them have done."""
        now = self.now
        if now is not None and self.shown is not None:
            done = now.done_bytes + self.meeting.done_elsewhere(now.stage)
            self.shown(Progress(now.stage, min(done, now.total_bytes), now.total_bytes, now.seconds))


# --- evidence as messages -----------------------------------------------------------------------------------------


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """Returns evidence as a message to rank 0."""
    tensors = [[t.key, t.saved, t.digest, t.dtype, list(t.shape), t.cast_from] for t in evidence.tensors]
    return {"tensors": tensors, "problems": [problem.to_json() for problem in evidence.problems]}


def join_evidence(mine: Evidence, said: list[dict[str, Any]]) -> Evidence:
    """Returns the evidence of all ranks, in the order of the plan.

    Raises:
        VerificationError: if not every tensor was compared.
    """
    evidence = Evidence([*mine.tensors], [*mine.problems], mine.total)
    for body in said[1:]:
        for key, saved, digest, dtype, shape, cast_from in body["tensors"]:
            evidence.tensors.append(ProvedTensor(key, saved, digest, dtype, tuple(shape), cast_from))
        evidence.problems += [_problem(problem) for problem in body["problems"]]
    if len(evidence.tensors) < evidence.total and not has_errors(evidence.problems):
        raise VerificationError(_not_proved(len(evidence.tensors), evidence.total))
    return evidence


def _problem(body: dict[str, Any]) -> Problem:
    fields: dict[str, Any] = {**body, "severity": Severity(body["severity"])}
    return Problem(**fields)


# --- findings -----------------------------------------------------------------------------------------------------


def _plans_differ(plans: list[str]) -> Problem:
    other = next(rank for rank, plan in enumerate(plans) if plan != plans[0])
    return Problem(
        "SR-LAUNCH-PLAN",
        "the processes planned different things, so nothing was written",
        where={"rank": other},
        expected=plans[0],
        found=plans[other],
        hint="they were given different options, run different versions of samerun or NumPy, or do not see the same "
        "source: the same files, with the same times, at the same path",
    )


def _no_meeting(folder: str | None, dest: str) -> Problem:
    return Problem(
        "SR-LAUNCH-MEETING",
        "processes that write into a store together need a directory to meet in"
        if folder is None
        else "the directory for the processes to meet in is not there",
        where={"file": folder or dest},
        hint="--meeting DIR, on a file system that all of them see; only small messages lie there",
    )


def _not_written(missing: list[int]) -> Problem:
    return Problem(
        "SR-LAUNCH-JOURNAL",
        f"{len(missing)} units were written by no process, unit {missing[0]} is the first",
        hint="a process's journal did not arrive on the file system of rank 0; start all of them again",
    )


def _not_proved(found: int, total: int) -> Problem:
    return Problem(
        "SR-CONVERT-LOST",
        f"{total - found} of {total} tensors were compared by no process",
        hint="this is a defect in samerun: run it again, and report it if it stays",
    )

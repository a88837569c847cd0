"""What a disposable job must have been before its numbers count: the planned world, layout and batch, and harmless."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.mesh import Layout
from samerun.errors import Problem, Severity
from samerun.trace import Header
from samerun.verify.evidence.observed import Observed

LINES_TO_ADD = """recorder = Recorder.from_env()
recorder.attach(model, optimizer, scheduler=scheduler, sampler=sampler, layout=layout)
recorder.loaded(update=update)                       # after loading the checkpoint
recorder.evaluate(evaluate_fixed_examples)           # returns {"losses": ..., "logits": ...}
recorder.record(update=..., loss=..., grad_norm=..., sample_ids=...)     # after each optimizer step
if recorder.finished: break"""
"""What a trainer adds so that a job can be judged; `samerun.train.Recorder` does nothing in an ordinary run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What the sealed plan says a job is. `microbatches` is [pass][replica] in samples; None: not compared."""

    world_size: int
    layout: Layout
    global_batch: int
    passes: int
    max_microbatch: int
    microbatches: tuple[tuple[int, ...], ...] | None
    stage: str

    def describe(self) -> str:
        """Returns one line for people: processes, layout, batch."""
        return (
            f"{self.world_size} processes ({self.layout}), global batch {self.global_batch} "
            f"in {self.passes} passes of at most {self.max_microbatch}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launched job ended.

    `returncode` is negative for a signal, as subprocess has it. `leftovers` are processes that outlived their job and
    had to be ended. `tail` holds the last lines of its output.
    """

    returncode: int
    seconds: float
    timed_out: bool = False
    leftovers: int = 0
    tail: tuple[str, ...] = ()


def check_outcome(outcome: Outcome, stage: str, *, timeout_seconds: float, finished: bool = False) -> list[Problem]:
    """Returns findings about how the job ended: its exit status, its time limit, processes that it left behind.

    `finished`: every rank had closed its trace after all that was asked of it. What goes wrong then, while Python and
    the communication threads shut down, takes nothing away from what was recorded.
    """
    problems: list[Problem] = []
    said = "\n".join(telling_lines(outcome.tail)) or "(no output)"
    if outcome.timed_out:
        problems.append(
            Problem(
                "SR-JOB-TIMEOUT",
                f"the job did not end within {timeout_seconds:g} s and was stopped; it said last:\n{said}",
                where={"stage": stage},
                hint="a hang right after loading is usually one rank waiting in a collective that another never "
                "entered; if the job is only slow, raise launch.timeout_seconds",
            )
        )
    elif outcome.returncode != 0 and finished:
        problems.append(
            Problem(
                "SR-JOB-EXIT",
                f"the job did all that was asked of it, then ended with {describe_status(outcome.returncode)}; it "
                f"said:\n{said}",
                Severity.WARNING,
                where={"stage": stage},
                hint="every rank had closed its trace, so what was recorded counts; let the ranks meet at a barrier "
                "before they destroy the process group, and keep the model until Python ends",
            )
        )
    elif outcome.returncode != 0:
        problems.append(
            Problem(
                "SR-JOB-FAILED",
                f"the job ended with {describe_status(outcome.returncode)}; it said:\n{said}",
                where={"stage": stage},
                hint="the whole output is in the stage's log.txt; the command is in its result.json",
            )
        )
    if outcome.leftovers:
        problems.append(
            Problem(
                "SR-JOB-LEFTOVER",
                f"{outcome.leftovers} processes outlived the job and were ended",
                Severity.WARNING,
                where={"stage": stage},
                hint="a launcher that does not wait for its workers can hold devices after it has ended",
            )
        )
    return problems


_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Failure)\b")
_RANK = re.compile(r"^\[rank\d+\]:\s?")
_LAUNCHER = re.compile(r"torch[./]distributed[./](?:elastic|run|launcher)|^[WEI]\d{4} |^=+$|^-+$")


def telling_lines(tail: Sequence[str], limit: int = 12) -> tuple[str, ...]:
    """Returns what explains a job's end: the exceptions that its ranks raised, or else its last lines.

    A launcher's own account of the failure, which comes last and says least, is left out.

    >>> telling_lines(["[rank1]: KeyError: 'w'", "[rank0]: KeyError: 'w'", "torch.distributed.elastic.X: failed"])
    ("KeyError: 'w'",)
    """
    own: list[str] = []
    for line in tail:
        if _LAUNCHER.search(line):
            if own:
                break
            continue
        own.append(_RANK.sub("", line))
    raised = [place for place, line in enumerate(own) if _EXCEPTION.match(line)]
    if not raised:
        return tuple(own[-limit:]) or tuple(tail[-limit:])
    found: dict[str, None] = {}
    for place in raised:
        found[own[place]] = None
        if place + 1 < len(own) and own[place + 1].startswith("    "):
            found[own[place + 1]] = None  # the second line of a message: what to do about it
    return tuple(found)[:limit]


def describe_status(returncode: int) -> str:
    """Returns an exit status in words.

    >>> describe_status(-9), describe_status(1)
    ('signal 9 (SIGKILL)', 'exit status 1')
    """
    if returncode >= 0:
        return f"exit status {returncode}"
    names = {1: "SIGHUP", 2: "SIGINT", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
    return f"signal {-returncode} ({names.get(-returncode, 'unnamed')})"


def check_job(observed: Observed | None, plan: JobPlan) -> list[Problem]:
    """Compares what the job says it is with the sealed plan. Everything here is known before the first update.

    `observed` is None when the job left no readable trace at all.
    """
    if observed is None:
        return [_silent(plan.stage)]
    problems = [*_check_world(observed.headers, plan), *_check_stage(observed.headers, plan)]
    if not problems:  # a wrong world makes every rank's layout and batch wrong too: name the cause, not its echoes
        problems = _check_layout(observed.headers, plan) or _check_batch(observed.headers, plan)
    return problems


def _silent(stage: str) -> Problem:
    return Problem(
        "SR-JOB-SILENT",
        "the job ended without a word: no rank wrote a trace",
        where={"stage": stage},
        hint=f"add these lines to the training script:\n{LINES_TO_ADD}",
    )


def _check_world(headers: Mapping[int, Header], plan: JobPlan) -> list[Problem]:
    wrong = {rank: line.world_size for rank, line in headers.items() if line.world_size != plan.world_size}
    if wrong:
        rank = min(wrong)
        return [
            Problem(
                "SR-JOB-WORLD",
                "the job runs at another world size than the sealed plan's",
                where={"stage": plan.stage, "rank": rank},
                expected=plan.world_size,
                found=wrong[rank],
                hint="the launch command must start {world_size} processes",
            )
        ]
    missing = sorted(set(range(plan.world_size)) - headers.keys())
    if missing:
        return [
            Problem(
                "SR-JOB-RANKS",
                f"{len(missing)} of {plan.world_size} ranks left no trace",
                where={"stage": plan.stage, "rank": missing[0]},
                expected=f"ranks 0..{plan.world_size - 1}",
                found=f"ranks {', '.join(map(str, sorted(headers)))}",
                hint="every rank must attach the recorder; on several machines the trace directory must be shared",
            )
        ]
    return []


def _check_stage(headers: Mapping[int, Header], plan: JobPlan) -> list[Problem]:
    wrong = {rank: line.stage for rank, line in headers.items() if line.stage != plan.stage}
    if not wrong:
        return []
    rank = min(wrong)
    return [
        Problem(
            "SR-JOB-STAGE",
            "the job recorded another stage than the one it was started for",
            where={"stage": plan.stage, "rank": rank},
            expected=plan.stage,
            found=wrong[rank],
            hint="the launch command must hand SAMERUN_STAGE on to the ranks unchanged",
        )
    ]


def _check_layout(headers: Mapping[int, Header], plan: JobPlan) -> list[Problem]:
    for rank, header in sorted(headers.items()):
        for axes in (header.layout, header.declared_layout):
            if axes is not None and (problem := _layout_differs(axes, plan, rank)) is not None:
                return [problem]
        if header.layout is None:
            return [_not_reported(plan, rank, "layout", "pass layout= to recorder.attach")]
        expected = plan.layout.coordinate(rank)
        if header.coordinate and {axis: header.coordinate.get(axis, 0) for axis in expected} != expected:
            return [
                Problem(
                    "SR-JOB-LAYOUT",
                    "a rank sits at another place in the mesh than the sealed plan says",
                    where={"stage": plan.stage, "rank": rank},
                    expected=_axes(expected),
                    found=_axes(header.coordinate),
                    hint="axes are ordered pp, dp_replicate, dp_shard, cp, tp with tp changing fastest",
                )
            ]
    return []


def _layout_differs(axes: Mapping[str, int], plan: JobPlan, rank: int) -> Problem | None:
    try:
        found = str(Layout.from_dict(axes))
    except (ValueError, TypeError) as error:
        found = f"{dict(axes)}: {error}"
    if found == str(plan.layout):
        return None
    return Problem(
        "SR-JOB-LAYOUT",
        "the job arranges its ranks in another way than the sealed plan",
        where={"stage": plan.stage, "rank": rank},
        expected=str(plan.layout),
        found=found,
        hint="build the device mesh from {layout} in the launch command",
    )


def _axes(coordinate: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {place}" for axis, place in coordinate.items())


def _check_batch(headers: Mapping[int, Header], plan: JobPlan) -> list[Problem]:
    for rank, line in sorted(headers.items()):
        batch = line.batch
        if batch is None:
            return [_not_reported(plan, rank, "batch", "pass sampler= or batch= to recorder.attach")]
        differing = _batch_differences(batch, plan)
        if differing:
            return [
                Problem(
                    "SR-JOB-BATCH",
                    f"the job deals its batch in another way than the sealed plan: {', '.join(differing)}",
                    where={"stage": plan.stage, "rank": rank},
                    expected="; ".join(f"{name} {expected}" for name, (expected, _) in differing.items()),
                    found="; ".join(f"{name} {found}" for name, (_, found) in differing.items()),
                    hint="global batch, passes and microbatches must come from the plan, not from microbatch x ranks",
                )
            ]
    return []


def _batch_differences(batch: Mapping[str, Any], plan: JobPlan) -> dict[str, tuple[Any, Any]]:
    planned: dict[str, Any] = {
        "global_batch": plan.global_batch,
        "passes": plan.passes,
        "replicas": plan.layout.batch_replicas,
    }
    differing = {name: (value, batch.get(name)) for name, value in planned.items() if batch.get(name) != value}
    found = batch.get("microbatches")
    if plan.microbatches is not None and found is not None and not differing:
        dealt = tuple(tuple(row) for row in found)
        if dealt != plan.microbatches:
            differing["microbatches"] = (_rows(plan.microbatches), _rows(dealt))
    return differing


def _rows(microbatches: Sequence[Sequence[int]]) -> str:
    return " | ".join(",".join(map(str, row)) for row in microbatches)


def _not_reported(plan: JobPlan, rank: int, what: str, hint: str) -> Problem:
    return Problem(
        "SR-JOB-UNREPORTED",
        f"the job does not report its {what}, so it cannot be compared with the sealed plan",
        where={"stage": plan.stage, "rank": rank},
        expected=plan.describe(),
        found="not reported",
        hint=hint,
    )

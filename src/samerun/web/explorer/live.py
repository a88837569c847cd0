"""A run directory as it is now, also while `samerun run` writes it: stages, the running job, its numbers, its log.

Only small files and the ends of large ones are read, so that looking every second costs nothing. The directory's lock
is not touched, because holding it for a moment could refuse a run that starts just then; `/proc/locks` tells of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samerun.errors import Problem, SamerunError
from samerun.report.charts import Panel, Series, draw_panel
from samerun.report.model import STAGE_TITLES
from samerun.runner.rundir import RunDirectory
from samerun.verify.evidence.stage import CONTROL, CONVERT, JUDGE, STAGES, UPDATE, StageResult, problem_from_json
from samerun.web.explorer.findings import explain

LOG_BYTES = 8_192
TRACE_BYTES = 1 << 20
"""The end of a trace that is read: some thousand updates."""
_LOCKS = Path("/proc/locks")


def read_live(root: Path) -> dict[str, Any]:
    """Returns what the page shows of a run directory, as JSON.

    Raises:
        UsageError: if it is none, or a file of it is damaged.
    """
    place = RunDirectory(root)
    place.require()
    state, verdict = place.read_state(), _read_json(place.verdict)
    results: dict[str, StageResult] = {name: result for name in STAGES if (result := place.read_result(name))}
    busy = is_locked(root / "lock")
    running = _running_stage(place, state, results, busy)
    problems = [problem for result in results.values() if result.stage != JUDGE for problem in result.problems]
    if verdict:
        problems = _reasons(verdict)
    return {
        "title": root.name,
        "verdict": verdict.get("verdict"),
        "label": verdict.get("label"),
        "sealed": place.sealed.is_file(),
        "busy": busy,
        "stages": [_stage(place, name, results.get(name), running) for name in _stages(place, results)],
        "running": None if running is None else _job(place, running, state),
        "findings": explain(problems),
        "report": bool(results),
    }


def is_locked(path: Path) -> bool | None:
    """Returns whether some process holds a lock on a file; None where the system does not tell."""
    try:
        found, table = os.stat(path), _LOCKS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None if path.exists() else False
    mark = f":{found.st_ino} "
    return any("FLOCK" in line and mark in line for line in table.splitlines())


def _stages(place: RunDirectory, results: Mapping[str, StageResult]) -> tuple[str, ...]:
    converts = CONVERT in results or place.stage(CONVERT).is_dir()
    return tuple(name for name in STAGES if name != CONVERT or converts)


def _running_stage(
    place: RunDirectory, state: Mapping[str, Any], results: Mapping[str, StageResult], busy: bool | None
) -> str | None:
    """Returns the stage that is being run: the job's, else the first folder without a result."""
    job = state.get("job")
    if busy is False:
        return None
    if isinstance(job, Mapping) and job.get("stage") in STAGES:
        return str(job["stage"])
    started = [name for name in STAGES if name not in results and place.stage(name).is_dir()]
    return started[0] if started else None


def _stage(place: RunDirectory, name: str, result: StageResult | None, running: str | None) -> dict[str, Any]:
    title, question = STAGE_TITLES[STAGES.index(name)]
    begun = result is None and place.stage(name).is_dir()
    return {
        "name": name,
        "title": title,
        "question": question,
        "status": "running" if name == running else result.status if result else "interrupted" if begun else "waiting",
        "seconds": result.seconds if result else None,
        "started": result.started if result else None,
        "codes": sorted({problem.code for problem in result.problems}) if result else [],
        "evidence": f"stages/{name}/result.json" if result else None,
        "log": f"stages/{name}/log.txt" if (place.stage(name) / "log.txt").is_file() else None,
    }


def _job(place: RunDirectory, stage: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the running job: how many updates of how many, the last numbers, the end of its log."""
    folder = _newest_job(place.stage(stage))
    updates = list(read_updates(folder / "trace" / "rank-00000.jsonl"))
    control = list(read_updates(place.stage(CONTROL) / "trace" / "rank-00000.jsonl")) if stage > CONTROL else []
    plan = _read_json(place.plan)
    expected = 1 if stage == UPDATE else plan.get("window_updates") if stage > UPDATE or stage == CONTROL else None
    last = _last_written(folder)
    return {
        "stage": stage,
        "part": "" if folder == place.stage(stage) else folder.name,
        "updates": _num_done(updates, plan.get("first_update")),
        "expected": expected if isinstance(expected, int) else None,
        "last": updates[-1] if updates else None,
        "silent_seconds": None if last is None else max(0.0, round(time.time() - last, 1)),
        "log": read_end(folder / "log.txt"),
        "chart": draw_losses(updates, control),
        "job": bool(state.get("job")),
    }


def _num_done(updates: list[dict[str, Any]], first: Any) -> int:
    """Returns how many updates were made. Of a long trace only the end was read, so it is the index that counts."""
    if not updates:
        return 0
    return updates[-1]["update"] - (first if isinstance(first, int) else updates[0]["update"]) + 1


def _newest_job(folder: Path) -> Path:
    """Returns the folder of the job that runs: the stage's own, or that of a further control."""
    jobs = [folder, *(path for path in folder.glob("repeat-*") if path.is_dir())]
    return max(jobs, key=lambda path: (_last_written(path) or 0.0, len(path.parts)))


def _last_written(folder: Path) -> float | None:
    times: list[float] = []
    for pattern in ("log.txt", "trace/rank-00000.jsonl", "result.json"):
        try:
            times.append((folder / pattern).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def read_updates(path: Path) -> Iterator[dict[str, Any]]:
    """Yields update, loss and gradient norm of the updates at the end of a rank's trace, whole lines only."""
    for line in read_end(path, TRACE_BYTES).split("\n")[:-1]:
        try:
            body = json.loads(line)
        except ValueError:  # the first line that was read is a part of one
            continue
        if isinstance(body, dict) and body.get("kind") == "update" and isinstance(body.get("update"), int):
            yield {name: body.get(name) for name in ("update", "loss", "grad_norm", "skipped")}


def read_end(path: Path, num_bytes: int = LOG_BYTES) -> str:
    """Returns the last bytes of a text file; nothing if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def draw_losses(updates: list[dict[str, Any]], control: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the losses as a drawing of the report's: the control's under the running job's."""
    numbers = sorted({item["update"] for item in (*updates, *control)})
    if not updates or not numbers:
        return None

    def values(items: list[dict[str, Any]]) -> tuple[float | None, ...]:
        found = {item["update"]: item["loss"] for item in items if isinstance(item["loss"], int | float)}
        return tuple(found.get(number) for number in numbers)

    series = [Series(label="this job", style="candidate", values=values(updates))]
    if control:
        series.insert(0, Series(label="control", style="control", values=values(control)))
    drawing = draw_panel(Panel(title="loss", scale="linear", series=tuple(series)))
    return {
        "first": numbers[0],
        "last": numbers[-1],
        "lines": [
            {"label": line.label, "style": line.style, "path": line.path, "dots": line.dots} for line in drawing.lines
        ],
        "ticks": [{"percent": tick.percent, "label": tick.label} for tick in drawing.ticks],
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object that is written whole, or nothing if it is not there or is none."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _reasons(verdict: Mapping[str, Any]) -> list[Problem]:
    try:
        return [problem_from_json(item) for item in (*verdict.get("reasons", ()), *verdict.get("remarks", ()))]
    except (KeyError, TypeError, ValueError, SamerunError):
        return []

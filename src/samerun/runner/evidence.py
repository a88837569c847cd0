"""Evidence as it lies in a run directory: traces read into what the checks take, and what of it is sealed."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samerun.core.dtype import parse_dtype
from samerun.core.tolerance import Band
from samerun.errors import Problem, UsageError
from samerun.manifest.models import Manifest
from samerun.manifest.tolerances import METRICS, UserTolerance
from samerun.trace import read_trace
from samerun.verify.evidence.observed import Observed, observe
from samerun.verify.updates.bands import plan_bands, split_bands, vanishing
from samerun.verify.updates.controls import Controls, complete_reference
from samerun.verify.updates.evaluate import Evaluation, evaluation_of
from samerun.verify.updates.oracle import Oracle

FIRST, REPEAT, ORACLE = "first", "repeat-{}", "oracle"


def read_observed(folder: Path) -> Observed | None:
    """Returns what a job recorded in `folder`, or None when no rank of it wrote a usable trace."""
    try:
        return observe(read_trace(folder))
    except UsageError as error:
        if {problem.code for problem in error.problems} <= {"SR-TRACE-NONE", "SR-TRACE-HEADER"}:
            return None
        raise


def read_evaluation(folder: Path, observed: Observed) -> Evaluation | None:
    """Returns the first fixed-example evaluation of a trace with its logits, or None if there was none."""
    if not observed.evals:
        return None
    line = observed.evals[0]
    name = (line.logits or {}).get("file")
    logits = None
    if name is not None:
        path = folder / Path(str(name)).name  # a bare file name, whatever the line says
        logits = np.load(path, allow_pickle=False) if path.is_file() else None
    return evaluation_of(line, logits)


def find_recorded(path: Path) -> list[Path]:
    """Returns the traces at `path`: itself, or its subdirectories that are traces, in order of name.

    A control stage's folder counts too: its own trace first, then those of its repeats.
    """
    if any(path.glob("rank-*.jsonl")):
        return [path]
    if not path.is_dir():
        return []
    children = sorted(child for child in path.iterdir() if child.is_dir())
    nested = [child / "trace" for child in children]
    return [child for child in (*children, *nested) if any(child.glob("rank-*.jsonl"))]


def run_folders(stage: Path, count: int) -> dict[str, Path]:
    """Returns the folders of `count` control jobs below the control stage, by name, the reference first.

    The reference has the stage's own `trace/` and `log.txt`; each repeat has a folder of its own beside them.
    """
    names = [FIRST, *(REPEAT.format(number) for number in range(2, count + 1))]
    return {name: stage if name == FIRST else stage / name for name in names[:count]}


def control_traces(manifest: Manifest, stage: Path) -> dict[str, Path]:
    """Returns every control's trace folder by name: recorded ones, then those that were run, then the fp64 oracle.

    The first is the reference.

    Args:
        manifest: the decided manifest.
        stage: the control stage's folder.
    """
    recorded = sorted(stage.glob("recorded-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    ran = run_folders(stage, num_control_jobs(manifest))
    found = {path.name: path / "trace" for path in recorded} | {name: path / "trace" for name, path in ran.items()}
    return found | ({ORACLE: stage / ORACLE / "trace"} if manifest.control.oracle else {})


def keep_recorded(source: Path, stage: Path, *, first_update: int, num_updates: int) -> list[str]:
    """Copies what matters of recorded traces into the control stage's folder, so that the evidence stays complete.

    A ledger may cover months; only its header, the updates and boundaries of the window, and evaluations at the
    checkpoint are kept. Returns the names of the folders made.
    """
    names: list[str] = []
    for number, trace in enumerate(find_recorded(source), start=1):
        names.append(f"recorded-{number}")
        folder = stage / names[-1] / "trace"
        folder.mkdir(parents=True)
        for path in sorted(trace.glob("rank-*.jsonl")):
            _copy_window(path, folder, range(first_update - 1, first_update + num_updates))
    return names


def _copy_window(path: Path, folder: Path, kept: range) -> None:
    completed = 0
    with path.open("rb") as source, (folder / path.name).open("wb") as copy:
        for line in source:
            body = _parse(line)
            if body is not None and body["kind"] not in ("header", "end") and body.get("update") not in kept:
                continue
            if body is not None and body["kind"] == "update" and not body.get("skipped"):
                completed += 1
            if body is not None and body["kind"] == "end":  # it counts the updates of its file
                line = json.dumps({**body, "updates": completed}).encode() + b"\n"
            copy.write(line)  # a damaged line too: it is for the reader to report
            name = (body.get("logits") or {}).get("file") if body and body["kind"] == "eval" else None
            if name and (array := path.parent / Path(str(name)).name).is_file():
                shutil.copy2(array, folder / array.name)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(line)
    except ValueError:
        return None
    return body if isinstance(body, dict) and "kind" in body else None


def num_control_jobs(manifest: Manifest) -> int:
    """Returns how many control jobs are launched on the source layout.

    A recorded `trace` needs none. A recorded `continuation` takes the place of the first one: the others resume the
    checkpoint, and thereby also show that a resume on the old layout is the uninterrupted run.
    """
    control = manifest.control
    match control.kind:
        case "original-layout":
            return control.repeats
        case "continuation":
            return max(control.repeats - 1, 0)
        case "trace":
            return 0


def read_controls(folders: Mapping[str, Path]) -> Controls:
    """Reads the controls, those with a usable trace; what the reference lacks is filled from the others."""
    found = {name: observed for name, path in folders.items() if (observed := read_observed(path)) is not None}
    truth = found.pop(ORACLE, None)
    if not found:
        raise UsageError(_no_control(folders))
    evaluations = tuple(read_evaluation(folders[name], observed) for name, observed in found.items())
    oracle = None
    if truth is not None:
        update = truth.updates[0] if truth.updates else None
        oracle = Oracle(update=update, evaluation=read_evaluation(folders[ORACLE], truth))
    read = Controls(names=tuple(found), observed=tuple(found.values()), evaluations=evaluations, oracle=oracle)
    return complete_reference(read)


def _no_control(folders: Mapping[str, Path]) -> Problem:
    return Problem(
        "SR-CONTROL-MISSING",
        "there is no control: nothing that a candidate could be compared with was recorded",
        where={"stage": "control", **({"file": str(next(iter(folders.values())))} if folders else {})},
        hint="control.trace must be a directory of rank-NNNNN.jsonl, or of such directories",
    )


def resolve_bands(manifest: Manifest, controls: Controls) -> tuple[tuple[Band, ...], tuple[str, ...], list[Problem]]:
    """Returns (bands, tensors left out as noise, findings) for the manifest's window."""
    bands = plan_bands(
        controls,
        manifest.settled_tolerances(),
        first_update=manifest.progress.update + 1,
        num_updates=manifest.window.updates,
        precision=parse_dtype(manifest.run.precision),
    )
    return split_bands(bands, vanishing(controls, bands), at_least=manifest.window.at_least)


def judged_bands(manifest: Manifest, bands: Sequence[Band]) -> tuple[Band, ...]:
    """Returns the bands that apply under the manifest's label.

    An intentional change, or a warm start, is expected to differ from the control; then only limits that the user
    stated for it count, and for a warm start the forward pass, which no optimizer can change.
    """
    label = manifest.transition.label
    if label in ("continuation", "approximate-continuation"):
        return tuple(bands)
    stated = {name for name in METRICS if isinstance(getattr(manifest.tolerances, name), UserTolerance)}
    forward = {"eval_loss", "eval_logits"} if manifest.declare.dtype == "exact" else set[str]()
    return tuple(band for band in bands if band.metric in stated | forward)


def hash_folder(folder: Path) -> str:
    """Returns `sha256:...` over the names and whole contents of the files of a trace."""
    parts = [f"{path.name} {hash_file(path)}\n" for path in sorted(folder.iterdir()) if path.is_file()]
    return f"sha256:{hashlib.sha256(''.join(parts).encode()).hexdigest()}"


def hash_file(path: Path) -> str:
    """Returns `sha256:...` of a file's content."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def throughput(observed: Observed) -> dict[str, float] | None:
    """Returns samples and tokens per second over the recorded updates but the first, or None if they took no time.

    Measured apart from everything that is judged: another layout may be faster or slower and be the same run.
    """
    timed = [item for item in observed.updates if item.seconds is not None]
    if len(timed) < 2 or timed[0].seconds is None or timed[-1].seconds is None:
        return None
    elapsed = timed[-1].seconds - timed[0].seconds
    if not (elapsed > 0 and math.isfinite(elapsed)):
        return None
    rates = {"samples_per_second": sum(item.samples for item in timed[1:]) / elapsed}
    if all(item.tokens is not None for item in timed[1:]):
        rates["tokens_per_second"] = sum(item.tokens or 0 for item in timed[1:]) / elapsed
    return rates

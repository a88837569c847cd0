"""Run directories that a real migration left behind (`tests/golden/runs`), and what can be made of them."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from samerun.report.model import Job, ReportModel
from samerun.trace import StateLine
from samerun.verify.evidence.observed import Observed

RUNS = Path(__file__).parents[1] / "golden" / "runs"


def unpack_run(name: str, folder: Path) -> Path:
    """Unpacks the run directory `name` ("promote" or "reject") below `folder` and returns it."""
    with tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def enlarge(model: ReportModel, *, num_updates: int, num_tensors: int) -> ReportModel:
    """Returns the model as if the same jobs had made many more updates of a model with many more tensors."""
    return replace(
        model,
        controls=tuple(_enlarge_job(job, num_updates, num_tensors) for job in model.controls),
        candidates={name: _enlarge_job(job, num_updates, num_tensors) for name, job in model.candidates.items()},
        bands=tuple(
            replace(band, limits=band.limits * (num_updates // len(band.limits)))
            if band.tensor is None and len(band.limits) > 1
            else band
            for band in model.bands
        ),
    )


def _enlarge_job(job: Job, num_updates: int, num_tensors: int) -> Job:
    observed = job.observed
    updates = observed.updates
    if len(updates) > 1:
        first = updates[0].update
        updates = tuple(replace(updates[i % len(updates)], update=first + i) for i in range(num_updates))
    if updates and updates[0].moved:
        moved = _many(updates[0].moved, num_tensors)
        updates = (replace(updates[0], moved=moved), *updates[1:])
    states = tuple(_enlarge_state(state, num_tensors) for state in observed.states)
    larger: Observed = replace(observed, updates=updates, states=states)
    return replace(job, observed=larger)


def _enlarge_state(state: StateLine, num_tensors: int) -> StateLine:
    return replace(state, body={**state.body, "tensors": _many_parts(state.body["tensors"], num_tensors)})


def _many_parts(tensors: dict[str, Any], num_tensors: int) -> dict[str, Any]:
    """Returns as many tensors of every role and slot; buffers stay few."""
    many = {key: fact for key, fact in tensors.items() if key.startswith("buffer:")}
    for part in sorted({key.partition(":")[0] for key in tensors} - {"buffer"}):
        many |= _many({key: fact for key, fact in tensors.items() if key.startswith(f"{part}:")}, num_tensors)
    return many


def _many(named: dict[str, object], count: int) -> dict[str, object]:
    """Returns `count` entries with names of the length that large models have."""
    items = sorted(named.items())
    made: dict[str, object] = {}
    for number in range(count):
        key, value = items[number % len(items)]
        head, colon, name = key.rpartition(":")
        made[f"{head}{colon}model.decoder.layers.{number // len(items)}.{name}"] = value
    return made


def enlarge_run(root: Path, *, num_updates: int, num_tensors: int) -> Path:
    """Makes a run directory as if its jobs had made many more updates of a model with many more tensors.

    Every line is one that a real job wrote, repeated under further numbers and names; sealed limits are repeated too.
    """
    for trace in root.glob("stages/**/trace/rank-*.jsonl"):
        lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        with trace.open("w", encoding="utf-8") as file:
            for line in _enlarge_lines(lines, num_updates, num_tensors):
                file.write(json.dumps(line) + "\n")
    sealed = json.loads((root / "sealed.json").read_text(encoding="utf-8"))
    for record in sealed["seals"]:
        bands = record["tolerances"]
        bands["parameter_delta"] = _many(bands["parameter_delta"], num_tensors)
        for name, band in bands["parameter_delta"].items():
            bands["parameter_delta"][name] = {**band, "tensor": name}
        for band in bands.values():
            if isinstance(band, dict) and len(band.get("limits") or ()) > 1:
                band["limits"] = band["limits"] * (num_updates // len(band["limits"]))
    (root / "sealed.json").write_text(json.dumps(sealed), encoding="utf-8")
    return root


def _enlarge_lines(lines: list[dict[str, Any]], num_updates: int, num_tensors: int) -> Iterator[dict[str, Any]]:
    updates = [line for line in lines if line["kind"] == "update"]
    for line in lines:
        if line["kind"] == "state":
            yield {**line, "tensors": _many_parts(line["tensors"], num_tensors)}
        elif line["kind"] != "update":
            yield line
        elif line is updates[0]:
            count = num_updates if len(updates) > 1 else 1
            for number in range(count):
                made = {**updates[number % len(updates)], "update": line["update"] + number}
                moved = line.get("moved") if number == 0 else None
                yield made | ({"moved": _many(moved, num_tensors)} if moved else {})

"""Run directories that a real migration left behind (`tests/golden/runs`), and what can be made of them."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

from samerun.report.model import Job, ReportModel
from samerun.trace import StateLine
from samerun.verify.observed import Observed

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
    tensors = state.body["tensors"]
    many = {key: fact for key, fact in tensors.items() if key.startswith("buffer:")}
    for part in sorted({key.partition(":")[0] for key in tensors} - {"buffer"}):
        many |= _many({key: fact for key, fact in tensors.items() if key.startswith(f"{part}:")}, num_tensors)
    return replace(state, body={**state.body, "tensors": many})


def _many(named: dict[str, object], count: int) -> dict[str, object]:
    """Returns `count` entries with names of the length that large models have."""
    items = sorted(named.items())
    made: dict[str, object] = {}
    for number in range(count):
        key, value = items[number % len(items)]
        head, colon, name = key.rpartition(":")
        made[f"{head}{colon}model.decoder.layers.{number // len(items)}.{name}"] = value
    return made

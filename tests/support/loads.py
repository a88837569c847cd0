"""Both sides of a load proof: a real one-process job, captured, and the checkpoint that torch says it would write."""

from __future__ import annotations

import copy
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import ParamGroup, RecordedProgress
from samerun.train.capture import capture_state
from support import toy
from support.memory import MemoryCheckpoint


def make_job(updates: int = 3, **options: Any) -> toy.Job:
    job = toy.build(Layout(), **options)
    toy.train(job, updates)
    return job


def capture(job: toy.Job) -> dict[str, Any]:
    captured = capture_state(job.model, job.optimizer, scheduler=job.scheduler, objects=job.objects, layout=job.layout)
    return captured.to_json() | {"update": job.progress["update"]}


def save(job: toy.Job, **changes: Any) -> MemoryCheckpoint:
    names = {id(p): name for name, p in job.model.named_parameters()}
    parts: dict[str, Any] = {
        "arrays": toy.full_state(job),
        "groups": [
            ParamGroup(tuple(names[id(p)] for p in group["params"]), {k: v for k, v in group.items() if k != "params"})
            for group in job.optimizer.param_groups
        ],
        "progress": RecordedProgress(update=job.progress["update"]),
        "scheduler": copy.deepcopy(job.scheduler.state_dict()),
        "objects": {"progress": dict(job.progress), "config": {**vars(job.config)}},
        "aliases": {"param:tok.weight": ("head.weight",)} if job.config.tied else {},
    }
    for name, change in changes.items():
        parts[name] = change(parts[name]) if callable(change) else change
    return MemoryCheckpoint(**parts)

"""One complete, decided manifest as plain data, to be varied by tests."""

from __future__ import annotations

import copy
from typing import Any

from samerun.manifest.draft import yaml_value
from samerun.manifest.models import Manifest
from samerun.manifest.tolerances import METRICS

COMPLETE: dict[str, Any] = {
    "samerun": 1,
    "run": {
        "name": "demo",
        "framework": "pytorch",
        "checkpoint": "ckpt/step-12",
        "format": "dcp",
        "model_commit": "4f0c2d1",
        "precision": "float32",
        "optimizer": "AdamW",
    },
    "source": {"layout": {"dp_shard": 4}, "world_size": 4},
    "destination": {"layout": {"dp_shard": 3}, "world_size": 3, "device_memory": None},
    "progress": {"update": 12, "samples": 384, "tokens": 24000, "epoch": 0, "scheduler": {"last_epoch": 12}},
    "batch": {"invariant": "samples-per-update", "global_batch": 32, "max_microbatch": 2, "option": "ragged"},
    "declare": {
        "parameters": "exact",
        "buffers": "exact",
        "optimizer": "exact",
        "order": "exact",
        "batch": "exact",
        "schedule": "exact",
        "rng": "expected-to-change",
        "dtype": "exact",
        "objects": "exact",
    },
    "transition": {"label": "continuation"},
    "control": {"kind": "original-layout", "repeats": 2, "vary_microbatch": 1},
    "tolerances": {metric: {"from": "control", "factor": 10, "floor": 1.0e-6} for metric in METRICS},
    "window": {"updates": 20, "log_every": 10, "eval_every": 20},
    "launch": {
        "command": "{python} train.py --resume {checkpoint} --layout {layout} --global-batch {global_batch}",
        "environment": {"OMP_NUM_THREADS": "1"},
        "timeout_seconds": 600,
    },
}


def manifest_data(**changes: Any) -> dict[str, Any]:
    """Returns a copy of `COMPLETE` with dotted keys, written with two underscores, replaced: `batch__option="uniform"`.

    The value `...` removes the key.
    """
    data = copy.deepcopy(COMPLETE)
    for dotted, value in changes.items():
        *above, last = dotted.split("__")
        node = data
        for step in above:
            node = node[step]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return data


def manifest(**changes: Any) -> Manifest:
    """Returns the validated manifest with `changes` as for `manifest_data`."""
    return Manifest.from_data(manifest_data(**changes))


def to_yaml(data: dict[str, Any], indent: int = 0) -> str:
    """Returns block-style YAML with one key per line, so that every leaf has a line of its own."""
    lines: list[str] = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            lines += [f"{' ' * indent}{key}:", to_yaml(value, indent + 2).rstrip("\n")]
        else:
            lines.append(f"{' ' * indent}{key}: {yaml_value(value)}")
    return "\n".join(lines) + "\n"


def leaves(data: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Returns every leaf by its dotted key."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        dotted = f"{above}.{key}" if above else key
        found |= leaves(value, dotted) if isinstance(value, dict) and value else {dotted: value}
    return found


def line_of(text: str, dotted: str) -> int:
    """Returns the line of a dotted key in the text of `to_yaml`, 1-based."""
    number = 0
    rows = text.splitlines()
    for depth, step in enumerate(dotted.split(".")):
        while rows[number].split(":")[0] != " " * (2 * depth) + step:
            number += 1
    return number + 1

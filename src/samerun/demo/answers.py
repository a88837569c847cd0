"""What the demonstration answers where a draft asks: the decisions that are a person's in real life."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samerun.core.batch import plan_batch
from samerun.demo.workspace import DemoSettings

COMMAND = "bash launch.sh {python} {world_size} {layout} {global_batch} {max_microbatch} {checkpoint}"


def decide(settings: DemoSettings, example: Path) -> dict[str, Any]:
    """Returns the answers by dotted key of the manifest."""
    script = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(example.glob("*.py")))).hexdigest()
    return {
        "run.name": f"demo to {settings.destination}",
        "run.model_commit": script[:12],
        "run.precision": "bfloat16" if settings.precision != "float32" else "float32",
        "source.layout": settings.source.to_dict(short=True),
        "source.world_size": settings.source.world_size,
        "batch.invariant": "samples-per-update",
        "batch.global_batch": settings.global_batch,
        "batch.max_microbatch": settings.max_microbatch,
        "batch.option": _exact_option(settings),
        "transition.label": "continuation",
        "control.kind": "original-layout",
        "control.vary_microbatch": 1,
        "window.updates": settings.window_updates,
        "window.at_least": 10,
        "window.log_every": 10,
        "window.eval_every": 20,
        "launch.command": COMMAND,
        "launch.environment": {"OMP_NUM_THREADS": "1"},
        "launch.timeout_seconds": 600,
    }


def _exact_option(settings: DemoSettings) -> str:
    options = plan_batch(settings.global_batch, settings.destination.batch_replicas, settings.max_microbatch)
    return next(option.kind for option in options if option.exact)


def fill_in(manifest: Path, answers: Mapping[str, Any]) -> None:
    """Writes the answers into a drafted manifest, comments and all else kept."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 4096
    document = yaml.load(manifest.read_text(encoding="utf-8"))
    for key, value in answers.items():
        section, _, field = key.partition(".")
        document[section][field] = value
    text = io.StringIO()
    yaml.dump(document, text)
    manifest.write_text(text.getvalue(), encoding="utf-8")

"""Curves as TensorBoard event files: a directory per run. Needs the package `tensorboard`."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samerun.report.curves import Curves, series
from samerun.verify.evidence.observed import ObservedUpdate


def write(curves: Curves, folder: Path, final: Path, began: float) -> list[Path]:
    """Writes the runs, and returns each one's place in `folder`. An event lies as long after `began` as its update."""
    for name, updates in curves.items():
        _write_run(folder / name, updates, began)
    return [Path(name) for name in curves]


def _write_run(folder: Path, updates: Sequence[ObservedUpdate], began: float) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    try:
        for item in updates:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in series(item)]
            when = began + (item.seconds or 0.0)
            writer.add_event(Event(wall_time=when, step=item.update, summary=Summary(value=values)))
    finally:
        writer.close()

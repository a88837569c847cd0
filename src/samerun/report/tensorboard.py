"""The curves of jobs as TensorBoard event files: controls and candidates as runs beside one another.

One run per job, one series per quantity, a step per update: `loss`, `grad_norm`, `update_norm`, `learning_rate/N` of
each parameter group, `loss_scale`, `samples` and `tokens` of the global batch. Needs the package `tensorboard`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

from samerun.errors import Problem, UsageError
from samerun.report.model import ReportModel
from samerun.verify.observed import ObservedUpdate

Curves = Mapping[str, Sequence[ObservedUpdate]]


def curves_of(model: ReportModel) -> Curves:
    """Returns the updates of every job in a run directory by a name for its run, such as `candidate-window`."""
    jobs = (*model.controls, *model.candidates.values())
    return {job.name.replace(" ", "-"): job.observed.updates for job in jobs if job.observed.updates}


def write_events(curves: Curves, folder: Path, *, began: float) -> list[Path]:
    """Writes one directory per run into `folder`, which appears whole or not at all, and returns them.

    Args:
        curves: updates by the name of their run.
        folder: where TensorBoard is to look (`tensorboard --logdir`); may not exist.
        began: seconds since the epoch at which the jobs count as begun; an event lies as long after it as its update.

    Raises:
        UsageError: if the package is missing, the folder exists (SR-REPORT-EVENTS), or there is nothing to draw.
    """
    _require(curves, folder)
    partial = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.resolve().parent))
    try:
        for name, updates in curves.items():
            _write_run(partial / name, updates, began)
        partial.chmod(0o777 & ~_umask())
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [folder / name for name in curves]


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


def series(item: ObservedUpdate) -> Iterator[tuple[str, float]]:
    """Yields (tag, value) of everything that an update tells."""
    numbers = {
        "loss": item.loss,
        "grad_norm": item.grad_norm,
        "update_norm": item.update_norm,
        **{f"learning_rate/{number}": rate for number, rate in enumerate(item.lr)},
        "loss_scale": item.loss_scale,
        "samples": item.samples,
        "tokens": item.tokens,
    }
    yield from ((tag, float(value)) for tag, value in numbers.items() if value is not None)


def _require(curves: Curves, folder: Path) -> None:
    problems: list[Problem] = []
    where = {"file": str(folder)}
    if find_spec("tensorboard") is None:
        hint = "pip install 'samerun[tensorboard]'"
        problems.append(Problem("SR-REPORT-EVENTS", "the package tensorboard is missing", where=where, hint=hint))
    if os.path.lexists(folder):
        hint = "name a new directory: older curves under it would mix with these"
        problems.append(Problem("SR-REPORT-EVENTS", "something is there already", where=where, hint=hint))
    elif not folder.resolve().parent.is_dir():
        hint = "make the directory that it is to lie in"
        problems.append(Problem("SR-REPORT-EVENTS", "there is no directory to put it in", where=where, hint=hint))
    if not curves:
        hint = "only jobs that made updates have curves"
        problems.append(Problem("SR-REPORT-EVENTS", "no job recorded an update yet", where=where, hint=hint))
    if problems:
        raise UsageError(problems)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

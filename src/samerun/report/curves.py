"""The curves of jobs for other tools: controls and candidates as runs beside one another.

One run per job, one series per quantity, a step per update: `loss`, `grad_norm`, `update_norm`, `learning_rate/N` of
each parameter group, `loss_scale`, `samples` and `tokens` of the global batch. A writer per tool has a module beside
this one. Nothing is sent anywhere: each writes the files from which its tool shows runs or sends them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

from samerun.errors import Problem, UsageError
from samerun.report.model import ReportModel
from samerun.verify.evidence.observed import ObservedUpdate

Curves = Mapping[str, Sequence[ObservedUpdate]]

TOOLS = ("tensorboard", "wandb", "mlflow")
"""Each is a package, an extra of samerun's, a module here whose name ends in `_runs`, and an option of two verbs."""


def curves_of(model: ReportModel) -> Curves:
    """Returns the updates of every job in a run directory by a name for its run, such as `candidate-window`."""
    jobs = (*model.controls, *model.candidates.values())
    return {job.name.replace(" ", "-"): job.observed.updates for job in jobs if job.observed.updates}


def write_curves(curves: Curves, folder: Path, *, to: str, began: float) -> list[Path]:
    """Writes the runs into `folder`, which appears whole or not at all, and returns where each lies.

    Args:
        curves: updates by the name of their run.
        folder: where the tool is to look; may not exist.
        to: one of `TOOLS`.
        began: seconds since the epoch at which the jobs count as begun.

    Raises:
        UsageError: if the package is missing, the folder exists (SR-REPORT-EVENTS), or there is nothing to draw.
    """
    _require(curves, folder, to)
    folder = folder.resolve()
    partial = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        places = import_module(f"samerun.report.{to}_runs").write(curves, partial, folder, began)
        partial.chmod(0o777 & ~_umask())
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [folder / place for place in places]


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


@contextmanager
def environment(**variables: str) -> Generator[None]:
    """Sets variables of the environment, which is where these tools look before anything else, for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _require(curves: Curves, folder: Path, to: str) -> None:
    problems: list[Problem] = []
    where = {"file": str(folder)}
    if find_spec(to) is None:
        hint = f"pip install 'samerun[{to}]'"
        problems.append(Problem("SR-REPORT-EVENTS", f"the package {to} is missing", where=where, hint=hint))
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
